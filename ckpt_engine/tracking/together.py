"""When several ranks take a snapshot or stop: rank 0 decides one step ahead, the others learn it from the store.

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
from dataclasses import asdict, dataclass
from typing import Protocol

from ckpt_engine.frequency.triggers import MEMORY
from ckpt_engine.preempt.notice import Stop, StopNotice
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.snapshot.handle import SaveHandle

_DECISIONS = "decisions"
_STOP = "stop"
_REMEMBERED = 64
"""Decisions in the store: more than a rank can be behind rank 0."""

Take = Callable[[str], SaveHandle | None]


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
        left_seconds: then, how long it has from when this was published.
        exit_code, interrupts: see `StopNotice`.
    """

    number: int
    boundary: int
    step: int
    reason: str | None
    stop: str | None = None
    left_seconds: float = 0.0
    exit_code: int = 0
    interrupts: bool = False

    def as_stop(self) -> Stop:
        """The stop, with its deadline on this machine's clock."""
        now = time.monotonic()
        notice = StopNotice(self.stop or "", now, self.left_seconds, self.exit_code, self.interrupts)
        return Stop(notice, now + self.left_seconds)


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

    def start(self, step: int) -> None:
        """Training goes on after `step`: what happens after the next one is decided now."""
        self._step = step
        self.lead(step, None, asked=False, snapshot_on_stop=False)

    def decided(self, step: int) -> Decision | None:
        """What to do now that optimizer step `step` is complete; at most once for each step.

        A decision that this rank has missed is answered with `miss`, so that the ranks go on counting alike.
        """
        if step == self._step:
            return None  # gradients are being accumulated
        self._boundaries, self._step, self._stride = self._boundaries + 1, step, step - self._step
        found = None
        for one in self._read():
            if one.number <= self._handled or one.boundary > self._boundaries:
                continue
            self._handled = one.number
            if one.boundary == self._boundaries:
                found = one
            elif one.reason is not None:
                self._engine.miss(one.step, "it was past that step already", durable=one.reason != MEMORY)
        return found

    def lead(self, step: int, stop: Stop | None, *, asked: bool, snapshot_on_stop: bool) -> None:
        """After the snapshot of `step`, before the next step: decide what happens after that (rank 0); else hand on.

        Args:
            stop: what this rank knows of a stop.
            asked: somebody wants a snapshot.
            snapshot_on_stop: a last snapshot fits into the time that is left.
        """
        if self._boundaries == self._led:
            return
        self._led = self._boundaries
        if not self._leads:
            if stop is not None and not self._told_stop:
                self._told_stop = True
                self._ranks.store.set(_STOP, json.dumps(_stop_to_json(stop)))
            return
        reason = self._due(step + self._stride) or ("manual" if asked else None)
        found = _stop_to_json(stop) if stop is not None else self._stop_of_others()
        if found is not None and not self._told_stop:
            self._told_stop = True
            self._publish(step + self._stride, "signal" if snapshot_on_stop or stop is None else None, **found)
        elif reason is not None and self._engine.ready():
            self._publish(step + self._stride, reason)
        elif self._memory_due(step + self._stride) and self._engine.ready(durable=False):
            self._publish(step + self._stride, MEMORY)

    def halt(self, decision: Decision, take: Take) -> Stop:
        """The run stops here: take the last snapshot if that was decided, and wait as long as there is time."""
        stop = decision.as_stop()
        if decision.reason is not None:
            take(decision.reason)
        self._engine.wait(max(0.0, stop.deadline - time.monotonic()))
        return stop

    def _publish(self, step: int, reason: str | None, **stop: object) -> None:
        self._made += 1
        self._published.append(Decision(self._made, self._boundaries + 1, step, reason, **stop))  # type: ignore[arg-type]
        self._ranks.store.set(_DECISIONS, json.dumps([asdict(one) for one in self._published]))

    def _read(self) -> deque[Decision]:
        if not self._leads:
            text = self._ranks.store.get(_DECISIONS)
            if text is not None and text != self._text:
                self._text = text
                self._published = deque((Decision(**one) for one in json.loads(text)), maxlen=_REMEMBERED)
        return self._published

    def _stop_of_others(self) -> dict[str, object] | None:
        text = self._ranks.store.get(_STOP) if not self._told_stop else None
        found: dict[str, object] | None = None if text is None else json.loads(text)
        return found


def _stop_to_json(stop: Stop) -> dict[str, object]:
    return {
        "stop": stop.notice.who,
        "left_seconds": max(0.0, stop.deadline - time.monotonic()),
        "exit_code": stop.notice.exit_code,
        "interrupts": stop.notice.interrupts,
    }
