"""What a loop reads of its tracker, and how it ends it."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

from ckpt_engine.errors import CkptError
from ckpt_engine.frequency.driver import Cadence
from ckpt_engine.tracking.engine import Engine
from ckpt_engine.tracking.feed import Feed


class Progress:
    """The part of a tracker that takes no snapshots."""

    _engine: Engine
    _log: logging.Logger
    _cadence: Cadence
    _feeds: list[Feed]
    _training: Feed | None
    _resumed: Feed | None
    _resumed_batches: int
    _steps: int

    def finish(self, *, complete: bool | None = None) -> None:
        """See the tracker."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """Epochs whose training is complete: `for epoch in range(tracker.epoch, n)`."""
        return self._training.epochs if self._training is not None else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps so far, those before a resume included; several optimizers in one batch count once."""
        return self._steps

    @property
    def resumed_batches(self) -> int:
        """Batches of the running epoch that were trained before the resume; 0 in all other epochs."""
        return self._resumed_batches if self._resumed is not None else 0

    def evaluated(self, seconds: float) -> None:
        """An evaluation took so long, which was not training. Passes over tracked loaders announce themselves."""
        self._cadence.exclude(seconds)
        self._cadence.validation_ended()

    def close(self) -> None:
        """`finish`, then wait until everything is durable.

        Raises:
            WaitTimeoutError, SnapshotFailedError: as `Checkpointer.close`.
        """
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

    def _within(self, feed: Feed) -> bool:
        """Another pass is not over: this one is an evaluation in an epoch, or they are zipped."""
        return any(one.active for one in self._feeds if one is not feed)

    def _counters(self, feed: Feed | None) -> set[int]:
        """Numbers that a loop may count along with the tracker."""
        delivered = 0 if feed is None else feed.delivered
        return {self._steps, self._steps + 1, self.epoch, self.epoch + 1, delivered, delivered + 1}
