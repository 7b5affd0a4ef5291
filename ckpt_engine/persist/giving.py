"""A further tier as the leader of another node than rank 0's works on it: it copies its part of what is asked for."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from ckpt_engine.errors import CkptError, FormatError, StorageExistsError, StorageMissingError
from ckpt_engine.persist import parts
from ckpt_engine.persist.gather import LOOKS, give, questions
from ckpt_engine.persist.job import RankConfig
from ckpt_engine.persist.tier import Tier
from ckpt_engine.store import layout as names
from ckpt_engine.store.lease import read_holder
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.transfer import SourceError

_DUE_LOOKS = replace(LOOKS, first_seconds=0.1)
_IDLE_LOOKS = replace(_DUE_LOOKS, most_seconds=20.0)
"""Between two looks for a question where none is expected. Rank 0 waits longer for an answer."""
UNHELD_SECONDS = 30.0
"""How long rank 0's writer may take to begin. Nobody holds the lease before."""


class Giving(Tier):
    """Has no lease and no retention there: that is rank 0's. It looks more often while it has something that is due."""

    _pause = _DUE_LOOKS.first_seconds
    _last_seq = -1
    _was_held = False
    _free_since = 0.0

    def advance(self) -> bool:
        self.copies.progress.moved()
        size = self._ranks().size  # what other numbers of ranks have saved nobody asks for
        near = {one.id: one for one in self._nearest() if one.partial is not None and one.partial.size == size}
        newest = max(near.values(), key=lambda info: info.seq, default=None)
        if newest is not None and newest.seq != self._last_seq:
            self._last_seq, self._pause = newest.seq, _DUE_LOOKS.first_seconds
        target = Repository(self._places.watched)
        record = target.record()
        if record is None or record.run != self.run.run:
            self.waiting = tuple(self._wanted(list(near.values()), ()))
            self._look_later(due=newest is not None)  # rank 0 has not made it yet, or is about to complain
            return False
        asked, answers = questions(target.storage)
        for one in asked:
            if self._answer(one, near, answers.get(one.id, set()), target, newest):
                self._pause = _DUE_LOOKS.first_seconds
                return True
        there = target.list()
        self.newest = there[-1] if there else None
        self.waiting = tuple(self._wanted(list(near.values()), there))
        if self.waiting and self._nobody_asks():
            self.waiting = ()
        self._look_later(due=bool(self.waiting))
        return False

    def sweep(self) -> None:
        """It is rank 0's to sweep."""

    def _nearest(self) -> list[SnapshotInfo]:
        try:
            return self._nearer[0].repository.list()
        except CkptError as err:
            raise SourceError(err) from err

    def _nobody_asks(self) -> bool:
        """Whether rank 0's writer has ended: it gives back the lease when it wants nothing more."""
        if read_holder(self._places.watched) is not None:
            self._was_held, self._free_since = True, 0.0
            return False
        self._free_since = self._free_since or time.monotonic()
        return self._was_held or time.monotonic() - self._free_since > UNHELD_SECONDS

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
            later = names.session_id(self._ranks().session, asked.seq, asked.step) == asked.id
            gone = not later or (newest is not None and newest.seq > asked.seq)
            if gone and self._ranks().rank not in answered:
                self._decline(asked.id, "it is not on its node", target)
            return False
        assert info.partial is not None
        if info.partial.ranks[0] in answered:
            return False
        self.copying = info
        try:
            give(self._nearer[0].repository, target, asked.id, self._places.sink, self._scratch())
        except SourceError as err:
            if not isinstance(err.error, FormatError | StorageMissingError):
                raise
            self._decline(asked.id, f"it cannot be read on its node: {err.error.message}", target)
        finally:
            if self.copying is info:
                self.copying = None
        return True

    def _decline(self, snapshot: str, why: str, target: Repository) -> None:
        part = parts.no_part(snapshot, why, target.run_id, self._ranks())
        with suppress(StorageExistsError):
            parts.put(target.storage, part)

    def _ranks(self) -> RankConfig:
        assert self._gather is not None
        return self._gather.ranks

    def _look_later(self, *, due: bool) -> None:
        self.next_look_seconds = self._pause
        self._pause = (_DUE_LOOKS if due else _IDLE_LOOKS).after(self._pause)
