"""Which shares writers of other machines have: the writer of rank 0 counts them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_engine.copy.job import RankConfig
from ckpt_engine.errors import CkptError
from ckpt_engine.writer.messages import Body, Kind
from ckpt_engine.writer.peer_link import PeerLink

_REMEMBERED = 16


@dataclass(eq=False)
class MirroredShares:
    """The snapshots whose shares are kept on other machines. Any thread.

    Args:
        ranks: whose writer this is.
        emit: takes messages to the trainer.
        lead: the writer of rank 0.
    """

    _ranks: RankConfig
    _emit: Callable[[Body], object]
    lead: PeerLink
    _of: dict[str, set[int]] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def note(self, snapshot: str) -> None:
        """The keepers of this rank's share have it: rank 0's writer counts that."""
        if self._ranks.rank == 0:
            self.count(snapshot, 0)
            return
        for _ in range(2):  # rank 0 may have another writer since
            try:
                line = self.lead.line()
                line.send({"what": "mirrored", "rank": self._ranks.rank, "snapshot": snapshot})
                line.receive()
            except (OSError, CkptError):
                self.lead.hang_up()  # if it stays away, rank 0 does not wait for ever
            else:
                return

    def count(self, snapshot: str, rank: int) -> None:
        """On rank 0: the share of this rank is kept. The trainer hears of it once all of them are."""
        with self._lock:
            ranks = self._of.setdefault(snapshot, set())
            ranks.add(rank)
            whole = len(ranks) == self._ranks.size
            while len(self._of) > _REMEMBERED:
                del self._of[next(iter(self._of))]
        if whole:
            self._emit({"kind": Kind.MIRRORED, "snapshot": snapshot})
