"""Whether a run must stop, and until when: signals, sources and requests as one answer for the training thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ckpt_engine.config import Config, Preemption
from ckpt_engine.errors import CkptError
from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.durability import Ledger
from ckpt_engine.observe.events import LOG, Event, Requested
from ckpt_engine.observe.units import duration
from ckpt_engine.preempt.loop_steps import LoopSteps
from ckpt_engine.preempt.memory_flush import MemoryFlush
from ckpt_engine.preempt.run_outlook import RunOutlook
from ckpt_engine.preempt.stop_plan import StopChoice, StopPlan, plan_stop
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

_LOOK_SECONDS = 0.5
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
        clock: the source of moments.
        run: how it stands.
        newest: asks the nearest tier for the step of its newest snapshot; used by the thread, only when it is late.
        several: it is one of several ranks, which agree on the step of the snapshot.
    """

    def __init__(
        self,
        options: Preemption,
        clock: Clock,
        run: RunOutlook,
        newest: Callable[[], int | None],
        *,
        several: bool = False,
    ) -> None:
        self._moment = "after a step that all ranks agree on" if several else "at the end of this step"
        self.grace_seconds = options.grace
        self.run = run
        self._newest = newest
        self._wake = Wake()
        self.signals = SignalWatch(options.numbers(), clock, self._wake)
        launcher = launcher_source(clock)
        self._sources = [open_source(one, clock) for one in options.sources]
        self._sources += [] if launcher is None else [launcher]
        # One attribute per thread that sets it; readers take the earliest.
        self._noticed: StopNotice | None = None
        self._requested: StopNotice | None = None
        self.save_asked_by: str | None = None
        """Who has asked for a snapshot, where none was taken since."""
        self._attended = self._closing = False
        self._told: Stop | None = None
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ckpt-preempt", daemon=True)

    # ------------------------------------------------------------------ the training thread

    def start(self) -> None:
        """Install the signal handlers and start the thread. On the main thread, for signals to be watched."""
        self.run.steps.started = self.run.steps.ended = self.run.now()
        self._wake.open()
        for problem in self.signals.install():
            LOG.warning("not watched: %s", problem)
        self._thread.start()

    def close(self) -> None:
        """Put the signal handlers back and end the thread. Idempotent."""
        self.signals.remove()
        if self.signals.interrupted and not self._closing:
            LOG.warning("Ctrl-C again: training stops at once; %s", self.run.durable())
        self._closing = True
        if self._thread.is_alive():  # in a fork it is not
            self._wake.ring()
            self._thread.join(_END_SECONDS)
            if not self._thread.is_alive():
                self._wake.close()

    def boundary(self, step: int) -> bool:
        """Training step `step` has just ended; whether somebody wants the run to stop."""
        # Each boundary comes here: no call is made for what a few assignments do.
        steps = self.run.steps
        now = self.run.now()
        steps.first = step if steps.first is None else steps.first
        steps.last, steps.ended, steps.took = step, now, now - steps.ended
        return (self.signals.heard or self._noticed or self._requested) is not None

    @property
    def stop(self) -> Stop | None:
        """The stop that leaves the least time, if there is any. Any thread."""
        found = (one for one in (self.signals.heard, self._noticed, self._requested) if one is not None)
        stops = (
            Stop(one, one.instant + (self.grace_seconds if one.grace_seconds is None else one.grace_seconds))
            for one in found
        )
        return min(stops, key=lambda one: one.deadline, default=None)

    def attend(self) -> None:
        """The training thread has reached a boundary and takes care of the stop."""
        if (stop := self.stop) is not None:
            self._announce(stop)  # before what the training thread says of it
        self._attended = True
        self._wake.ring()

    def emit(self, event: Event) -> None:
        """Takes requests; an event sink."""
        self.run.flush.emit(event)
        if not isinstance(event, Requested):
            return
        if event.what == "stop":
            self._requested = StopNotice(f"ckpt stop by {event.who}", self.run.now(), exit_code=0)
            self._wake.ring()
        elif event.what == "save":
            self.save_asked_by = event.who

    def outlook(self) -> dict[str, Any]:
        """How the run stands now. Any thread."""
        return self.run.to_json(self.stop)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        due = dict.fromkeys(range(len(self._sources)), self.run.now())
        broken: set[int] = set()
        late = False
        while not self._closing:
            stop = self.stop
            if stop is None:
                wait = self._ask(due, broken)
            else:
                self._announce(stop)
                wait = _IDLE_SECONDS if late or self._attended else self.run.until_late(stop)
                if wait <= 0.0:
                    late = True
                    self._mind(stop)
            if wait > 0.0 and not self._closing:
                self._listen(wait)

    def _listen(self, seconds: float) -> None:
        for number in self._wake.wait(seconds):
            self.signals.note(number)

    def _ask(self, due: dict[int, float], broken: set[int]) -> float:
        """Ask the sources that are due; seconds until the next one is, or 0 if there is news."""
        for number, source in enumerate(self._sources):
            if self._closing or self.run.now() < due[number]:
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
            due[number] = self.run.now() + source.every_seconds
        return max(0.0, min(due.values(), default=_IDLE_SECONDS + self.run.now()) - self.run.now())

    def _announce(self, stop: Stop) -> None:
        """Say it once, and again if less time is left. Any thread; the line is out when this returns."""
        with self._telling:
            if self._told is not None and stop.deadline >= self._told.deadline:
                return
            self._told = stop
            again = "; press it again to stop at once" if stop.notice.interrupts else ""
            left = duration(max(0.0, stop.deadline - self.run.now()))
            LOG.warning("%s: a snapshot %s, then training stops; %s left%s", stop.notice.who, self._moment, left, again)

    def _mind(self, stop: Stop) -> None:
        """The step is too long: say what becomes durable instead, and see that it does."""
        since = self.run.now() - self.run.steps.ended
        plan = plan_stop(self.run.facts(stop, math.inf))
        LOG.warning(
            "%s: the step after step %d has been running for %s, too long for a snapshot at its end; %s",
            stop.notice.who,
            self.run.steps.last,
            duration(since),
            plan.why,
        )
        step = self._let_become_durable(stop, plan)
        while step is not None and not (self._closing or self._attended):
            newest = self._newest()
            if newest is not None and newest >= step:
                LOG.warning("the snapshot of step %d is durable", newest)
                return
            left = stop.deadline - self.run.now()
            if left <= 0.0:
                LOG.error("%s: the time is over, and the snapshot of step %d is not durable", stop.notice.who, step)
                return
            self._listen(min(_LOOK_SECONDS, max(_LEAST_LOOK_SECONDS, left / _LOOKS)))

    def _let_become_durable(self, stop: Stop, plan: StopPlan) -> int | None:
        """What is worth waiting for. What waits in memory is tried too where it does not fit: that costs nothing."""
        held = self.run.ledger.standing.held_step
        if held is None or (plan.step is not None and plan.step > held):
            return plan.step if plan.choice is StopChoice.FINISH else None
        step = self.run.flush.begin()
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
        divided: see `RunOutlook`.

    Raises:
        StorageError: a tier that no storage serves.
    """
    urls = [tier.url for tier in config.tiers]
    if ranks is not None and ranks.rank:
        urls = [share_place(urls[0], ranks.rank)]  # the rest is for the coordinator
    ledger = Ledger(urls, clock)
    nearest = Repository(open_storage(config.root_url, config.tiers[0].for_storage()))
    now = clock.monotonic
    spare_seconds = _SPARE_SECONDS if ranks is None else _SPARE_SECONDS + _MEETING_SECONDS
    flush = MemoryFlush(lambda: _flush(config.root_url, ranks), ledger, now, spare_seconds)
    run = RunOutlook(ledger, now, config.slots, LoopSteps(now(), now()), flush, divided)
    newest = partial(_newest_step, nearest)
    return ledger, PreemptionWatch(config.preemption, clock, run, newest, several=ranks is not None)


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
