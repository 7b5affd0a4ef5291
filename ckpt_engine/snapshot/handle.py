"""The promise that a snapshot will be durable, as the user holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_engine.errors import CkptError, SnapshotFailedError, SnapshotSkippedError, WaitTimeoutError
from ckpt_engine.snapshot.arguments import seconds

if TYPE_CHECKING:
    from ckpt_engine.snapshot.pipeline import Pipeline

WAIT_SECONDS = 3600.0
"""Of waits without a timeout of their own: forever, but for a fault of ours."""


class SaveHandle:
    """One `save`. Training thread only.

    Attributes:
        step: as given to `save`.
        stall_seconds: how long `save` kept training from going on.
        skipped: why the snapshot was not taken (back-pressure), or None.
        durable: whether it is to become durable; else it only stays in memory.
        held: it is in memory, where it survives the trainer (only if not `durable`).
        snapshot: id of the snapshot once it is durable, else None.
        error: why it did not become durable, or None.
    """

    def __init__(self, pipeline: Pipeline, step: int, *, durable: bool = True, skipped: str | None = None) -> None:
        self._pipeline = pipeline
        self.step = step
        self.stall_seconds = 0.0
        self.skipped = skipped
        self.durable = durable
        self.held = False
        self.snapshot: str | None = None
        self.error: CkptError | None = None

    def done(self) -> bool:
        """Whether the outcome is known: durable, held in memory, failed or skipped. Never blocks."""
        self._pipeline.poll()
        return self._settled

    def wait(self, timeout: float | None = None) -> str:
        """Return the snapshot's id once it is durable; one that only stays in memory has none: "" once it is held.

        Args:
            timeout: seconds; None waits up to an hour.

        Raises:
            ArgumentError: `timeout` is no number.
            SnapshotSkippedError: it was not taken; nothing was lost, save again later.
            SnapshotFailedError: it did not become durable; the cause is chained.
            WaitTimeoutError: not durable yet; it may still become so.
        """
        most = seconds("timeout", timeout)
        if self.skipped is not None:
            raise SnapshotSkippedError(f"the snapshot of step {self.step} was skipped ({self.skipped})")
        if not self._pipeline.wait_for(self, most):
            raise WaitTimeoutError(
                f"the snapshot of step {self.step} is not {'durable' if self.durable else 'with the writer'} yet"
            )
        if self.error is not None:
            raise SnapshotFailedError(
                f"the snapshot of step {self.step} did not become durable: {self.error.message}", hint=self.error.hint
            ) from self.error
        return self.snapshot or ""

    @property
    def _settled(self) -> bool:
        return self.held or self.skipped is not None or self.snapshot is not None or self.error is not None

    def __repr__(self) -> str:
        state = (self.skipped and f"skipped: {self.skipped}") or self.snapshot or self.error
        state = state or ("in memory" if self.held else "in flight")
        return f"<SaveHandle step={self.step} {state}>"


def wait_seconds(timeout: float | None) -> float:
    """How long a wait may take for which the user has given `timeout`."""
    return WAIT_SECONDS if timeout is None else timeout
