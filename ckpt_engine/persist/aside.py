"""Reads at a tier that nothing depends on: one that hangs is left behind, and the call that asked goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckpt_engine.persist import stall
from ckpt_engine.persist.stall import SLOWEST_BYTES_PER_SECOND, Lane, Progress
from ckpt_engine.store.repository import Repository

T = TypeVar("T")


class Aside:
    """Reads at one tier while a call to it is under way.

    There is at most one read that hangs: until it ends, others are refused at once.

    Args:
        repository: at the tier; watched by `lane`, and of no other use.
        lane: that the reads run in.
        waiting: progress of the call that asks, which must not look as if it hung while a read does.
    """

    def __init__(self, repository: Repository, lane: Lane, waiting: Progress) -> None:
        self._repository = repository
        self._lane = lane
        self._waiting = waiting

    def read(self, work: Callable[[Repository], T], nbytes: int = 0) -> T:
        """The result of `work`, which reads at most so many bytes in one call, and into nothing that others need.

        Raises:
            StorageStalledError: it hangs, or one before still does.
        """
        self._waiting.moved(stall.STALL_SECONDS + nbytes / SLOWEST_BYTES_PER_SECOND)
        try:
            return self._lane.call(lambda: work(self._repository))
        finally:
            self._waiting.moved()
