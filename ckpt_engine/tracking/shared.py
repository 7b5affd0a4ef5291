"""The cadence of one of several ranks: what `together` has decided looks like what the rank has decided itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt_engine.frequency.driver import Cadence
from ckpt_engine.frequency.settings import FrequencySettings
from ckpt_engine.frequency.triggers import MEMORY
from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.events import EventSink
from ckpt_engine.preempt.divergence import Divergence
from ckpt_engine.preempt.notice import Stop
from ckpt_engine.tracking.engine import Engine
from ckpt_engine.tracking.together import Decision, Take, Together
from ckpt_engine.tracking.verdict import Verdicts


class SharedCadence(Cadence):
    """Asked like any cadence. At each boundary `stop` MUST be called before `boundary`."""

    def __init__(self, settings: FrequencySettings, clock: Clock, sink: EventSink, engine: Engine) -> None:
        super().__init__(settings, clock, sink)
        assert engine.ranks is not None
        self._engine = engine
        self._together = Together(engine.ranks, super().boundary, engine, self._memory_is_due)
        self._decision: Decision | None = None
        self._halting: tuple[Stop, str | None] | None = None
        """How all ranks stop, and the reason of the last snapshot if there is to be one."""
        self.diverged: Divergence | None = None
        """What all ranks have agreed to end for, once they are there."""
        self._own_stop: Stop | None = None
        self._asked = False
        self._fits: Callable[[Stop], bool] = lambda _: False
        self._counted: int | None = None
        self._in_memory: int | None = None
        """The step after which all ranks take a snapshot into memory."""

    def start(self, step: int) -> None:
        super().start(step)
        self._together.start(step)

    def stop(self, step: int, own: Stop | None, *, asked: bool, fits: Callable[[Stop], bool]) -> Stop | None:
        """The stop of all ranks after `step`, if there is one; `diverged` tells if they end for another reason too.

        Args:
            own: what this rank knows of a stop.
            asked: somebody has asked it for a snapshot.
            fits: see `Together.lead`.
        """
        self._settle_memory()
        self._own_stop, self._asked, self._fits = own, asked, fits
        self._decision = self._together.decided(step)
        decision = self._decision
        if decision is not None and decision.stop is not None:
            self._halting, self._decision = (self._together.stop_of(decision), decision.reason), None
        if decision is not None and decision.diverged is not None:
            self.diverged, self._decision = Divergence(**decision.diverged), None
        return self.halting

    def stop_too(self, stop: Stop) -> None:
        """See `Halt.stop_too`; one that was agreed on before stays."""
        if self._halting is None:
            self._halting = stop, None

    @property
    def due(self) -> bool:
        """Between `stop` and `boundary`: whether all ranks take a snapshot now, be it into memory."""
        return self._decision is not None and self._decision.reason is not None

    def tell(self, found: Divergence) -> None:
        """See `Together.tell`. Between `stop` and `boundary`."""
        self._together.tell(found)

    @property
    def verdicts(self) -> Verdicts:
        """How the ranks end for a divergence."""
        return self._together.verdicts

    def halt(self, take: Take) -> None:
        """See `Together.halt`."""
        assert self._halting is not None
        self._together.halt(*self._halting, take)

    def stop_stuck(self, stop: Stop, where: str) -> bool:
        """No batch comes because of `stop`; whether all ranks stop here, see `Together.all_stuck`."""
        if self._together.all_stuck(where, (stop.deadline - time.monotonic()) / 2.0):
            self._halting = stop, "signal"
        return self._halting is not None

    @property
    def halting(self) -> Stop | None:
        """The stop that all ranks have agreed on, once they are there."""
        return None if self._halting is None else self._halting[0]

    def leave(self, seconds: float) -> None:
        """See `Together.leave`."""
        self._together.leave(seconds)

    def boundary(self, step: int) -> str | None:
        decision, self._decision = self._decision, None
        if decision is None or decision.reason is None:
            self._lead(step)
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
        self._lead(step)

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
        return self._engine.agree(lambda: super(SharedCadence, self).ended(step))

    def _memory_is_due(self, step: int) -> bool:
        return self._engine.memory and super().memory_due(step)

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
            self._lead(step)

    def _lead(self, step: int) -> None:
        self._together.lead(step, self._own_stop, asked=self._asked, fits=self._fits)


def cadence_of(settings: FrequencySettings, clock: Clock, engine: Engine) -> Cadence:
    """The cadence of a run, for one process or for one of several ranks."""
    if engine.ranks is None:
        return Cadence(settings, clock, engine.events)
    return SharedCadence(settings, clock, engine.events, engine)
