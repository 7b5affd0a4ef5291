"""How far a tracked loop is, as the loop reads it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from ckpt_engine.config import Config
from ckpt_engine.engine import Engine
from ckpt_engine.errors import CkptError
from ckpt_engine.loop.feed import Feed
from ckpt_engine.loop.phases import FRESH, RESTORING
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
        engine: of the run.
        log: of the adapter.
        step: at which training begins.
    """

    def __init__(self, engine: Engine, log: logging.Logger, step: int) -> None:
        self._engine, self._log, self._steps = engine, log, step
        self._phase = FRESH
        self.metrics = {}
        self._training: Feed | None = None
        """The loader whose loop trains."""
        self._resumed: Feed | None = None
        """The one whose pass the snapshot was taken in, until that is over."""
        self._resumed_batches = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return UnstartedCheckpoint, (self._engine.config, self.epoch, self._steps, self.resumed_batches)

    @property
    def facts(self) -> dict[str, str]:
        """What `repr` and a notebook show of the loop."""
        return {**self._engine.facts, "epoch": f"{self.epoch:,}", "step": f"{self._steps:,}"}

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
        return self._training.epochs if self._training is not None else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps so far, those before a resume included; several optimizers in one batch count once."""
        self._begins()
        return self._steps

    @property
    def resumed_batches(self) -> int:
        """Batches of the running epoch that were trained before the resume; 0 in all other epochs."""
        return self._resumed_batches if self._resumed is not None else 0

    def _awaits(self, feed: Feed) -> bool:
        """Whether a resumed loop has not asked for the first batch of this loader yet."""
        return self._phase is RESTORING and feed.resuming

    @abstractmethod
    def _begins(self) -> None:
        """The count of steps is read: a loop may be about to begin."""

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
            self._log.error("while handling %s: %s", kind.__name__, err)

    def _counters(self, feed: Feed | None) -> set[int]:
        """Numbers that a loop may count along with the tracker."""
        delivered = 0 if feed is None else feed.delivered
        return {self._steps, self._steps + 1, self.epoch, self.epoch + 1, delivered, delivered + 1}
