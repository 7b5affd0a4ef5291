"""The nearest tier as one writer works on it: its lease, its room, its retention. Runs in the tier's lane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ckpt_engine.errors import CkptError, LeaseHeldError, StorageError, WriterError
from ckpt_engine.observe.events import Event, Notice, SnapshotCommitted, SnapshotsForgotten
from ckpt_engine.persist.aside import Aside
from ckpt_engine.persist.commit import ALONE_SECONDS, Gathering, InFlight
from ckpt_engine.persist.encoded import most_bytes, write_encoded
from ckpt_engine.persist.image import Draft
from ckpt_engine.persist.job import ErrorRecord, RankConfig, WriterConfig
from ckpt_engine.persist.known import Known
from ckpt_engine.persist.room import Room
from ckpt_engine.persist.snapshots import ALONE, Finish, Staged, share_of, write_snapshot
from ckpt_engine.persist.stall import AbandonedError, Progress
from ckpt_engine.store import layout as names
from ckpt_engine.store.collect import Collected, Pruned, collect, prune
from ckpt_engine.store.lease import Lease
from ckpt_engine.store.manifest import RAW, Line
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import KeepAll, Retention, RetentionPolicy, policy_from
from ckpt_engine.store.transfer import RunText, adopt_run

LEASE_SECONDS = 60.0
"""How long it may take to see whether the holder of a lease lives, without a sign of progress."""


def policy_of(config: WriterConfig, say: Callable[[str], object]) -> RetentionPolicy:
    """The retention of the nearest tier. One that is a node's own cannot take components apart: `say` takes that.

    Raises:
        WriterError: it is impossible.
    """
    try:
        policy = policy_from(config.keep)
    except (ValueError, TypeError) as err:
        raise WriterError(f"cannot apply the retention {dict(config.keep)}: {err}") from err
    if config.ranks is None or not config.ranks.places or not config.ranks.leads:
        return policy
    whole = Retention.of(policy)
    if not whole.components:
        return policy
    say(f"{config.url} is this node's own: keep.components does nothing there")
    return replace(whole, components={})


class Near:
    """The nearest tier, its lease taken. Methods are called one at a time; each may be left behind by its caller.

    Args:
        url: how it is called in events.
        acquire: takes the lease anew.
        run: says which run it is, to take its place again if it was removed; None with one tier.
        progress: of the lane that the methods run in.
        aside: reads what is there where a read that hangs must not be in the way.
        emit: takes events.
        made_room: told the snapshots that had to go for the next one.
        codec: how snapshots are stored: a codec's name, or `delta`.
        ranks, in_flight, alone, alone_seconds: where this is the coordinator of several ranks, see `commit.Gathering`.
    """

    def __init__(
        self,
        url: str,
        repository: Repository,
        lease: Lease,
        acquire: Callable[[], Lease],
        policy: RetentionPolicy,
        run: RunText | None,
        progress: Progress,
        aside: Aside,
        emit: Callable[[Event], object],
        made_room: Callable[[Sequence[str]], object],
        codec: str = RAW,
        ranks: RankConfig | None = None,
        in_flight: InFlight | None = None,
        alone: threading.Event | None = None,
        alone_seconds: float = ALONE_SECONDS,
    ) -> None:
        self._url = url
        self._repository = repository
        self._lease = lease
        self._acquire = acquire
        self._policy = policy
        self._run = run
        self._progress = progress
        self._emit = emit
        self._made_room = made_room
        self._codec = codec
        self._aside = aside
        self._known = Known(repository, aside if ranks is None else None)
        self._drafts_fail = False
        self._swept = False
        self._ranks = ranks
        self._in_flight: Container[str] = () if in_flight is None else in_flight
        self._room = self._make_rooms()
        self._common_seq = 0
        self._line: Line | None = None
        self._finish: Finish = ALONE
        if ranks is not None and in_flight is not None and alone is not None:
            self._finish = Gathering(ranks, in_flight, progress, self.check_lease, alone, alone_seconds)

    def learn(self, line: Line, common: str | None) -> None:
        """What is written next is of this line, and all nodes have this snapshot: what is older is not what a lost
        common one would be missed for.
        """
        self._line = line
        parsed = names.parse_id(common) if common is not None else None
        self._common_seq = max(self._common_seq, parsed.seq if parsed is not None else 0)

    def _unsure(self) -> dict[str, str]:
        """Of several nodes: the snapshots that may be the newest that all of them have, and the reason to keep them."""
        if self._ranks is None or not self._ranks.places:
            return {}
        ids = self._repository.ids()
        return {one.id: "nothing newer is known to be on all nodes" for one in ids if one.seq >= self._common_seq}

    def check_lease(self) -> None:
        """Raises `LeaseHeldError` if the tier is not ours any more."""
        self._lease.check()

    def write(self, staged: Staged) -> SnapshotCommitted:
        """Make a snapshot durable, making room before.

        Raises:
            CkptError: it is not.
        """
        self.sweep()
        self._check_lease()
        self._progress.moved()
        if isinstance(self._policy, KeepAll):  # else it comes with retention
            self._repository.write_catalog_if_due()
        self._progress.check()
        if self._codec != RAW:
            return self._write_encoded(staged)
        known = self._known
        draft = self._draft(staged)
        self._make_room(staged, draft)
        if draft is not None and not known.stands(draft):
            draft = None
            self._make_room(staged, None)
        committed, manifest = write_snapshot(
            staged,
            self._repository,
            self._url,
            self._progress,
            self._not_undone(staged),
            draft,
            known.stands,
            self._finish,
        )
        known.committed(manifest if self._ranks is None else share_of(staged, self._repository, draft))
        self._room.committed(staged.snapshot)
        return committed

    def _write_encoded(self, staged: Staged) -> SnapshotCommitted:
        removed = True
        while removed:  # what was to be referred to may have gone for room: then more has to be written
            nbytes = most_bytes(staged, self._repository, self._codec)
            room = self._room.before(nbytes, lambda: staged.foresee(self._repository.run_id, None))
            removed = room is not None and bool(room.plan.remove)
            if room is not None:
                self._made_room(room.plan.remove)
            self._told(room)
        undo_failed = self._not_undone(staged)
        committed = write_encoded(staged, self._repository, self._url, self._codec, self._progress, undo_failed)
        self._room.committed(staged.snapshot)
        return committed

    def _draft(self, staged: Staged) -> Draft | None:
        """What need not be written again is not worth failing for: with trouble finding out, all is written."""
        try:
            draft = self._known.draft(staged)
        except StorageError as err:
            if not self._drafts_fail:
                self._notice(f"snapshots are written whole, older data at {self._url} cannot be read: {err.message}")
            self._drafts_fail = True
            return None
        self._drafts_fail = False
        return draft

    def _make_room(self, staged: Staged, draft: Draft | None) -> None:
        nbytes = staged.data.nbytes if draft is None else draft.new_bytes
        if self._ranks is not None:
            nbytes = staged.data.nbytes * len(
                self._ranks.members
            )  # shares are equal, and what others spare is not known
        # Digests may not be known yet; any will do to see how much will be written.
        room = self._room.before(nbytes, lambda: staged.foresee(self._repository.run_id, draft))
        if room is not None:
            self._made_room(room.plan.remove)
        self._told(room)

    def _make_rooms(self) -> Room:
        return Room(self._repository, self._lease, self._policy, self._notice, self._in_flight, self._unsure)

    def sweep(self) -> None:
        """Remove what writers that died have left behind; once, and again only after `sweep_again`. Never raises."""
        if self._swept:
            return
        self._swept = True
        try:
            self._report(collect(self._repository, self._lease, in_flight=self._in_flight))
        except AbandonedError:
            self._swept = False
        except Exception as err:  # noqa: BLE001 - reported; garbage harms nobody
            self._notice(f"cannot remove what earlier writers left behind: {err}")

    def sweep_again(self) -> None:
        """The disk is full: garbage goes before the next snapshot."""
        self._swept = False

    def prune(self, newest: str, protected: Mapping[str, str]) -> None:
        """Retention after a commit. The snapshot is durable: nothing that goes wrong here is its failure."""
        if isinstance(self._policy, KeepAll):
            return
        try:
            pruned = prune(
                self._repository,
                self._lease,
                self._policy,
                line=self._line,
                protected={**protected, **self._unsure()},
                verified=(newest,),
                in_flight=self._in_flight,
            )
        except AbandonedError:
            return
        except Exception as err:  # noqa: BLE001 - reported; tried again after the next snapshot
            self._notice(f"retention failed, older snapshots stay: {ErrorRecord.of(err).message}")
            return
        self._told(pruned)

    def release(self) -> None:
        """Give back the lease.

        Raises:
            CkptError, OSError: the tier cannot be told.
        """
        self._lease.release()

    def _check_lease(self) -> None:
        """Raises `LeaseHeldError` if the tier is not ours. One of several is taken again if it is free."""
        self._progress.moved(LEASE_SECONDS)
        try:
            self._lease.check()
        except LeaseHeldError:
            if self._run is None:
                raise
            storage = self._repository.storage
            with suppress(CkptError, OSError):  # whatever it was, it is lost
                self._lease.release()
            self._progress.moved(LEASE_SECONDS)
            removed = Repository(storage).record() is None
            self._lease = self._acquire()
            self._repository = adopt_run(self._run, storage)
            if removed:
                self._notice(
                    f"{self._url} was removed while it was written: it is made again, and the snapshots it had are gone"
                )
            self._room = self._make_rooms()
            self._known = Known(self._repository, self._aside if self._ranks is None else None)

    def _not_undone(self, staged: Staged) -> Callable[[CkptError], None]:
        def told(err: CkptError) -> None:
            self._swept = False
            self._notice(f"cannot remove the data of the failed snapshot {staged.snapshot} yet: {err}")

        return told

    def _told(self, pruned: Pruned | None) -> None:
        """Tell the trainer what retention did."""
        if pruned is None:
            return
        if pruned.forgotten:
            self._emit(SnapshotsForgotten(pruned.forgotten, pruned.collected.freed_bytes))
        for snapshot, why in pruned.not_slimmed.items():
            self._notice(f"snapshot {snapshot} keeps all its components: {why}")
        self._report(pruned.collected)

    def _report(self, collected: Collected) -> None:
        if collected.withheld_bytes:
            damaged = ", ".join(bad.id for bad in collected.damaged)
            self._notice(
                f"{collected.withheld_bytes} bytes of old data stay because damaged manifests may need them: {damaged}"
            )

    def _notice(self, message: str) -> None:
        self._emit(Notice("WARNING", message))
