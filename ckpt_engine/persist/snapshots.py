"""Writes one staged snapshot from the arena into one repository: data, digests, manifest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from ckpt_engine.errors import CkptError, StorageMissingError, WriterError
from ckpt_engine.observe.events import SnapshotCommitted
from ckpt_engine.persist.image import Draft, NewFile, whole
from ckpt_engine.persist.job import PersistJob
from ckpt_engine.persist.pieces import CutLayout, Digesting
from ckpt_engine.persist.skeleton import Skeleton
from ckpt_engine.persist.slots import ArenaSlot
from ckpt_engine.persist.stall import Progress
from ckpt_engine.store import layout as names
from ckpt_engine.store.manifest import DataFile, Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository


class SupersededError(WriterError):
    """The slot may have been filled anew while it was read."""


class Digests:
    """The digests of one image, once somebody has worked them out. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[str] | None = None

    @property
    def known(self) -> list[str] | None:
        """Of all pieces in order; None: not worked out yet."""
        return self._known

    def settle(self, found: list[str]) -> list[str]:
        """Note them; returns them.

        Raises:
            WriterError: they were others before: the image has changed, and is not a snapshot.
        """
        with self._lock:
            if self._known is not None and self._known != found:
                raise WriterError("an arena slot has changed while its snapshot was in use; it is not written")
            self._known = found
            return found


@dataclass(frozen=True, slots=True)
class Staged:
    """A job with what its numbers stand for, and the id that the snapshot gets.

    `unchanged` is asked once the slot was read: whether nobody can have filled it anew meanwhile.
    """

    job: PersistJob
    snapshot: str
    slot: ArenaSlot
    cut_layout: CutLayout
    skeletons: dict[str, Skeleton]
    digests: Digests = field(default_factory=Digests)
    unchanged: Callable[[], bool] = lambda: True

    @property
    def data(self) -> DataFile:
        """Its data file."""
        return DataFile(names.data_name(self.snapshot, self.job.rank), self.cut_layout.layout.nbytes)

    def manifest(self, run: str, draft: Draft) -> Manifest:
        """Its manifest in `run`, where it is stored as in `draft`."""
        job, cut_layout = self.job, self.cut_layout
        parsed = names.parse_id(self.snapshot)
        assert parsed is not None
        sizes = cut_layout.entry_bytes
        info = SnapshotInfo(
            id=self.snapshot,
            seq=parsed.seq,
            step=job.step,
            epoch=job.epoch,
            reason=job.reason,
            created=job.created,
            nbytes=cut_layout.nbytes,
            metrics=job.metrics,
            parent=job.parent,
            components={key: sum(sizes.get(name, 0) for name in one.entries) for key, one in self.skeletons.items()},
            line=job.line,
        )
        return Manifest(
            info=info,
            run=run,
            world={"size": 1},
            software=job.software,
            files=draft.files,
            entries=draft.entries,
            tree={key: skeleton.fill(job.values.get(key, [])) for key, skeleton in self.skeletons.items()},
            notes=job.notes,
            bases=draft.bases,
        )

    def digest(self) -> list[str]:
        """The digests of all pieces, worked out now unless they are known.

        Raises:
            WriterError: the image cannot be read.
        """
        return self.timed_digest()[0]

    def timed_digest(self) -> tuple[list[str], float]:
        """As `digest`, and the CPU time that other threads have spent on it."""
        if self.digests.known is not None:
            return self.digests.known, 0.0
        with self.slot.image(self.data.nbytes) as image:
            digesting = Digesting(image, self.cut_layout)
            return self.digests.settle(digesting.result()), digesting.cpu_seconds

    def whole(self, digests: list[str]) -> Draft:
        """The image as one file, given the digests of all pieces."""
        return whole(self.data.name, self.cut_layout, digests)

    def foresee(self, run: str, draft: Draft | None) -> Manifest:
        """Its manifest before the digests are known, unless there is a draft: as long as it will be."""
        return self.manifest(run, draft or self.whole(self.cut_layout.blank_digests()))


class Finish(Protocol):
    """How a snapshot comes to exist once its data is durable."""

    def commit(self, staged: Staged, repository: Repository, manifest: Manifest) -> Manifest:
        """Make it exist; its manifest."""
        ...

    def undo(self, staged: Staged, repository: Repository, new: Sequence[str]) -> None:
        """It does not exist: free its data files `new`."""
        ...


class Alone:
    """The one writer of a run commits what it has written."""

    def commit(self, _staged: Staged, repository: Repository, manifest: Manifest) -> Manifest:
        repository.commit(manifest)
        return manifest

    def undo(self, staged: Staged, repository: Repository, new: Sequence[str]) -> None:
        # The manifest goes first: a commit may have landed although it reported an error.
        repository.forget([staged.snapshot])
        repository.storage.delete(*new)


ALONE: Finish = Alone()


def write_snapshot(
    staged: Staged,
    repository: Repository,
    tier: str,
    progress: Progress,
    undo_failed: Callable[[CkptError], object],
    draft: Draft | None = None,
    stands: Callable[[Draft], bool] = lambda _: True,
    finish: Finish = ALONE,
) -> tuple[SnapshotCommitted, Manifest]:
    """Make `staged` durable in `repository`. Needs its lease.

    The arena slot is read until this returns, left behind or not.

    Args:
        tier: how the place is called in the event.
        progress: of the call that this is part of: a snapshot that nobody waits for any more is not committed.
        undo_failed: told if data of a snapshot that was not committed stays.
        draft: what is written; None: the whole image, which is digested meanwhile.
        stands: whether what a draft refers to is still there; asked last before the commit.
        finish: what happens when the data is durable.

    Raises:
        CkptError: it does not exist there.
        AbandonedError: as before; nobody waits for it.
    """
    job = staged.job
    cpu_before = time.thread_time()
    other_cpu_seconds = draft.cpu_seconds if draft is not None else 0.0
    progress.check()
    with staged.slot.image(staged.data.nbytes) as image:
        digesting = Digesting(image, staged.cut_layout) if draft is None and staged.digests.known is None else None
        began = time.monotonic()
        try:
            for file in _to_write(staged, draft):
                _put(repository, file, image)
        except BaseException:
            if digesting is not None:
                digesting.abandon()
            if draft is not None:
                _undo(staged, repository, draft, undo_failed, finish)
            raise
        write_seconds = time.monotonic() - began
        if digesting is not None:
            digesting.result()
            other_cpu_seconds = digesting.cpu_seconds
    stored = draft
    try:
        if stored is None:
            digests = staged.digests.settle(digesting.result()) if digesting is not None else staged.digest()
            stored = staged.whole(digests)
        progress.check()
        if not staged.unchanged():
            raise SupersededError(f"the snapshot of step {job.step} was left: a newer one has taken its place")
        if not stands(stored):
            raise StorageMissingError(f"what {staged.snapshot} refers to was removed while it was written")
        manifest = finish.commit(staged, repository, staged.manifest(repository.run_id, stored))
    except BaseException:
        _undo(staged, repository, stored, undo_failed, finish)
        raise
    committed = SnapshotCommitted(
        snapshot=staged.snapshot,
        step=job.step,
        tier=tier,
        nbytes=manifest.info.nbytes,
        written_bytes=stored.new_bytes,
        latency_seconds=time.monotonic() - job.instant_monotonic,
        write_seconds=write_seconds,
        cpu_seconds=time.thread_time() - cpu_before + other_cpu_seconds,
        time=time.time(),
    )
    return committed, manifest


def share_of(staged: Staged, repository: Repository, draft: Draft | None) -> Manifest:
    """The manifest of what one of several ranks has written, as `write_snapshot` did."""
    return staged.manifest(repository.run_id, draft or staged.whole(staged.digest()))


def _to_write(staged: Staged, draft: Draft | None) -> tuple[NewFile, ...]:
    return draft.new if draft is not None else staged.whole(staged.cut_layout.blank_digests()).new


def _put(repository: Repository, file: NewFile, image: memoryview) -> None:
    with ExitStack() as held:
        repository.storage.put(file.name, [held.enter_context(block) for block in file.blocks(image)])


def _undo(
    staged: Staged,
    repository: Repository,
    stored: Draft | None,
    failed: Callable[[CkptError], object],
    finish: Finish,
) -> None:
    """Free the data of a snapshot that could not be committed."""
    try:
        finish.undo(
            staged, repository, [file.name for file in stored.new] if stored is not None else [staged.data.name]
        )
    except CkptError as err:
        failed(err)
