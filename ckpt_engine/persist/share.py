"""The nearest tier as the writer of any rank but the coordinator works on it: it writes its share, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from ckpt_engine.errors import CkptError, ForeignError, StorageError
from ckpt_engine.observe.events import Event, Notice, SnapshotCommitted
from ckpt_engine.persist import parts
from ckpt_engine.persist.commit import Contributing
from ckpt_engine.persist.image import Draft
from ckpt_engine.persist.job import RankConfig
from ckpt_engine.persist.known import Known
from ckpt_engine.persist.snapshots import Staged, share_of, write_snapshot
from ckpt_engine.persist.stall import Progress
from ckpt_engine.store.manifest import Line
from ckpt_engine.store.repository import Repository


class Share:
    """Has no lease, no retention and no further tiers: all of that is the coordinator's. As `near.Near` otherwise.

    Args:
        url: how it is called in events.
        repository: of the run, which the coordinator has made.
        ranks: whose share it is.
        progress: of the lane that the methods run in.
        emit: takes events.

    Raises:
        ForeignError, CorruptError, NewerFormatError, StorageError: this place is not the coordinator's.
    """

    def __init__(
        self,
        url: str,
        repository: Repository,
        ranks: RankConfig,
        progress: Progress,
        emit: Callable[[Event], object],
    ) -> None:
        if repository.record() is None:
            raise ForeignError(
                f"rank {ranks.rank} finds no run at {url}, which rank {ranks.members[0]} writes",
                hint="the ranks of one machine need the same folder",
            )
        self._tier = parts.share_place(url, ranks.rank)
        self._repository = repository
        self._ranks = ranks
        self._progress = progress
        self._emit = emit
        self._known = Known(repository, None)

    def write(self, staged: Staged) -> SnapshotCommitted:
        """Make the share durable, and say so to the coordinator.

        Raises:
            CkptError: it is not.
        """

        def not_undone(err: CkptError) -> None:
            self._notice(f"cannot take back the share of the failed snapshot {staged.snapshot}: {err}")

        known, finish = self._known, Contributing(self._ranks)
        draft = self._draft(staged)
        written = write_snapshot(
            staged, self._repository, self._tier, self._progress, not_undone, draft, known.stands, finish
        )[0]
        known.committed(share_of(staged, self._repository, draft))
        return written

    def _draft(self, staged: Staged) -> Draft | None:
        """What it has in snapshots that the coordinator has committed need not be written again."""
        try:
            return self._known.draft(staged)
        except StorageError:
            return None  # nothing is worth failing for; if it goes on, writing says it

    def cancel(self, snapshot: str, why: str) -> None:
        """Tell the coordinator that there is no share of a snapshot. If that fails its patience will have to do."""
        part = parts.no_part(snapshot, why, self._repository.run_id, self._ranks)
        with suppress(CkptError):
            parts.put(self._repository.storage, part)

    def sweep(self) -> None:
        """Nothing is this rank's to remove."""

    def sweep_again(self) -> None:
        """As `sweep`."""

    def learn(self, line: Line, common: str | None) -> None:
        """As `sweep`."""

    def prune(self, newest: str, protected: Mapping[str, str]) -> None:
        """As `sweep`."""

    def release(self) -> None:
        """There is no lease to give back."""

    def _notice(self, message: str) -> None:
        self._emit(Notice("WARNING", message))
