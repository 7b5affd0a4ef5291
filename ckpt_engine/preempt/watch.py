"""Whether a run must stop, and until when: signals, sources and requests as one answer for the training thread."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckpt_engine.config import Config, Preemption
from ckpt_engine.errors import CkptError
from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.durability import DurabilityStatus, Ledger, PendingCommit
from ckpt_engine.observe.events import LOG, Event, MemoryFlushed, Requested, SnapshotFailed
from ckpt_engine.observe.units import count, duration
from ckpt_engine.preempt.stop_plan import (
    StopChoice,
    StopFacts,
    StopPlan,
    new_snapshot_seconds,
    outlook,
    plan_stop,
)
from ckpt_engine.preempt.stop_requests import (
    PreemptionSourceError,
    SignalWatch,
    Stop,
    StopNotice,
    Wake,
    launcher_source,
    open_source,
)
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.writer import control
from ckpt_engine.writer.part_records import share_place

_LOOK_SECONDS, _PAUSE_SECONDS = 0.5, 0.05
_LEAST_LOOK_SECONDS = 0.02
_LOOKS = 8
"""So many looks for what is to become durable would fit in the time that is left, however little that is."""
_IDLE_SECONDS = 3600.0
_SPARE_SECONDS = 0.25
_MEETING_SECONDS = 2.0
"""How long writers of several ranks may take to notice that all have left their shares."""
_ANSWER_SECONDS = 5.0
_END_SECONDS = 15.0
"""Longer than any source may take to answer."""


class PreemptionWatch:
    """Watches for reasons to stop from `start` to `close`.

    The training thread calls `boundary` after every step, and looks at `stop` if there is something. A
    daemon thread asks the sources, and minds the deadline once the run must stop: if the step that runs is too long for
    a snapshot at its end, it says in time what becomes durable and what is lost, lets the writer write what is only in
    memory, and watches the last snapshot become durable. Nothing of this waits for the training thread, and nothing
    makes it wait.

    Args:
        options: signals, sources, grace.
        ledger: what is durable and how fast the tiers are.
        clock: the source of moments.
        slots: snapshots that fit in host memory at once.
        newest: asks the nearest tier for the step of its newest snapshot; used by the thread, only when it is late.
        flush: lets the writer make the newest snapshot in memory durable; its step, None: there is none. Any thread.
        spare_seconds: that a flush may take besides writing.
        divided: whether nodes have roots of their own, as far as that is known.
        several: it is one of several ranks, which agree on the step of the snapshot.
    """

    def __init__(
        self,
        options: Preemption,
        ledger: Ledger,
        clock: Clock,
        *,
        slots: int,
        newest: Callable[[], int | None],
        flush: Callable[[], int | None] = lambda: None,
        spare_seconds: float = _SPARE_SECONDS,
        divided: Callable[[], bool] = lambda: False,
        several: bool = False,
    ) -> None:
        self._moment = "after a step that all ranks agree on" if several else "at the end of this step"
        self._spare_seconds = spare_seconds
        self._divided = divided
        self.grace_seconds = options.grace
        self._ledger = ledger
        self._now = clock.monotonic
        self._slots = slots
        self._newest = newest
        self._ask_to_flush = flush
        self._flushed: PendingCommit | None = None
        self._wake = Wake()
        self._signals = SignalWatch(options.numbers(), clock, self._wake)
        launcher = launcher_source(clock)
        self._sources = [open_source(one, clock) for one in options.sources]
        self._sources += [] if launcher is None else [launcher]
        # One attribute per thread that sets it; readers take the earliest.
        self._noticed: StopNotice | None = None
        self._requested: StopNotice | None = None
        self.save_asked_by: str | None = None
        """Who has asked for a snapshot, where none was taken since."""
        self._step, self._ended, self._took = 0, self._now(), 0.0
        self._first: int | None = None
        self.unseen = False
        """The loop has made steps of which no boundary was seen."""
        self._started = self._ended
        self._attended = self._closing = False
        self._told: Stop | None = None
        self._telling = threading.Lock()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    # ------------------------------------------------------------------ the training thread

    def start(self) -> None:
        """Install the signal handlers and start the thread. On the main thread, for signals to be watched."""
        self._started = self._ended = self._now()
        self._wake.open()
        for problem in self._signals.install():
            LOG.warning("not watched: %s", problem)
        self._thread = threading.Thread(target=self._run, name="ckpt-preempt", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Put the signal handlers back and end the thread. Idempotent."""
        self._signals.remove()
        if self._signals.interrupted and not self._closing:
            LOG.warning("Ctrl-C again: training stops at once; %s", self.durable())
        self._closing = True
        if self._thread is not None and os.getpid() == self._owner:
            self._wake.ring()
            self._thread.join(_END_SECONDS)
            if not self._thread.is_alive():
                self._wake.close()
            self._thread = None

    def boundary(self, step: int) -> bool:
        """Training step `step` has just ended; whether somebody wants the run to stop."""
        now = self._now()
        self._first = step if self._first is None else self._first
        self._step, self._ended, self._took = step, now, now - self._ended
        return (self._signals.heard or self._noticed or self._requested) is not None

    def trained(self, step: int) -> None:
        """Training has ended with this step, maybe without a boundary after it."""
        self._step = max(self._step, step)

    @property
    def stop(self) -> Stop | None:
        """The stop that leaves the least time, if there is any. Any thread."""
        found = [one for one in (self._signals.heard, self._noticed, self._requested) if one is not None]
        return min(map(self._stop_of, found), key=lambda one: one.deadline) if found else None

    @property
    def interrupted(self) -> bool:
        """Whether there was a second Ctrl-C: nothing is waited for any more."""
        return self._signals.interrupted

    def attend(self) -> None:
        """The training thread has reached a boundary and takes care of the stop."""
        if (stop := self.stop) is not None:
            self._announce(stop)  # before what the training thread says of it
        self._attended = True
        self._wake.ring()

    def emit(self, event: Event) -> None:
        """Takes requests; an event sink."""
        flushed = self._flushed
        if flushed is not None and (
            (isinstance(event, SnapshotFailed) and event.step == flushed.step)
            # `flush` knows the lowest step of several writers; and an answer to an earlier one may come only now.
            or (
                isinstance(event, MemoryFlushed)
                and event.step >= flushed.step
                and event.instant_monotonic >= flushed.since
            )
        ):
            self._flushed = None
        if not isinstance(event, Requested):
            return
        if event.what == "stop":
            self._requested = StopNotice(f"ckpt stop by {event.who}", self._now(), exit_code=0)
            self._wake.ring()
        elif event.what == "save":
            self.save_asked_by = event.who

    def plan(self, stop: Stop, *, ahead: bool = False) -> StopPlan:
        """What to do about `stop` at a boundary: now, or after one more step that lasts as long as the last one."""
        return plan_stop(self._facts(stop, self._took if ahead else 0.0))

    def flush(self) -> int | None:
        """Let the writer make durable what is only in memory; the step of that, None: there is none.

        Any thread. Waits for an answer of the writer, some seconds at most, and not for its disk.
        """
        since, step = self._now(), self._ask_to_flush()
        if step is not None:
            self._flushed = PendingCommit(step, int(self._ledger.standing.state_bytes), since)
        return step

    @property
    def flushing(self) -> bool:
        """Whether `flush` was called, and the writer has not said yet what came of it."""
        flushed, durable_step = self._flushed, self._ledger.standing.safest.newest_step
        return flushed is not None and (durable_step is None or durable_step < flushed.step)

    def wait_for_the_flushed(self, poll: Callable[[], None], left: Callable[[], float]) -> None:
        """What the writer had only in memory is nothing that the engine waits for.

        Args:
            poll: takes in what the writer says.
            left: seconds that there are.
        """
        while self.flushing and (seconds := left()) > 0.0:
            threading.Event().wait(min(_PAUSE_SECONDS, seconds))
            poll()

    def durable(self) -> str:
        """What is durable, and what that leaves out, for people."""
        standing = self._ledger.standing
        near = standing.safest
        if near.newest_step is None:
            return f"no snapshot is durable on {near.url}"
        where = " and ".join(tier.url for tier in standing.tiers if tier.newest_step == near.newest_step)
        lost = self._step - near.newest_step
        behind = "" if lost <= 0 else f", {lost} step{'s' if lost > 1 else ''} behind"
        part = " (the part of this node)" if self._divided() else ""
        return f"step {near.newest_step:,} is durable on {where}{part}{behind}"

    def summary(self, overhead: str, resumed: tuple[int, str] | None, skipped: int) -> str:
        """What the run has done, for people, when it is over.

        Args:
            overhead: what snapshots cost, as a text.
            resumed: the step of the snapshot from which it has gone on, and where that was.
            skipped: how many snapshots were due and not taken, as earlier ones were still being written.
        """
        if self._first is None and not self.unseen:  # its trainer has found before the first step that it is complete
            return "nothing was left to train" + (f"; step {resumed[0]} is durable on {resumed[1]}" if resumed else "")
        standing = self._ledger.standing
        if not standing.committed and not standing.failed:
            nothing = self._step == self._first and not self.unseen
            what = "nothing was left to train" if nothing else "no snapshot was taken"
            return f"{what}; {self.durable()}"
        busy = f"{skipped:,} skipped because earlier ones were still being written, " if skipped else ""
        many = f"{count(standing.committed, 'snapshot')}, {busy}{standing.failed} failed"
        stall = f"longest stall {duration(standing.longest_stall_seconds)}"
        return f"{many}; {overhead}; {stall}; {self.durable()}"

    def outlook(self) -> dict[str, Any]:
        """How the run stands now. Any thread."""
        now, stop = self._now(), self.stop
        facts = self._facts(Stop(StopNotice("", now), now) if stop is None else stop, 0.0)
        return outlook(
            self._ledger.standing,
            facts,
            now=now,
            started=self._started,
            step_seconds=self._took,
            stopping=None if stop is None else stop.notice.who,
        )

    # ------------------------------------------------------------------ what is known

    def _stop_of(self, notice: StopNotice) -> Stop:
        grace = self.grace_seconds if notice.grace_seconds is None else notice.grace_seconds
        return Stop(notice, notice.instant + grace)

    def _facts(self, stop: Stop, boundary_seconds: float) -> StopFacts:
        now, standing = self._now(), self._ledger.standing
        in_flight = [
            replace(one, nbytes=n) for one, n in zip(standing.in_flight, standing.left_bytes(now), strict=True)
        ]
        flushed = self._flushed
        if flushed is not None and self.flushing:
            left = DurabilityStatus(standing.tiers, (flushed,), busy_since=flushed.since).left_bytes(now)[0]
            in_flight.append(replace(flushed, nbytes=left))
        return StopFacts(
            step=self._step,
            grace_seconds=stop.deadline - now,
            state_bytes=standing.state_bytes,
            tiers=standing.tiers,
            boundary_seconds=boundary_seconds,
            stall_seconds=standing.stall_seconds,
            in_flight=tuple(in_flight),
            slots=self._slots,
            held_step=standing.held_step if flushed is None or flushed.step != standing.held_step else None,
        )

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        due = dict.fromkeys(range(len(self._sources)), self._now())
        broken: set[int] = set()
        late = False
        while not self._closing:
            stop = self.stop
            if stop is None:
                wait = self._ask(due, broken)
            else:
                self._announce(stop)
                wait = _IDLE_SECONDS if late or self._attended else self._until_late(stop)
                if wait <= 0.0:
                    late = True
                    self._mind(stop)
            if wait > 0.0 and not self._closing:
                self._listen(wait)

    def _listen(self, seconds: float) -> None:
        for number in self._wake.wait(seconds):
            self._signals.note(number)

    def _ask(self, due: dict[int, float], broken: set[int]) -> float:
        """Ask the sources that are due; seconds until the next one is, or 0 if there is news."""
        for number, source in enumerate(self._sources):
            if self._closing or self._now() < due[number]:
                continue
            try:
                self._noticed = source.poll()
            except PreemptionSourceError as err:
                if number not in broken:
                    broken.add(number)
                    LOG.warning("%s; it is asked again every %s", err, duration(source.every_seconds))
            else:
                broken.discard(number)
            if self._noticed is not None:
                return 0.0
            due[number] = self._now() + source.every_seconds
        return max(0.0, min(due.values(), default=_IDLE_SECONDS + self._now()) - self._now())

    def _announce(self, stop: Stop) -> None:
        """Say it once, and again if less time is left. Any thread; the line is out when this returns."""
        with self._telling:
            if self._told is not None and stop.deadline >= self._told.deadline:
                return
            self._told = stop
            again = "; press it again to stop at once" if stop.notice.interrupts else ""
            left = duration(max(0.0, stop.deadline - self._now()))
            LOG.warning("%s: a snapshot %s, then training stops; %s left%s", stop.notice.who, self._moment, left, again)

    def _until_late(self, stop: Stop) -> float:
        """Seconds until a snapshot at the end of the running step would not become durable in time.

        With one that waits in memory a little less, so that it still fits; half of the grace where no speed is known.
        """
        facts = self._facts(stop, 0.0)
        needed = new_snapshot_seconds(facts)
        if facts.held_step is not None:
            known = facts.tiers[0].bytes_per_second is not None
            needed = needed + self._spare_seconds if known else (stop.deadline - stop.notice.instant) / 2.0
        return facts.grace_seconds - needed

    def _mind(self, stop: Stop) -> None:
        """The step is too long: say what becomes durable instead, and see that it does."""
        since = self._now() - self._ended
        plan = plan_stop(self._facts(stop, math.inf))
        LOG.warning(
            "%s: the step after step %d has been running for %s, too long for a snapshot at its end; %s",
            stop.notice.who,
            self._step,
            duration(since),
            plan.why,
        )
        step = self._let_become_durable(stop, plan)
        while step is not None and not (self._closing or self._attended):
            newest = self._newest()
            if newest is not None and newest >= step:
                LOG.warning("the snapshot of step %d is durable", newest)
                return
            left = stop.deadline - self._now()
            if left <= 0.0:
                LOG.error("%s: the time is over, and the snapshot of step %d is not durable", stop.notice.who, step)
                return
            self._listen(min(_LOOK_SECONDS, max(_LEAST_LOOK_SECONDS, left / _LOOKS)))

    def _let_become_durable(self, stop: Stop, plan: StopPlan) -> int | None:
        """What is worth waiting for. What waits in memory is tried too where it does not fit: that costs nothing."""
        held = self._ledger.standing.held_step
        if held is None or (plan.step is not None and plan.step > held):
            return plan.step if plan.choice is StopChoice.FINISH else None
        step = self.flush()
        if step is None:
            LOG.error("%s: what is in memory cannot be made durable before training ends", stop.notice.who)
        else:
            LOG.warning("%s: the writer makes the snapshot of step %d in memory durable now", stop.notice.who, step)
        return step


def open_watch(
    config: Config, clock: Clock, ranks: Ranks | None, divided: Callable[[], bool] = lambda: False
) -> tuple[Ledger, PreemptionWatch]:
    """The ledger and the watch of a run, or of one of its ranks; both are event sinks.

    Args:
        divided: see `PreemptionWatch`.

    Raises:
        StorageError: a tier that no storage serves.
    """
    urls = [tier.url for tier in config.tiers]
    if ranks is not None and ranks.rank:
        urls = [share_place(urls[0], ranks.rank)]  # the rest is for the coordinator
    ledger = Ledger(urls, clock)
    nearest = Repository(open_storage(config.root_url, config.tiers[0].for_storage()))
    watch = PreemptionWatch(
        config.preemption,
        ledger,
        clock,
        slots=config.slots,
        newest=lambda: _newest_step(nearest),
        flush=lambda: _flush(config.root_url, ranks),
        spare_seconds=_SPARE_SECONDS if ranks is None else _SPARE_SECONDS + _MEETING_SECONDS,
        divided=divided,
        several=ranks is not None,
    )
    return ledger, watch


def _flush(root_url: str, ranks: Ranks | None) -> int | None:
    """Ask the writer; of several ranks those of all on this machine: none alone knows what all hold."""
    own = 0 if ranks is None else ranks.rank
    steps = [_flush_one(root_url, own)]
    if ranks is not None and steps[0] is not None:
        steps += [_flush_one(root_url, rank) for rank in range(ranks.size) if rank != own]
    return min((step for step in steps if step is not None), default=None)


def _flush_one(root_url: str, rank: int) -> int | None:
    try:
        reply = control.ask(root_url, {"what": control.Question.FLUSH}, _ANSWER_SECONDS, rank)
    except (CkptError, OSError) as err:
        LOG.warning("what is in memory cannot be made durable now: %s", err)
        return None
    step = None if reply is None else reply.body.get("step")
    return step if isinstance(step, int) else None


def _newest_step(nearest: Repository) -> int | None:
    try:
        found = nearest.ids()
    except CkptError as err:
        LOG.warning("the durable snapshots cannot be listed: %s", err)
        return None
    return found[-1].step if found else None
