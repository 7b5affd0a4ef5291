"""What a run loses if it ends now."""

from __future__ import annotations

from ckpt_engine.copy.job import ErrorRecord
from ckpt_engine.errors import CkptError, SnapshotFailedError, SnapshotSkippedError
from ckpt_engine.observe.events import Event, SnapshotCommitted, SnapshotFailed
from ckpt_engine.snapshot.save_request import SaveHandle

_SKIPPED = SnapshotSkippedError.code
"""Another rank was busy, or reports itself what it lost."""


class NewestState:
    """The newest state that was to be saved, and whether it is durable.

    Args:
        on_error: the option.

    Attributes:
        durable_step: of the newest snapshot that is durable; -1: none is.
        cause: why the newest snapshot that was wanted is durable nowhere; None: it is, or may become so.
        in_vain_seconds: the newest wait since a snapshot was taken took so long, and did not see it durable.
    """

    def __init__(self, on_error: str) -> None:
        self._on_error = on_error
        self._handle: SaveHandle | None = None
        self._step = self.durable_step = -1
        self.cause: CkptError | None = None
        self.in_vain_seconds = 0.0

    def note_wanted(self, step: int, handle: SaveHandle | None, cause: CkptError | None = None) -> None:
        """The state of this step was to be saved; `handle`: its snapshot was taken, `cause`: why it was not."""
        self._handle, self._step, self.cause = handle, step, cause

    def emit(self, event: Event) -> None:
        """Takes what has become of a snapshot; other kinds are ignored."""
        if isinstance(event, SnapshotCommitted):
            self.durable_step = event.step
            self.cause = None if event.step == self._step else self.cause
        elif isinstance(event, SnapshotFailed) and event.step == self._step and event.code != _SKIPPED:
            self.cause = ErrorRecord(event.code, event.message, event.hint).exception()

    @property
    def loss(self) -> SnapshotFailedError | None:
        """What the run loses if it ends now: the last state that was to be saved is durable nowhere. None: nothing."""
        if self.cause is None or (self._handle is not None and self._handle.has_raised):
            return None
        newest = "no snapshot is durable" if self.durable_step < 0 else f"step {self.durable_step:,} is the newest"
        ends = "" if self._on_error == "warn" else "`on_error: warn` ends without this error"
        hints = (self.cause.hint, "`on_error: raise` stops training at the first failure", ends)
        return SnapshotFailedError(
            f"step {self._step:,} is lost, its state is durable nowhere, {newest}: {self.cause.message}",
            hint="; ".join(filter(None, hints)),
        )
