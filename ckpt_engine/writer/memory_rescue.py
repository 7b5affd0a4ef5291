"""Makes durable what the writer has only in memory.

That is when the trainer asks for it, when it closes, and when it is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

from ckpt_engine.errors import CkptError
from ckpt_engine.writer.memory_snapshots import MemorySnapshots, StagedJob
from ckpt_engine.writer.persister import Persister

RESCUE_SECONDS = 30.0
"""How long a rescue that fails is tried again. Less than the next writer waits for the lease."""
_AGAIN_SECONDS = 2.0
_SEAL_SECONDS = 600.0


class TrainerLife(Enum):
    """What the end of the trainer means for what is in memory."""

    PRESENT = auto()
    """It lives, or has closed the run."""
    GONE = auto()
    """It has left what is in memory to its writer."""
    WRITTEN = auto()
    """The same, but it has ended as it said, and its newest share is written."""


@dataclass(eq=False)
class MemoryRescue:
    """The snapshots in memory on their way to a disk. One thread; any thread may set what changes it.

    Args:
        held: the snapshots.
        persister: makes them durable.
        changed: notified when an attribute has changed.
        caught_up: waits until everything that the trainer has sent so far was taken in; whether that is so.

    Attributes:
        trainer: whether it is gone.
        is_hurried: the process is to end soon.
        ended_at: since when nothing is left to rescue, in monotonic seconds.
    """

    held: MemorySnapshots
    persister: Persister
    changed: threading.Condition
    caught_up: Callable[[], bool]
    trainer: TrainerLife = field(default=TrainerLife.PRESENT, init=False)
    is_hurried: bool = field(default=False, init=False)
    ended_at: float | None = field(default=None, init=False)

    @property
    def may_lose(self) -> bool:
        """Whether what is only in memory may be the newest snapshot that there is.

        A rank whose share is written does not know whether the snapshot of all ranks was committed; the first one does,
        unless nodes have roots of their own.
        """
        newest, ranks = self.held.newest, self.persister.config.ranks
        knows = ranks.rank == 0 and not ranks.places
        return newest is not None and not (newest.durable and knows)

    def flush(self, order: StagedJob) -> None:
        """Make this one durable, or of several ranks what is in memory, although the trainer lives."""
        if self.persister.config.ranks.several:
            self._save_held()
            return
        # The trainer cannot have filled the slot again: it sends a newer one before.
        order.unchanged = lambda one: self.caught_up() and self.held.newest is one
        self.persister.recover([order])

    def run(self) -> None:
        """After the last job: make durable what is in memory."""
        self._save_held()
        with self.changed:
            self.ended_at = time.monotonic()
            hurried = self.is_hurried
        self.held.settle()
        self.held.changed()
        if hurried:
            self.persister.secondary.stop()

    def _save_held(self) -> None:
        """Let what is in memory become durable, see `Persister.recover`. Most of the time it is when trainers close."""
        self.held.drop_torn()
        orders = self.held.all_held()
        for order in orders:
            order.unchanged = self.held.keeps
        if orders and (not orders[0].durable or (self.trainer is not TrainerLife.PRESENT and self.may_lose)):
            if self.trainer is not TrainerLife.PRESENT:
                self.held.sealed.wait(_SEAL_SECONDS)
            self._insist(orders)
        if self.trainer is TrainerLife.WRITTEN and orders:
            with suppress(CkptError):  # the tier does not answer: it stays for the next trainer
                if self.persister.exists(orders[0].snapshot or ""):
                    self.held.let_go()

    def _insist(self, orders: Sequence[StagedJob]) -> None:
        """Try, with some patience if the trainer is gone: what killed it may have hit the disk too."""
        deadline = time.monotonic() + RESCUE_SECONDS
        while not self.persister.recover(orders):
            with self.changed:
                left = deadline - time.monotonic()
                if self.trainer is TrainerLife.PRESENT or self.is_hurried or self.held.unwanted or left <= 0:
                    return
                self.changed.wait_for(lambda: self.is_hurried, min(_AGAIN_SECONDS, left))
