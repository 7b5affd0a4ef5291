"""Which arena slots the writer may still need to rescue: the newest complete snapshots, until it surely has newer ones.

With a memory tier the writer makes the newest snapshot it was told of durable when the trainer is gone. Its slot must
not change before a newer one was told *and* that message is with the kernel: a trainer killed in between would leave a
slot half overwritten, and a writer that knows of no other. Of several ranks each keeps two while it fills a third
slot: see `persist.held`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ckpt_engine.errors import CkptError
from ckpt_engine.snapshot.handle import SaveHandle

KEPT = 1
KEPT_OF_RANKS = 2


@dataclass(frozen=True, slots=True)
class _Told:
    slot: int
    handle: SaveHandle | None
    writer: int


class Newest:
    """The slots of snapshots that the writer was told of, oldest first.

    Args:
        release: takes the slots that may change; called on the training thread.
        keep: so many of the newest may not.
    """

    def __init__(self, release: Callable[[int], None], keep: int = 1) -> None:
        self._release = release
        self.keep = keep
        self._told: deque[_Told] = deque()
        self._why: CkptError | None = None
        self.writer = 0
        """Counts the writers: those that were lost, and the one there is."""

    def tell(self, slot: int, handle: SaveHandle | None, writer: int) -> None:
        """A writer was told of the snapshot in `slot`. Any thread, one at a time, oldest first.

        Args:
            handle: set to held once the message cannot be lost any more; None for snapshots that become durable.
            writer: which one it was; it may be lost by now.
        """
        self._told.append(_Told(slot, handle, writer))

    def settle(self, flushed: Callable[[], bool]) -> None:
        """Release what is no longer needed. Training thread only.

        Args:
            flushed: whether everything sent so far is with the kernel, and the writer alive.
        """
        while self._told and self._told[0].writer != self.writer:
            self._give_up(self._told.popleft())
        # Count first: what is told after the question is not part of the answer.
        count = len(self._told)
        if not self._open(count) or not flushed():
            return
        for told in list(self._told)[:count]:
            if told.handle is not None:
                told.handle.held = True
        for _ in range(count - self.keep):
            self._release(self._told.popleft().slot)

    def lose(self, why: CkptError) -> None:
        """The writer is gone, and with it everything it was told."""
        self._why = why
        self.writer += 1
        while self._told:
            self._give_up(self._told.popleft())

    def _give_up(self, told: _Told) -> None:
        if told.handle is not None and not told.handle.held:
            told.handle.error = self._why
        self._release(told.slot)

    def _open(self, count: int) -> bool:
        if count > self.keep:
            return True
        return any((handle := told.handle) is not None and not handle.held for told in list(self._told)[:count])
