"""Writes one staged snapshot from the arena into one repository: data, digests, manifest.

What one repository is known to hold already: the pieces of its newest snapshot, by which the next one is drafted.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Protocol

from ckpt_engine.copy import write_plan as drafts
from ckpt_engine.copy.job import PersistJob
from ckpt_engine.copy.row_deltas import Aside, RowDeltas
from ckpt_engine.copy.staged import ArenaSlot, CutLayout, Digesting
from ckpt_engine.copy.write_plan import WritePlan, whole
from ckpt_engine.errors import CkptError, FormatError, StorageMissingError, WriterError
from ckpt_engine.observe.events import SnapshotCommitted
from ckpt_engine.store import names
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import chain_of
from ckpt_engine.store.manifest import DataFile, Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.watchdog import CallProgress
from ckpt_engine.store.tree import KeySkeleton


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
    skeletons: dict[str, KeySkeleton]
    digests: Digests = field(default_factory=Digests)
    unchanged: Callable[[], bool] = lambda: True

    @property
    def data(self) -> DataFile:
        """Its data file."""
        return DataFile(names.data_name(self.snapshot, self.job.rank), self.cut_layout.layout.nbytes)

    def manifest(self, run: str, draft: WritePlan) -> Manifest:
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

    def whole(self, digests: list[str]) -> WritePlan:
        """The image as one file, given the digests of all pieces."""
        return whole(self.data.name, self.cut_layout, digests)


class Finish(Protocol):
    """How a snapshot comes to exist once its data is durable."""

    def commit(self, staged: Staged, repository: Repository, manifest: Manifest) -> Manifest:
        """Make it exist; its manifest."""
        ...

    def undo(self, staged: Staged, repository: Repository, new: Sequence[str]) -> None:
        """It does not exist: free its data files `new`, if any was put, and say so where others wait for it."""
        ...


class Alone:
    """The one writer of a run commits what it has written."""

    def commit(self, _staged: Staged, repository: Repository, manifest: Manifest) -> Manifest:
        repository.commit(manifest)
        return manifest

    def undo(self, staged: Staged, repository: Repository, new: Sequence[str]) -> None:
        if new:
            # The manifest goes first: a commit may have landed although it reported an error.
            repository.forget([staged.snapshot])
            repository.storage.delete(*new)


ALONE: Finish = Alone()


class Contents(Protocol):
    """What a staged snapshot stores in one repository, and in which form. For one attempt.

    Attributes:
        staged, repository: of which, and where.
        new_bytes: of its data files; at most so many until all are put.
        write_seconds, cpu_seconds: what putting them has taken, and the CPU time of other threads for that.
    """

    staged: Staged
    repository: Repository
    new_bytes: int
    write_seconds: float
    cpu_seconds: float

    @property
    def new(self) -> Sequence[str]:
        """The names of the data files that it has put, or begun to put."""
        ...

    def put(self, image: memoryview, progress: CallProgress) -> Manifest:
        """Store the data files, durably; the manifest of what is stored."""
        ...

    def stands(self) -> bool:
        """Whether the older data that it refers to is there, and stays as long as nothing is forgotten.

        Raises:
            StorageError: that cannot be told.
        """
        ...


class Plain:
    """The whole image as one file, digested while it is written; or what a draft says.

    Args:
        stands: whether what a draft refers to is still there.
    """

    def __init__(
        self,
        staged: Staged,
        repository: Repository,
        draft: WritePlan | None = None,
        stands: Callable[[WritePlan], bool] = lambda _: True,
    ) -> None:
        self.staged = staged
        self.repository = repository
        self._new: list[str] = []
        self.new_bytes = staged.data.nbytes if draft is None else draft.new_bytes
        self.write_seconds = 0.0
        self.cpu_seconds = 0.0 if draft is None else draft.cpu_seconds
        self._draft = draft
        self._stands = stands

    @property
    def new(self) -> Sequence[str]:
        return self._new

    def manifest(self) -> Manifest:
        """As it will be; the digests of a whole image may be any until they are known."""
        staged = self.staged
        plan = self._draft or staged.whole(staged.digests.known or staged.cut_layout.blank_digests())
        return staged.manifest(self.repository.run_id, plan)

    def put(self, image: memoryview, progress: CallProgress) -> Manifest:
        del progress
        staged, draft = self.staged, self._draft
        digesting = Digesting(image, staged.cut_layout) if draft is None and staged.digests.known is None else None
        began = time.monotonic()
        try:
            for file in (draft or staged.whole(staged.cut_layout.blank_digests())).new:
                with ExitStack() as held:
                    blocks = [held.enter_context(block) for block in file.blocks(image)]
                    self.repository.storage.put(file.name, blocks)
                self._new.append(file.name)
        except BaseException:
            if digesting is not None:
                digesting.abandon()
            raise
        self.write_seconds = time.monotonic() - began
        if digesting is not None:
            staged.digests.settle(digesting.result())
            self.cpu_seconds = digesting.cpu_seconds
        return self.manifest()

    def stands(self) -> bool:
        return self._draft is None or self._stands(self._draft)


def write_snapshot(
    contents: Contents,
    tier: str,
    progress: CallProgress,
    undo_failed: Callable[[CkptError], object],
    finish: Finish = ALONE,
) -> tuple[SnapshotCommitted, Manifest]:
    """Make a staged snapshot durable in a repository. Needs its lease.

    The arena slot is read until this returns, left behind or not.

    Args:
        tier: how the place is called in the event.
        progress: of the call that this is part of: a snapshot that nobody waits for any more is not committed.
        undo_failed: told if data of a snapshot that was not committed stays.
        finish: what happens when the data is durable.

    Returns:
        The event, and the manifest of what is stored: of several ranks, that of this one's share.

    Raises:
        CkptError: it does not exist there.
        AbandonedError: as before; nobody waits for it.
    """
    staged, repository = contents.staged, contents.repository
    cpu_before = time.thread_time()
    progress.check()
    try:
        with staged.slot.image(staged.data.nbytes) as image:
            stored = contents.put(image, progress)
        progress.check()
        if not staged.unchanged():
            raise SupersededError(f"the snapshot of step {staged.job.step} was left: a newer one has taken its place")
        if not contents.stands():
            raise StorageMissingError(f"what {staged.snapshot} refers to was removed while it was written")
        manifest = finish.commit(staged, repository, stored)
    except BaseException:
        try:
            finish.undo(staged, repository, contents.new)
        except CkptError as err:
            undo_failed(err)
        raise
    committed = SnapshotCommitted(
        snapshot=staged.snapshot,
        step=staged.job.step,
        tier=tier,
        nbytes=manifest.info.nbytes,
        written_bytes=contents.new_bytes,
        latency_seconds=time.monotonic() - staged.job.instant_monotonic,
        write_seconds=contents.write_seconds,
        cpu_seconds=time.thread_time() - cpu_before + contents.cpu_seconds,
        time=time.time(),
    )
    return committed, stored


SMALL_BYTES = 64 << 20
"""Images up to this size are digested before they are written whenever there is an older snapshot: it takes no time."""
SAMPLES = 8


class DedupBaseline:
    """Drafts the snapshots of one writer in one repository, one after another.

    The image is digested before it is written only where that is likely to spare writing: if it did for the snapshot
    before, or if samples of it are unchanged. Else digesting runs beside writing.

    Args:
        repository: that is written to.
        aside: reads what is there. None: this is one of several ranks. It knows what it has written itself and not what
            the others have, so nothing is read: whole pieces of its own share are spared from its second snapshot on.
    """

    def __init__(self, repository: Repository, aside: Aside | None) -> None:
        self._repository = repository
        self._aside = aside
        self._deltas_from = aside if repository.storage.capabilities.cheap_reads else None
        """Where reading older data back costs little; else only whole pieces are spared."""
        self._newest: Manifest | None = None
        self._expects = False

    def draft(self, staged: Staged) -> WritePlan | None:
        """What the snapshot has to write; None: its whole image.

        Raises:
            WriterError: the image cannot be read.
            StorageError: what is there cannot be read, or that hangs; nothing has come of it.
        """
        if staged.cut_layout.nbytes < drafts.LEAST_BYTES:
            return None
        before = self._before()
        if before is None or not self._is_promising(staged, before):
            return None
        began = time.thread_time()
        digests, digest_seconds = staged.timed_digest()
        with staged.slot.image(staged.data.nbytes) as image:
            encode = RowDeltas(self._deltas_from, before, image).encode if self._deltas_from is not None else _nothing
            made = drafts.partial(staged.snapshot, staged.job.rank, staged.cut_layout, digests, before, encode)
        self._expects = made is not None
        if made is None or not self.stands(made):
            return None
        return replace(made, cpu_seconds=time.thread_time() - began + digest_seconds)

    def stands(self, draft: WritePlan) -> bool:
        """Whether everything that a draft refers to is still there, and will be as long as nothing is forgotten.

        Raises:
            StorageError: that cannot be told.
        """
        return draft.source is None or self._repository.still_has(draft.source, draft.old_files)

    def committed(self, manifest: Manifest) -> None:
        """Note the newest snapshot; of several ranks, this one's share of it, which may yet come to nothing."""
        self._aside, self._newest = None, manifest

    def _before(self) -> Manifest | None:
        if self._aside is not None:
            aside, self._aside = self._aside, None  # asked once
            try:
                self._newest = aside.read(_newest)
            except (FormatError, StorageMissingError):
                self._newest = None  # damaged or gone: then all is written
        return self._newest

    def _is_promising(self, staged: Staged, before: Manifest) -> bool:
        cut_layout = staged.cut_layout
        if self._expects or staged.digests.known is not None or cut_layout.nbytes <= SMALL_BYTES:
            return True
        cuts = zip(cut_layout.layout.entries, cut_layout.extents, strict=True)
        pieces = [(extent.offset, extent, entry) for entry, extents in cuts for extent in extents]
        with staged.slot.image(staged.data.nbytes) as image:
            deltas = RowDeltas(self._deltas_from, before, image) if self._deltas_from is not None else None
            for number in range(SAMPLES):
                # Evenly over the bytes: it is bytes that are to be spared.
                middle = staged.data.nbytes * (2 * number + 1) // (2 * SAMPLES)
                _, extent, entry = pieces[max(0, bisect_right(pieces, middle, key=itemgetter(0)) - 1)]
                old = drafts.old_pieces(before, entry).get(extent.offset - entry.offset)
                if old is None:
                    continue
                with image[extent.offset : extent.offset + extent.nbytes] as part:
                    if digest(part) == old.content_digest:
                        return True
                chain = chain_of(before, entry.name, extent.offset - entry.offset, old)
                if deltas is not None and deltas.is_likely(entry, extent, chain):
                    return True
        return False


def _newest(repository: Repository) -> Manifest | None:
    ids = repository.ids()
    return repository.read(ids[-1].id) if ids else None


def _nothing(*_: object) -> None:
    """Encodes nothing."""
