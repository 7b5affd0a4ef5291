"""When several ranks take a snapshot or end: rank 0 decides one step ahead, the others learn it from the store.

Rank 0 publishes what happens after optimizer step n before it begins that step. A rank that has finished step n took
part in its all-reduce, which rank 0 entered after it had published: one look into the store then finds the decision.
No collective is added to a step. A rank that looks too early after all (no all-reduce in that step) has no part in
that snapshot, says so, and goes on. `SharedCadence` makes such a decision look like the rank's own.

`Verdicts` end a run that has diverged with one error on all ranks: each says what it has seen, and rank 0 says the
rest. The store stays untouched before a rank sees a divergence, but for one exchange at the end of a training with a
guard. Every wait has an end, and signals are handled meanwhile.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, cast

from ckpt_engine.engine import Engine
from ckpt_engine.errors import RanksError, WaitTimeoutError
from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.frequency.triggers import INTERVAL, MEMORY, RESUME
from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.events import SITE, UNKNOWN, EventSink, Notice, said_if_slow
from ckpt_engine.observe.units import duration, place
from ckpt_engine.preempt.divergence import Divergence, earliest
from ckpt_engine.preempt.stop_requests import Stop, StopNotice
from ckpt_engine.ranks.world import Ranks, Store, Waits
from ckpt_engine.snapshot.save_request import SaveHandle

_DECISIONS = "decisions"
_STOP = "stop"
"""What rank 0 looks for at each boundary: the reason to end that another rank was the first to tell."""
_TRAINED = "trained"
_TRAINED_SECONDS = 3600.0
"""So long others wait at the end for rank 0, which may evaluate first, or be behind where they average now and then."""
_OVER = "over"
_LEFT = "left"
_HEARD_SECONDS = 5.0
"""So long rank 0 stays for the others, which may be a little later, or may not know yet that it is over."""
_STUCK = "stuck"
_STUCK_SECONDS = 15.0
"""How much later than others a rank may find that no batch comes: torch looks for dead workers every 5 seconds."""
_REMEMBERED = 64
"""Decisions in the store: more than a rank can be behind rank 0."""

Take = Callable[[str], SaveHandle | None]
"""Takes a snapshot with that reason; None: it could not be taken, and that was said."""
TURN_SECONDS = 0.1
"""Between two looks for what another rank says: handlers of signals run there, and none while the store waits."""
HEAR_SECONDS = 180.0
"""Longer than rank 0 takes to find where to go on: see `rollback`."""
HEARD_SECONDS = 10.0
"""How long rank 0 stays for those that have not heard yet."""
FLUSH_SECONDS = 20.0
"""How long it waits for those that ask the writers of their machine."""
_SEEN = "diverged"
_THERE = "there"
_VERDICT = "verdict"
HOLDS = "holds"
_HEARD = "heard"
FLUSHED = "flushed"
Patience = Callable[[float], float]
"""Asked again and again: how much of so many seconds may be waited. A stop, or a second Ctrl-C, leaves less."""


@dataclass(frozen=True, slots=True)
class RankDecision:
    """What all ranks do at one boundary after an optimizer step.

    Args:
        boundary: counts such boundaries since the start; none has two decisions.
        step: of the run there, as far as rank 0 could foresee it.
        reason: of the snapshot that is taken (`MEMORY`: into memory only); None: none is.
        stop: what stops the run (`stop_to_json`, as of the boundary before); None: it goes on.
        diverged: the run ends here, because of that (a `Divergence`) too or alone: `reason` is None.
    """

    boundary: int
    step: int
    reason: str | None
    stop: dict[str, Any] | None = None
    diverged: dict[str, Any] | None = None


@dataclass(eq=False)
class Decisions:
    """What rank 0 has decided, in the store; each is handled once, in order.

    Args:
        ranks: all of them.
    """

    _ranks: Ranks
    _all: deque[RankDecision] = field(default_factory=lambda: deque(maxlen=_REMEMBERED), init=False)
    _text: str | None = field(default=None, init=False)
    _handled: int = field(default=0, init=False)

    def publish(self, one: RankDecision) -> None:
        """On rank 0."""
        self._all.append(one)
        self._ranks.store.set(_DECISIONS, json.dumps([asdict(each) for each in self._all]))

    def next_up_to(self, boundary: int) -> Iterator[RankDecision]:
        """Those up to this boundary that were not handled yet."""
        text = self._ranks.store.get(_DECISIONS) if self._ranks.rank else None
        if text is not None and text != self._text:
            self._text = text
            self._all = deque((RankDecision(**one) for one in json.loads(text)), maxlen=_REMEMBERED)
        for one in self._all:
            if self._handled < one.boundary <= boundary:
                self._handled = one.boundary
                yield one


class Together:
    """One rank's side of the decisions. Training thread only.

    Args:
        ranks: all of them.
        due: the reason of the snapshot that is due after a step, or None; asked on rank 0, one step ahead.
        engine: takes them.
        memory_due: whether one into memory is, where no other one is taken; asked as `due`.
    """

    def __init__(
        self,
        ranks: Ranks,
        due: Callable[[int], str | None],
        engine: Engine,
        memory_due: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._ranks = ranks
        self._memory_due = memory_due
        self._due = due
        self._engine = engine
        self._decisions = Decisions(ranks)
        self._boundaries, self._step, self._stride = 0, 0, 1
        self._led = -1
        self._ends = 0
        self._told_stop = False
        """On rank 0: how the run ends was decided."""
        self.verdicts = Verdicts(ranks)
        self.waits = Waits(ranks, engine.times.blocked)
        self._passed = self._before = time.monotonic()
        """When this rank was at the last two boundaries."""

    def start(self, step: int) -> None:
        """Training goes on after `step`: what happens after the next one is decided now."""
        self._step = step
        self._passed = self._before = time.monotonic()
        self.lead(step, None, asked=False, fits=lambda _: False)

    def decided(self, step: int) -> RankDecision | None:
        """What to do now that optimizer step `step` is complete; at most once for each step.

        A decision that this rank has missed is answered with `miss`, so that the ranks go on counting alike.
        """
        if step == self._step:
            return None  # gradients are being accumulated
        self._boundaries, self._step, self._stride = self._boundaries + 1, step, step - self._step
        self._before, self._passed = self._passed, time.monotonic()
        found = None
        for one in self._decisions.next_up_to(self._boundaries):
            if one.boundary == self._boundaries or one.diverged is not None:
                found = one  # who is past the boundary at which a run ends that has diverged ends late
            elif one.reason is not None:
                self._miss(one, "it was past that step already")
        return found

    def _miss(self, one: RankDecision, why: str) -> None:
        self._engine.miss(one.step, why, durable=one.reason != MEMORY)

    def lead(self, step: int, stop: Stop | None, *, asked: bool, fits: Callable[[Stop], bool]) -> None:
        """After the snapshot of `step`, before the next step: decide what happens after that (rank 0); else hand on.

        Args:
            stop: what this rank knows of a stop.
            asked: somebody wants a snapshot.
            fits: whether a last snapshot after the next step fits into the time that a stop leaves.

        A divergence that is known after a stop was decided changes nothing. Of both at once all end as stopped, with
        the time that the stop leaves, and the next start hears of the divergence.
        """
        if self._boundaries == self._led:
            return
        self._led = self._boundaries
        if not self.verdicts.leads:
            self.waits.say()
            if stop is not None and not self._told_stop:
                self._told_stop = True
                self._tell_first(stop_to_json(stop, self._passed))
            return
        reason = self._due(step + self._stride) or ("manual" if asked else None)
        stop, seen = (None, None) if self._told_stop else self._end(stop)
        if stop is not None or seen is not None:
            self._told_stop = True
            last = "signal" if seen is None and stop is not None and fits(stop) else None
            row = None if stop is None else stop_to_json(stop, self._passed)
            self._publish(step + self._stride, last, row, None if seen is None else asdict(seen))
        elif reason is not None and self._engine.ready(cold=reason != INTERVAL):
            self.waits.look()
            self._publish(step + self._stride, reason)
        elif self._engine.memory and self._memory_due(step + self._stride) and self._engine.ready(durable=False):
            self._publish(step + self._stride, MEMORY)

    def tell(self, found: Divergence) -> None:
        """This rank has seen a divergence, and takes part in no snapshot any more: the run ends on all ranks.

        Idempotent. On rank 0 before `lead`.

        Raises:
            RanksError: the store is gone.
        """
        if self.verdicts.own is not None:
            return
        self.verdicts.tell(found)
        if not self.verdicts.leads:
            self._tell_first({"diverged": asdict(found)})

    def _tell_first(self, why: dict[str, Any]) -> None:
        """Of two ranks that do this at once the order does not matter."""
        if self._ranks.store.get(_STOP) is None:
            self._ranks.store.set(_STOP, json.dumps(why))

    def stop_of(self, row: dict[str, Any]) -> Stop:
        """The stop that was decided, asked at its boundary; its time left counts from the boundary before."""
        return stop_of_json(row, self._before)

    def all_stuck(self, where: str, seconds: float) -> bool:
        """No batch comes on this rank; whether none does on all others, before the same step.

        Then no rank is in a step that waits for the others, and all can stop here.

        Args:
            where: the place of the batch in the data of a rank; the same text on all ranks that are at the same batch.
            seconds: that there is time for it at most.
        """
        store, size = self._ranks.store, self._ranks.size
        deadline = time.monotonic() + min(seconds, _STUCK_SECONDS)
        mine = f"{self._boundaries} {where}"
        try:
            if not self.verdicts.leads:
                store.set(f"{_STUCK}/{self._ranks.rank}", mine)
                return hear(store, _STUCK, max(0.1, seconds)) == mine
            left = (max(0.1, deadline - time.monotonic()) for _ in range(size))
            others = [hear(store, f"{_STUCK}/{rank}", next(left)) for rank in range(1, size)]
            store.set(_STUCK, mine if all(one == mine for one in others) else "")
            return all(one == mine for one in others)
        except (WaitTimeoutError, RanksError):
            return False

    def trained(self) -> None:
        """Training is over on this rank. Waits for rank 0, and misses what that has decided and this rank was past.

        So it is where ranks average now and then (local SGD): rank 0 would wait for parts that never come.

        Raises:
            WaitTimeoutError: training is not over on rank 0, or a stop leaves no time to wait for that.
            RanksError: the store is gone.
        """
        self._ends += 1
        key = f"{_TRAINED}/{self._ends}"
        if self.verdicts.leads:
            self._ranks.store.set(key, str(self._boundaries))
            return
        waits = (
            f"training is over on rank 1, which waits up to {duration(_TRAINED_SECONDS)} for rank 0 to end its own; if "
            "rank 0 is gone, end this one too (Ctrl-C): what is durable stays"
        )
        with said_if_slow(waits) if self._ranks.rank == 1 else nullcontext():
            last = int(hear(self._ranks.store, key, _TRAINED_SECONDS, self.verdicts.patience))
        for one in self._decisions.next_up_to(last):
            if one.reason is not None:
                self._miss(one, "its training was over")

    def leave(self, seconds: float) -> None:
        """This rank has nothing more to do, and its process may end: rank 0 says so, others may wait for that.

        Rank 0, whose process may keep the store, stays for a moment until all others need it no more: what they ask it
        for would fail, and torch complains at length of a store that is gone.

        Who has started the processes takes the first one that ends before its time for a failure, and kills the others:
        that must not be in the middle of what rank 0 does for all.

        Args:
            seconds: that others wait for rank 0 at most, and rank 0 for them.

        Raises:
            KeyboardInterrupt: Ctrl-C came meanwhile.
        """
        store = self._ranks.store
        with suppress(WaitTimeoutError, RanksError):  # then it is gone, or there is no time left
            if self.verdicts.leads:
                store.set(_OVER, "")
                deadline = time.monotonic() + min(seconds, _HEARD_SECONDS)
                waits = f"rank 0 waits for the other ranks to end, up to {duration(_HEARD_SECONDS)}"
                with said_if_slow(waits):
                    for rank in range(1, self._ranks.size):
                        hear(store, f"{_LEFT}/{rank}", max(0.0, deadline - time.monotonic()))
                return
            if seconds > 0.0:
                hear(store, _OVER, seconds)
            store.set(f"{_LEFT}/{self._ranks.rank}", "")

    def _publish(self, step: int, reason: str | None, *end: dict[str, Any] | None) -> None:
        self._decisions.publish(RankDecision(self._boundaries + 1, step, reason, *end))

    def _end(self, stop: Stop | None) -> tuple[Stop | None, Divergence | None]:
        """Why the run is to end, as rank 0 knows it by now."""
        text = self._ranks.store.get(_STOP)
        row = None if text is None else json.loads(text)
        if row is None:
            return stop, self.verdicts.own
        if "diverged" in row:
            return stop, earliest((Divergence(**row["diverged"]), self.verdicts.own))
        # What is left counts from this boundary on, or the one before.
        return stop or self.stop_of(row), self.verdicts.own


def hear(
    store: Store, key: str, seconds: float, patience: Patience = lambda seconds: seconds, other_than: str | None = None
) -> str:
    """What another rank says; a Ctrl-C ends the wait, unlike one in the store.

    Args:
        patience: see `Patience`.
        other_than: what was heard already.

    Raises:
        WaitTimeoutError: no rank has said it in time. It is looked for once at least.
        RanksError: the store is gone.
    """
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while (text := store.get(key)) is None or text == other_than:
        left = patience(deadline - time.monotonic())
        if left <= 0.0:
            raise WaitTimeoutError(f"no rank has said {key!r} within {seconds:.0f} s")
        pause.wait(min(TURN_SECONDS, left))
    return text


def stop_to_json(stop: Stop, at: float) -> dict[str, Any]:
    """A stop as other ranks understand it, whose clocks are others.

    Args:
        at: monotonic seconds from which the time left is counted.
    """
    return {
        "stop": stop.notice.who,
        "left_seconds": max(0.0, stop.deadline - at),
        "exit_code": stop.notice.exit_code,
        "interrupts": stop.notice.interrupts,
    }


def stop_of_json(row: dict[str, Any], since: float) -> Stop:
    """What another rank has said with `stop_to_json`, its time left counted from `since` on."""
    notice = StopNotice(row["stop"], since, float(row["left_seconds"]), row["exit_code"], row["interrupts"])
    return Stop(notice, since + float(row["left_seconds"]))


class Verdicts:
    """One rank's side. Training thread only. Everything raises `RanksError` if the store is gone.

    Args:
        ranks: all of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._store = ranks, ranks.store
        self.patience: Patience = lambda seconds: seconds
        """Set by what knows of stops."""
        self.stop: Callable[[], Stop | None] = lambda: None
        """What this rank knows of a stop; set as well."""
        self._told_stop = False
        self.own: Divergence | None = None
        """What this rank has seen itself."""

    @property
    def leads(self) -> bool:
        """This is the rank that decides."""
        return self._ranks.rank == 0

    def tell(self, found: Divergence) -> None:
        """This rank has seen a divergence."""
        self.own = found
        if not self.leads:
            self._store.set(f"{_SEEN}/{self._ranks.rank}", json.dumps(asdict(found)))

    def come(self) -> None:
        """This rank, not rank 0, has published what it has seen, and waits for the verdict; publishes a stop too."""
        self._tell_stop()
        if not self._told_stop:
            self._store.set(f"{_THERE}/{self._ranks.rank}", "")

    def _tell_stop(self) -> None:
        """Also one that comes while this rank waits already."""
        if not self._told_stop and (stop := self.stop()) is not None:
            self._told_stop = True
            text = json.dumps(stop_to_json(stop, time.monotonic()))
            self._store.set(f"{_THERE}/{self._ranks.rank}", text)

    def hear(self, other_than: str | None = None) -> dict[str, Any]:
        """The verdict, or a question of rank 0 before it: one entry, `ask`.

        Args:
            other_than: the question that was heard already.

        Raises:
            WaitTimeoutError: rank 0 is silent.
        """

        def patience(seconds: float) -> float:
            self._tell_stop()
            return self.patience(seconds)

        return cast("dict[str, Any]", json.loads(hear(self._store, _VERDICT, HEAR_SECONDS, patience, other_than)))

    def answer(self, question: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Tell rank 0 what it has asked for; the verdict, or its next question. Raises as `hear`."""
        self._store.set(f"{question['ask']}/{self._ranks.rank}", json.dumps(answer))
        return self.hear(json.dumps(question))

    def heard(self) -> None:
        """This rank knows the verdict."""
        self._store.set(f"{_HEARD}/{self._ranks.rank}", "")

    # ---- rank 0

    def seen(self) -> list[Divergence]:
        """What other ranks have published by now."""
        found = [self._store.get(f"{_SEEN}/{rank}") for rank in range(1, self._ranks.size)]
        return [Divergence(**json.loads(text)) for text in found if text is not None]

    def wait_for_all(self, seconds: float) -> None:
        """Until all others have come; no longer than that."""
        self._said_by_others(_THERE, seconds)

    def stops(self) -> list[Stop]:
        """What those that have come know of stops, of which this rank may know nothing."""
        found = [self._store.get(f"{_THERE}/{rank}") for rank in range(1, self._ranks.size)]
        return [stop_of_json(json.loads(text), time.monotonic()) for text in found if text]

    def ask(self, what: str, seconds: float) -> list[dict[str, Any]]:
        """The answers of other ranks, of those that answer in time.

        Args:
            what: HOLDS: which snapshots they hold. FLUSHED: that the writers of their machines are asked, of which
                rank 0 reaches those of its own only.
        """
        self.say({"ask": what})
        return [json.loads(text) for text in self._said_by_others(what, seconds)]

    def say(self, verdict: dict[str, Any]) -> None:
        """All others may hear it now."""
        self._store.set(_VERDICT, json.dumps(verdict))

    def stay(self) -> None:
        """Until all others have heard it; not long."""
        self._said_by_others(_HEARD, HEARD_SECONDS)

    def _said_by_others(self, key: str, seconds: float) -> list[str]:
        deadline, said = time.monotonic() + seconds, []
        for rank in range(1, self._ranks.size):
            try:
                said.append(hear(self._store, f"{key}/{rank}", deadline - time.monotonic(), self.patience))
            except WaitTimeoutError:
                continue  # those that come after it are looked for once more
        return said


class SharedCadence(Cadence):
    """Asked like any cadence. At each boundary `stop` MUST be called before `boundary`."""

    def __init__(self, settings: FrequencySettings, clock: Clock, sink: EventSink, engine: Engine) -> None:
        assert engine.ranks is not None
        super().__init__(settings, clock, sink, engine.ranks.size)
        self._engine = engine
        self.together = Together(engine.ranks, super().boundary, engine, super().memory_due)
        self._decision: RankDecision | None = None
        self.halting: Stop | None = None
        """The stop that all ranks have agreed on, once they are there."""
        self.last: str | None = None
        """The reason of the last snapshot before that; None: there is to be none."""
        self.diverged: Divergence | None = None
        """What all ranks have agreed to end for, once they are there."""
        self._counted: int | None = None
        self._in_memory: int | None = None
        """The step after which all ranks take a snapshot into memory."""

    @property
    def idle_seconds(self) -> float:
        return self.together.waits.seconds

    def start(self, step: int) -> None:
        super().start(step)
        if self._engine.replicates and self._engine.loaded is not None:
            self._due.reason = RESUME  # no other machine has a copy of what these ranks have
        self.together.start(step)

    def stop(self, step: int, own: Stop | None, *, asked: bool, fits: Callable[[Stop], bool]) -> Stop | None:
        """The stop of all ranks after `step`, if there is one; `diverged` tells if they end for another reason too.

        Args:
            own: what this rank knows of a stop.
            asked: somebody has asked it for a snapshot.
            fits: see `Together.lead`.
        """
        self._settle_memory()
        self._lead_on = partial(self.together.lead, stop=own, asked=asked, fits=fits)
        self._decision = decision = self.together.decided(step)
        if decision is not None and decision.stop is not None:
            self.halting, self.last, self._decision = self.together.stop_of(decision.stop), decision.reason, None
        if decision is not None and decision.diverged is not None:
            self.diverged, self._decision = Divergence(**decision.diverged), None
        return self.halting

    @property
    def due(self) -> bool:
        """Between `stop` and `boundary`: whether all ranks take a snapshot now, be it into memory."""
        return self._decision is not None and self._decision.reason is not None

    def stop_stuck(self, stop: Stop, where: str) -> bool:
        """No batch comes because of `stop`; whether all ranks stop here, see `Together.all_stuck`."""
        if self.together.all_stuck(where, (stop.deadline - time.monotonic()) / 2.0):
            self.halting, self.last = stop, "signal"
        return self.halting is not None

    def boundary(self, step: int) -> str | None:
        decision, self._decision = self._decision, None
        if decision is None or decision.reason is None:
            self._lead_on(step)
            return None
        self._counted = self._engine.count
        if decision.reason == MEMORY:
            self._in_memory = step
            return None
        return decision.reason

    def memory_due(self, step: int) -> bool:
        return self._in_memory == step

    def memory_over(self, step: int) -> None:
        self._settle_memory()
        self._lead_on(step)

    def taken(self, step: int, stall_seconds: float, wait_seconds: float = 0.0) -> None:
        super().taken(step, stall_seconds, wait_seconds)
        self._done(step)

    def skipped(self, step: int, reason: str) -> None:
        super().skipped(step, reason)
        if self._counted is not None and self._counted == self._engine.count:
            self._engine.miss(step, reason)  # the other ranks count it
        self._done(step)

    def ended(self, step: int) -> str | None:
        self._settle_memory()
        try:
            self.together.trained()
            return self._engine.agree(partial(super().ended, step))
        except RanksError as err:
            text = f"training is over, and rank 0 is gone: there is no snapshot of the end ({err.message})"
            self._engine.events.emit(Notice("WARNING", text))
            return None

    def _settle_memory(self) -> None:
        """The ranks count a snapshot into memory also where this one did not take it."""
        step, self._in_memory = self._in_memory, None
        if step is None:
            return
        if self._counted == self._engine.count:
            self._engine.miss(step, "it was not taken", durable=False)
        self._counted = None

    def _done(self, step: int) -> None:
        if self._counted is not None:
            self._counted = None
            self._lead_on(step)


def cadence_of(settings: FrequencySettings, clock: Clock, engine: Engine) -> Cadence:
    """The cadence of a run, for one process or for one of several ranks."""
    cadence = (
        Cadence(settings, clock, engine.events)
        if engine.ranks is None
        else SharedCadence(settings, clock, engine.events, engine)
    )
    engine.times.measured = lambda: cadence.measured
    engine.paced_by(cadence.pace)
    return cadence


def ended_by(engine: Engine) -> str:
    """The class of the failure that has ended the run whose snapshot was loaded, as far as that tells; "": none has.

    What a further tier had to serve is no more, or not yet, at the nearest one: that was lost.
    """
    loaded = engine.loaded
    if loaded is None or loaded.info.reason in ("end", "signal"):
        return "" if loaded is not None else UNKNOWN
    return SITE if place(loaded.place) in [place(one.url) for one in engine.config.tiers[1:]] else UNKNOWN
