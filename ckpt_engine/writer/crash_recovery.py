"""How the writers of several ranks make durable what all of them hold when the trainers are gone.

Ranks may be at different snapshots when they die, so each writer has several. Writers do not talk to each other: each
*leaves* its newest share, which is its data and its part record, and looks at the part records of the others. Where
another rank has left only something older, that is left too. So all arrive at the newest snapshot that every rank has,
and the coordinator commits it. A writer that is late or gone is waited for shortly; then each leaves all that it has,
so that the next start can commit what is complete by then. Where nodes have roots of their own, writers see what those
of their node leave. Each leaves all that it has, at once, and whatever is complete at a root is committed there: the
newest snapshot of all ranks is among that."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ckpt_engine.copy.job import RankConfig
from ckpt_engine.writer.commit_of_ranks import LOOKS, each_look
from ckpt_engine.writer.memory_snapshots import StagedJob

if TYPE_CHECKING:
    from ckpt_engine.writer.persister import Persister

PATIENCE_SECONDS = 5.0
"""How long the others are waited for. The coordinator holds the lease meanwhile, for which a restart waits."""
There = Mapping[str, Collection[int]]
"""The ranks that have left their share, by snapshot."""


def follow(mine: Sequence[str], there: There, rank: int, ranks: Sequence[int]) -> str | None:
    """The snapshot whose share is to be left next, or None: no other rank needs one.

    Args:
        mine: what this rank holds, newest first.
        ranks: those that meet.
    """
    left = [snapshot for snapshot in mine if rank in there.get(snapshot, ())]
    for snapshot in mine:
        if snapshot in left:
            continue
        for other in ranks:
            # One that has left something in common with us is not further behind.
            behind = other in there.get(snapshot, ()) and not any(other in there.get(one, ()) for one in left)
            if other != rank and behind:
                return snapshot
    return None


@dataclass(eq=False)
class CrashRecovery:
    """One writer's side.

    Args:
        ranks: whose writer it is.
        place: leaves shares where the writers meet, which is the nearest tier of each.
        patience_seconds: see above.
    """

    _ranks: RankConfig
    _place: Persister
    _patience_seconds: float = PATIENCE_SECONDS
    _bad: set[str] = field(default_factory=set, init=False)
    _left: set[str] = field(default_factory=set, init=False)
    _pause: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self, orders: Sequence[StagedJob]) -> None:
        """Make durable the newest of these orders that all ranks hold, as far as it depends on this writer.

        What was too new for an earlier meeting counts again: the others may have got theirs since.

        Args:
            orders: newest first, numbered by the ranks.

        Raises:
            CkptError: the place has failed; calling again continues.
        """
        there = self._place.look()
        mine = self._undecided(orders, there)
        left = {snapshot for snapshot in mine if self._ranks.rank in there.get(snapshot, ())}
        if not mine or (not self._ranks.places and self._have_met(orders, mine, left)):
            return
        for snapshot, order in mine.items():
            if snapshot not in left:
                self._leave(order)
        self._collect(mine)

    def _have_met(self, orders: Sequence[StagedJob], mine: Mapping[str, StagedJob], left: set[str]) -> bool:
        """Leave the newest of `mine`, then what others need to meet; whether they have. `left`: takes what is left."""
        rank, newest = self._ranks.rank, next(iter(mine))
        # What was persisted before says nothing of what the others hold now: something newer may be on its way.
        fresh = {snapshot: order for snapshot, order in mine.items() if snapshot == newest or snapshot not in left}
        if newest not in left:
            self._leave(mine[newest])
            left.add(newest)
        looking = self.each_look()
        while next(looking, False):
            there = self._place.look()
            if self._complete(fresh, there):
                return True
            if any(rank not in there.get(snapshot, ()) for snapshot in left):
                self._undecided(orders, there)
                return True  # what is not there any more is committed, or was dropped by a new start
            wanted = follow(list(mine), there, rank, self._ranks.members)
            if wanted is not None:
                self._leave(mine[wanted])
                left.add(wanted)
                looking = self.each_look()
        return False

    def _undecided(self, orders: Sequence[StagedJob], there: There) -> dict[str, StagedJob]:
        """Those of these orders, newest first, that may yet be committed; notes which one is committed already."""
        rank, leads, found = self._ranks.rank, self._ranks.leads, dict[str, StagedJob]()
        for order in orders:
            snapshot = order.snapshot or ""
            is_decided = leads and order.durable
            if not leads and (order.durable or snapshot in self._left) and rank not in there.get(snapshot, ()):
                is_decided = self._place.exists(snapshot)
                if not is_decided and snapshot not in self._left:
                    continue  # the coordinator has taken it back: it failed on some rank
            if not is_decided:
                found[snapshot] = order
                continue
            order.durable = True
            if not self._ranks.places:
                break  # nothing older matters; another node may not have this one
        return found

    def _leave(self, order: StagedJob) -> None:
        self._place.leave(order)
        self._left.add(order.snapshot or "")

    def _collect(self, mine: Mapping[str, StagedJob]) -> None:
        """Everybody leaves everything now: the coordinator waits once more for what becomes complete."""
        if not self._ranks.leads:
            return
        for _ in self.each_look():
            while self._complete(mine, self._place.look()):
                mine = {snapshot: order for snapshot, order in mine.items() if not order.durable}
                if not (mine and self._ranks.places):
                    return

    def each_look(self) -> Iterator[Literal[True]]:
        deadline = time.monotonic() + self._patience_seconds
        return each_look(LOOKS, lambda: deadline, self._pause.wait)

    def _complete(self, mine: Mapping[str, StagedJob], there: There) -> bool:
        """Whether this is the coordinator, and all shares of a snapshot are there: it is committed then.

        The others learn of it as their records vanish.
        """
        if not self._ranks.leads:
            return False
        for snapshot, order in mine.items():
            if len(there.get(snapshot, ())) < len(self._ranks.members) or snapshot in self._bad:
                continue
            if self._place.commit(order):
                return True
            self._bad.add(snapshot)
        return False
