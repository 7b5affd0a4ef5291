"""A further tier as the leader of another node than rank 0's works on it: it copies its part of what is asked for."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ckpt_engine.copy.job import RankConfig, TierConfig
from ckpt_engine.copy.transfer import CopySourceError, reading_source
from ckpt_engine.errors import FormatError, StorageExistsError, StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.lease import read_holder
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.rows import copy_rows
from ckpt_engine.writer import part_records
from ckpt_engine.writer.commit_of_ranks import GATHER_LOOKS, give, questions
from ckpt_engine.writer.copy_target import CopyTarget, NearerTiers, TierPlace

_DUE_LOOKS = replace(GATHER_LOOKS, first_seconds=0.1)
_IDLE_LOOKS = replace(_DUE_LOOKS, most_seconds=20.0)
"""Between two looks for a question where none is expected. Rank 0 waits longer for an answer."""
UNHELD_SECONDS = 30.0
"""How long rank 0's writer may take to begin. The lease is free before."""


class NodeMemberTier(CopyTarget):
    """Has no lease and no retention there: that is rank 0's. It looks more often while it has something that is due.

    Args:
        ranks: of the leader that this works for.
    """

    def __init__(self, config: TierConfig, place: TierPlace, nearer: NearerTiers, ranks: RankConfig) -> None:
        super().__init__(config, place, nearer)
        self._ranks = ranks
        self._pause = _DUE_LOOKS.first_seconds
        self._last_seq = -1
        self._unasked_from: float | None = None
        """When a free lease there begins to mean that rank 0 wants nothing more; None: it was not asked for yet."""

    def advance(self) -> float | None:
        self.place.copy_lane.progress.moved()
        size = self._ranks.size  # what other numbers of ranks have saved is not asked for
        with reading_source():
            infos = self.nearer.nearest.list()
        near = {one.id: one for one in infos if one.partial is not None and one.partial.size == size}
        newest = max(near.values(), key=lambda info: info.seq, default=None)
        if newest is not None and newest.seq != self._last_seq:
            self._last_seq, self._pause = newest.seq, _DUE_LOOKS.first_seconds
        target = Repository(self.place.copies)
        record = target.record()
        if record is None or record.run != self.run.run:
            self.progress.waiting = self._wanted(list(near.values()), ())
            return self._next_look(due=newest is not None)  # rank 0 has not made it yet, or is about to complain
        asked, answers = questions(target.storage)
        for one in asked:
            if self._answer(one, near, answers.get(one.id, set()), target, newest):
                self._pause = _DUE_LOOKS.first_seconds
                return 0.0
        there = target.list()
        self.progress.newest = there[-1] if there else None
        self.progress.waiting = self._wanted(list(near.values()), there)
        if self.progress.waiting and self._is_unasked():
            self.progress.waiting = ()
        copy_rows(self.nearer.nearest.storage, self.place.copies, self.nearer.copied)
        return self._next_look(due=bool(self.progress.waiting))

    def _is_unasked(self) -> bool:
        """Whether rank 0's writer has ended: it gives back the lease when it wants nothing more."""
        if read_holder(self.place.copies) is not None:
            self._unasked_from = 0.0
            return False
        if self._unasked_from is None:
            self._unasked_from = time.monotonic() + UNHELD_SECONDS
        return time.monotonic() > self._unasked_from

    def _answer(
        self,
        asked: names.ParsedId,
        near: dict[str, SnapshotInfo],
        answered: set[int],
        target: Repository,
        newest: SnapshotInfo | None,
    ) -> bool:
        """Do what is asked for; False: that is done, or what is asked for may still come."""
        info = near.get(asked.id)
        if info is None:
            later = names.session_id(self._ranks.session, asked.seq, asked.step) == asked.id
            gone = not later or (newest is not None and newest.seq > asked.seq)
            if gone and self._ranks.rank not in answered:
                self._decline(asked.id, "it is not on its node", target)
            return False
        assert info.partial is not None
        if info.partial.ranks[0] in answered:
            return False
        near_by = self.nearer.nearest
        try:
            with self.progress.under_way(info):
                give(near_by, target, asked.id, partial(self._put, near_by, target))
        except CopySourceError as err:
            if not isinstance(err.error, FormatError | StorageMissingError):
                raise
            self._decline(asked.id, f"it cannot be read on its node: {err.error.message}", target)
        return True

    def _decline(self, snapshot: str, why: str, target: Repository) -> None:
        part = part_records.no_part(snapshot, why, target.run_id, self._ranks)
        with suppress(StorageExistsError):
            part_records.put(target.storage, part)

    def _next_look(self, *, due: bool) -> float:
        seconds = self._pause
        self._pause = (_DUE_LOOKS if due else _IDLE_LOOKS).after(seconds)
        return seconds
