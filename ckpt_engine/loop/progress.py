"""How far a tracked loop is, as the loop reads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from ckpt_engine.config import Config
from ckpt_engine.engine import Engine
from ckpt_engine.errors import CkptError
from ckpt_engine.loop.boundary import TrainingRun
from ckpt_engine.loop.feed import Feed
from ckpt_engine.loop.loop_life import LoopLife
from ckpt_engine.loop.turns import Turns
from ckpt_engine.observe.run_facts import WithFacts
from ckpt_engine.snapshot import arguments


class UnstartedCheckpoint:
    """What a copy or a pickle of a tracker is: it takes and restores nothing.

    Args:
        config: the options of the run.
        epoch, global_step, resumed_batches: those of the moment of the copy.
    """

    def __init__(self, config: Config, epoch: int, global_step: int, resumed_batches: int) -> None:
        self.config, self.epoch, self.global_step, self.resumed_batches = config, epoch, global_step, resumed_batches

    def step(self, *_: Any, **__: Any) -> None: ...

    before_update = evaluated = finish = release = close = abandon_resume = step


class LoopProgress(WithFacts, ABC):
    """What a loop reads of its tracker, and how it closes it.

    Args:
        run: of the loop.
        step: at which training begins.
    """

    def __init__(self, run: TrainingRun, step: int) -> None:
        self._run = run
        self._turns, self._life = Turns(step), LoopLife()
        self.metrics = {}
        self._training: Feed | None = None
        """The loader whose loop trains."""

    def __reduce__(self) -> tuple[Any, ...]:
        return UnstartedCheckpoint, (self._engine.config, self.epoch, self._turns.step, self.resumed_batches)

    @property
    def _engine(self) -> Engine:
        return self._run.engine

    @property
    def facts(self) -> dict[str, str]:
        """What `repr` and a notebook show of the loop."""
        return {**self._engine.facts, "epoch": f"{self.epoch:,}", "step": f"{self._turns.step:,}"}

    @abstractmethod
    def finish(self, *, complete: bool | None = None) -> None:
        """See the tracker."""

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers that retention may rank snapshots by; the loop keeps them up to date.

        Raises:
            ArgumentError: a value is put in, or assigned, that means no number.
        """
        return self._metrics

    @metrics.setter
    def metrics(self, values: Mapping[str, Any]) -> None:
        self._metrics: dict[str, float] = arguments.Metrics(values)

    def report(self, values: Mapping[str, Any]) -> None:
        """What a trainer has measured: the numbers among it are those of the next snapshots."""
        self.metrics.update(arguments.numbers_among(values))

    @property
    def epoch(self) -> int:
        """Epochs whose training is complete: `for epoch in range(tracker.epoch, n)`."""
        return self._training.history.epochs if self._training is not None else 0

    @property
    def resumed_batches(self) -> int:
        """Batches of the running epoch that were trained before the resume; 0 in all other epochs."""
        return self._life.batches if self._life.resumed is not None else 0

    def close(self) -> None:
        """`finish`, then wait until everything is durable.

        Raises:
            WaitTimeoutError, SnapshotFailedError: as `Checkpointer.close`.
        """
        self._engine.begin_close(None)
        try:
            self.finish()
        finally:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CkptError as err:
            if kind is None:
                raise
            self._run.log.error("while handling %s: %s", kind.__name__, err)

    def _counters(self, feed: Feed | None) -> set[int]:
        """Numbers that a loop may count along with the tracker."""
        delivered = 0 if feed is None else feed.delivered
        step, epoch = self._turns.step, self.epoch
        return {step, step + 1, epoch, epoch + 1, delivered, delivered + 1}
