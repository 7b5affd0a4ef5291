"""When several ranks take a snapshot or end: rank 0 decides one step ahead, the others learn it from the store.

Rank 0 publishes what happens after optimizer step n before it begins that step. Whoever has finished step n has taken
part in its all-reduce, which rank 0 entered after it had published: one look into the store then finds the decision. No
collective is added to a step. A rank that looks too early after all (no all-reduce in that step) has no part in that
snapshot, says so, and goes on.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ckpt_engine.errors import RanksError, WaitTimeoutError
from ckpt_engine.frequency.triggers import MEMORY
from ckpt_engine.preempt.divergence import Divergence, earliest
from ckpt_engine.preempt.notice import Stop
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.snapshot.handle import SaveHandle
from ckpt_engine.tracking.verdict import Verdicts, hear, stop_of_json, stop_to_json

_DECISIONS = "decisions"
_STOP = "stop"
"""What rank 0 looks for at each boundary: the reason to end that another rank was the first to tell."""
_OVER = "over"
_LEFT = "left"
_HEARD_SECONDS = 2.0
"""So long rank 0 stays for those that may not know yet that it is over."""
_STUCK = "stuck"
_STUCK_SECONDS = 15.0
"""How much later than others a rank may find that no batch comes: torch looks for dead workers every 5 seconds."""
_REMEMBERED = 64
"""Decisions in the store: more than a rank can be behind rank 0."""

Take = Callable[[str], SaveHandle | None]
"""Takes a snapshot with that reason; None: it could not be taken, and that was said."""


class SharedEngine(Protocol):
    """The part of `ckpt_engine.Checkpointer` that this uses."""

    def ready(self, *, durable: bool = True) -> bool: ...

    def miss(self, step: int, why: str, *, durable: bool = True) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do at one boundary after an optimizer step.

    Args:
        number: counts decisions.
        boundary: counts such boundaries since the start.
        step: of the run there, as far as rank 0 could foresee it.
        reason: of the snapshot that is taken (`MEMORY`: into memory only); None: none is.
        stop: who stops the run; None: nobody.
        left_seconds: then, how long it had at the boundary before.
        exit_code, interrupts: see `StopNotice`.
        diverged: the run ends here, because of that (a `Divergence`) too or alone: `reason` is None.
    """

    number: int
    boundary: int
    step: int
    reason: str | None
    stop: str | None = None
    left_seconds: float = 0.0
    exit_code: int = 0
    interrupts: bool = False
    diverged: dict[str, Any] | None = None

    def as_stop(self, since: float) -> Stop:
        """The stop, with its deadline on this machine's clock.

        Args:
            since: monotonic seconds of the boundary after which this was published, as this rank has passed it.
        """
        return stop_of_json(asdict(self), since)


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
        engine: SharedEngine,
        memory_due: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._ranks = ranks
        self._memory_due = memory_due
        self._leads = ranks.rank == 0
        self._due = due
        self._engine = engine
        self._published: deque[Decision] = deque(maxlen=_REMEMBERED)
        self._text: str | None = None
        self._handled = self._made = 0
        self._boundaries, self._step, self._stride = 0, 0, 1
        self._led = -1
        self._told_stop = False
        """On rank 0: how the run ends was decided."""
        self.diverged: Divergence | None = None
        """What this rank has seen itself."""
        self.verdicts = Verdicts(ranks)
        self._passed = self._before = time.monotonic()
        """When this rank was at the last two boundaries."""

    def start(self, step: int) -> None:
        """Training goes on after `step`: what happens after the next one is decided now."""
        self._step = step
        self._passed = self._before = time.monotonic()
        self.lead(step, None, asked=False, fits=lambda _: False)

    def decided(self, step: int) -> Decision | None:
        """What to do now that optimizer step `step` is complete; at most once for each step.

        A decision that this rank has missed is answered with `miss`, so that the ranks go on counting alike.
        """
        if step == self._step:
            return None  # gradients are being accumulated
        self._boundaries, self._step, self._stride = self._boundaries + 1, step, step - self._step
        self._before, self._passed = self._passed, time.monotonic()
        found = None
        for one in self._read():
            if one.number <= self._handled or one.boundary > self._boundaries:
                continue
            self._handled = one.number
            if one.boundary == self._boundaries or one.diverged is not None:
                found = one  # who is past the boundary at which a run ends that has diverged ends late
            elif one.reason is not None:
                self._engine.miss(one.step, "it was past that step already", durable=one.reason != MEMORY)
        return found

    def lead(self, step: int, stop: Stop | None, *, asked: bool, fits: Callable[[Stop], bool]) -> None:
        """After the snapshot of `step`, before the next step: decide what happens after that (rank 0); else hand on.

        Args:
            stop: what this rank knows of a stop.
            asked: somebody wants a snapshot.
            fits: whether a last snapshot after the next step fits into the time that a stop leaves.

        A divergence that is told after a stop was decided changes nothing. Of both at once all end as stopped, with
        the time that the stop leaves, and the divergence is what the next start is told.
        """
        if self._boundaries == self._led:
            return
        self._led = self._boundaries
        if not self._leads:
            if stop is not None and not self._told_stop:
                self._told_stop = True
                self._tell_first(stop_to_json(stop, self._passed))
            return
        reason = self._due(step + self._stride) or ("manual" if asked else None)
        stop, seen = (None, None) if self._told_stop else self._end(stop)
        if stop is not None or seen is not None:
            self._told_stop = True
            last = "signal" if seen is None and stop is not None and fits(stop) else None
            end: dict[str, Any] = {} if stop is None else stop_to_json(stop, self._passed)
            self._publish(step + self._stride, last, **end, diverged=None if seen is None else asdict(seen))
        elif reason is not None and self._engine.ready():
            self._publish(step + self._stride, reason)
        elif self._memory_due(step + self._stride) and self._engine.ready(durable=False):
            self._publish(step + self._stride, MEMORY)

    def tell(self, found: Divergence) -> None:
        """This rank has seen a divergence, and takes part in no snapshot any more: the run ends on all ranks.

        Idempotent. On rank 0 before `lead`.

        Raises:
            RanksError: the store is gone.
        """
        if self.diverged is not None:
            return
        self.diverged = found
        if not self._leads:
            self.verdicts.tell(found)
            self._tell_first({"diverged": asdict(found)})

    def _tell_first(self, why: dict[str, Any]) -> None:
        """Two ranks that do this at once are as good as told in any order."""
        if self._ranks.store.get(_STOP) is None:
            self._ranks.store.set(_STOP, json.dumps(why))

    def stop_of(self, decision: Decision) -> Stop:
        """The stop that was decided, asked at its boundary."""
        return decision.as_stop(self._before)

    def halt(self, stop: Stop, reason: str | None, take: Take) -> None:
        """The run stops here: take the last snapshot if that was decided, and wait as long as there is time."""
        if reason is not None:
            if not self._engine.ready():
                # A slot is free when what is in flight is durable. A rank without one would make it absent for all.
                self._engine.wait(max(0.0, stop.deadline - time.monotonic()))
            take(reason)
        self._engine.wait(max(0.0, stop.deadline - time.monotonic()))

    def all_stuck(self, where: str, seconds: float) -> bool:
        """No batch comes on this rank; whether none does on all others, before the same step.

        Then nobody is in a step that waits for the others, and all can stop here.

        Args:
            where: the place of the batch in the data of a rank; the same text on all ranks that are at the same batch.
            seconds: that there is time for it at most.
        """
        store, size = self._ranks.store, self._ranks.size
        deadline = time.monotonic() + min(seconds, _STUCK_SECONDS)
        mine = f"{self._boundaries} {where}"
        try:
            if not self._leads:
                store.set(f"{_STUCK}/{self._ranks.rank}", mine)
                return hear(store, _STUCK, max(0.1, seconds)) == mine
            left = (max(0.1, deadline - time.monotonic()) for _ in range(size))
            others = [hear(store, f"{_STUCK}/{rank}", next(left)) for rank in range(1, size)]
            store.set(_STUCK, mine if all(one == mine for one in others) else "")
            return all(one == mine for one in others)
        except (WaitTimeoutError, RanksError):
            return False

    def leave(self, seconds: float) -> None:
        """This rank has nothing more to do, and its process may end: rank 0 says so, others wait for that.

        Rank 0, whose process may keep the store, stays for a moment until they have heard: torch complains at length of
        a store that is gone.

        Who has started the processes takes the first one that ends before its time for a failure, and kills the others:
        that must not be in the middle of what rank 0 does for all.

        Args:
            seconds: that others wait at most.

        Raises:
            KeyboardInterrupt: Ctrl-C came meanwhile.
        """
        store = self._ranks.store
        with suppress(WaitTimeoutError, RanksError):  # then it is gone, or there is no time left
            if self._leads:
                store.set(_OVER, "")
                deadline = time.monotonic() + min(seconds, _HEARD_SECONDS)
                for rank in range(1, self._ranks.size):
                    hear(store, f"{_LEFT}/{rank}", max(0.0, deadline - time.monotonic()))
            elif seconds > 0.0:
                hear(store, _OVER, seconds)
                store.set(f"{_LEFT}/{self._ranks.rank}", "")

    def _publish(self, step: int, reason: str | None, **end: Any) -> None:
        self._made += 1
        self._published.append(Decision(self._made, self._boundaries + 1, step, reason, **end))
        self._ranks.store.set(_DECISIONS, json.dumps([asdict(one) for one in self._published]))

    def _read(self) -> deque[Decision]:
        if not self._leads:
            text = self._ranks.store.get(_DECISIONS)
            if text is not None and text != self._text:
                self._text = text
                self._published = deque((Decision(**one) for one in json.loads(text)), maxlen=_REMEMBERED)
        return self._published

    def _end(self, stop: Stop | None) -> tuple[Stop | None, Divergence | None]:
        """Why the run is to end, as rank 0 knows it by now."""
        text = self._ranks.store.get(_STOP)
        row = None if text is None else json.loads(text)
        if row is None:
            return stop, self.diverged
        if "diverged" in row:
            return stop, earliest((Divergence(**row["diverged"]), self.diverged))
        # What is left counts from this boundary on, or the one before.
        return stop or stop_of_json(row, self._before), self.diverged
