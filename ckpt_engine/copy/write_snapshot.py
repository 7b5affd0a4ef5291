"""Writes one staged snapshot from its slot of the arena into one repository.

To its writer it is a slot of the arena, mapped, cut into pieces and digested. `ParallelMap` does such work on threads
that also run while the interpreter ends, for other copies too.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

from ckpt_engine.copy.host_memory import shared_bytes
from ckpt_engine.copy.job import EntryLayout, KeySkeleton, Layout, PersistJob
from ckpt_engine.errors import CkptError, CorruptError, StorageMissingError, WriterError
from ckpt_engine.observe.events import SnapshotCommitted
from ckpt_engine.store import names
from ckpt_engine.store.container import PIECE_BYTES, digest
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.watchdog import CallProgress

T = TypeVar("T")
U = TypeVar("U")
_MAX_THREADS = 4
THREAD_BYTES = 4 << 20
"""What is smaller is digested while a thread would start."""
PIECES_PER_PART = 16
"""Other numbers of ranks have other parts of an array: so many pieces of a part let them read, and verify, little else.
"""
LEAST_PIECE_BYTES = 128 << 10
"""The least that is worth 100 bytes of a manifest."""
PIECE_ALIGN = 4096
"""A cut inside a row is at a multiple of this, and inside no number."""
MOST_PART_PIECES = 1 << 18
"""So many pieces more, at most, has a snapshot of many ranks for that: each of them reads its manifest."""


@dataclass(eq=False)
class ArenaSlot:
    """One shared buffer. It is there as long as this object, whatever becomes of the trainer. Thread safe.

    Args:
        fd: a descriptor of the buffer, owned by this object from now on.
        nbytes: its size.
    """

    _fd: int
    _nbytes: int
    _memory: memoryview | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self._fd).atexit = False

    @contextmanager
    def image(self, nbytes: int) -> Iterator[memoryview]:
        """The first `nbytes` bytes, to read; valid inside the `with` only.

        Raises:
            WriterError: the slot is smaller, or the memory cannot be mapped.
        """
        if nbytes > self._nbytes:
            raise WriterError(f"an image of {nbytes} bytes does not fit an arena slot of {self._nbytes} bytes")
        with self._lock:
            if self._memory is None:
                self._memory = self._map()
            memory = self._memory
        with memory[:nbytes] as image:
            yield image

    def _map(self) -> memoryview:
        try:
            # Mapped after the trainer has filled it: populating then costs no page faults and allocates nothing.
            return shared_bytes(self._fd, self._nbytes, writable=False)
        except (OSError, ValueError, CorruptError) as err:
            raise WriterError(f"cannot map an arena slot of {self._nbytes} bytes: {err}") from err

    def reading_fd(self) -> int:
        """A new descriptor of the buffer that can only be read; the caller closes it.

        Raises:
            OSError: the system refuses.
        """
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)


def part_piece_bytes(entries: Iterable[EntryLayout]) -> int:
    """The least that a piece of a part of an array has, given what one rank has; about the same on all ranks."""
    parts = [one for one in entries if one.whole is not None and one.nbytes]
    nbytes = sum(one.nbytes // math.prod(one.shape) * math.prod(one.whole or ()) for one in parts)
    return max(LEAST_PIECE_BYTES, nbytes // MOST_PART_PIECES)


def cut(entry: EntryLayout, least_bytes: int = LEAST_PIECE_BYTES, most_bytes: int = PIECE_BYTES) -> tuple[slice, ...]:
    """Where the pieces of an entry are: in order, without gaps, each of at most `most_bytes`.

    Pieces are whole rows (first dimension), so that a change of some rows changes few pieces; rows bigger than a piece
    are cut as well. A part of an array is cut into smaller ones. An empty entry has no pieces.

    Args:
        least_bytes: see `part_piece_bytes`.
    """
    rows = entry.shape[0] if entry.shape else 1
    step = most_bytes
    if entry.whole is not None:
        wanted = max(entry.nbytes // PIECES_PER_PART, least_bytes)
        step = min(-(-wanted // PIECE_ALIGN) * PIECE_ALIGN, most_bytes)
    if rows and entry.nbytes % rows == 0 and 0 < entry.nbytes // rows <= step:
        row_bytes = entry.nbytes // rows
        step = step // row_bytes * row_bytes
    end = entry.offset + entry.nbytes
    return tuple(slice(start, min(start + step, end)) for start in range(entry.offset, end, step))


@dataclass(frozen=True)
class CutLayout:
    """A layout with its pieces, worked out once for all snapshots that use it.

    Args:
        nbytes: logical bytes, header and padding excluded.
        entry_bytes: logical bytes by entry name.
    """

    layout: Layout
    extents: tuple[tuple[slice, ...], ...]
    nbytes: int
    entry_bytes: dict[str, int]

    @classmethod
    def of(cls, layout: Layout) -> CutLayout:
        """Cut `layout`.

        Raises:
            ValueError: an entry lies outside the file, or its size does not fit its shape.
        """
        for entry in layout.entries:
            if entry.offset < layout.header_nbytes or entry.offset + entry.nbytes > layout.nbytes:
                raise ValueError(f"entry {entry.name!r} lies outside the data file")
            if (entry.nbytes == 0) != (math.prod(entry.shape) == 0):
                raise ValueError(f"entry {entry.name!r} of shape {entry.shape} cannot have {entry.nbytes} bytes")
        sizes = {entry.name: entry.nbytes for entry in layout.entries}
        least_bytes = part_piece_bytes(layout.entries)
        extents = tuple(cut(entry, least_bytes) for entry in layout.entries)
        return cls(layout, extents, sum(sizes.values()), sizes)

    @cached_property
    def blank(self) -> dict[str, Entry]:
        """The manifest's entries as they will be, with digests of nothing."""
        return self.entries([digest(b"")] * sum(map(len, self.extents)))

    def entries(self, digests: Sequence[str]) -> dict[str, Entry]:
        """The manifest's entries, given the digests of all pieces in order."""
        found: dict[str, Entry] = {}
        if len(digests) != sum(map(len, self.extents)):
            raise ValueError(f"{len(digests)} digests are too few or too many")
        left = iter(digests)
        for entry, extents in zip(self.layout.entries, self.extents, strict=True):
            pieces = [Piece(0, one.start, one.stop - one.start, next(left), one.stop - one.start) for one in extents]
            found[entry.name] = Entry(entry.dtype, entry.shape, tuple(pieces), entry.container_dtype)
        return found


class ParallelMap(Generic[T, U]):
    """Does something with each of many items on threads of its own, and perhaps none: then it is done at once.

    The threads are daemons: a writer thread still writes while the interpreter ends, when executors take no work.
    Several at once cost training less than one that works longer: a parallel region of the training waits for whichever
    of its threads has lost its core for the longest time.

    Either `result` or `abandon` MUST be called; after it nothing is done any more.
    """

    def __init__(self, work: Callable[[T], U], items: Sequence[T], threads: int, name: str) -> None:
        self._work, self._items = work, items
        """What it is done with; let go of at the end."""
        self._found: dict[int, U] = {}
        self._next = itertools.count()
        self._error: BaseException | None = None
        self._abandoned = threading.Event()
        self._cpu_seconds: list[float] = []
        if not threads:
            self._do()
        count = min(threads, len(items))
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of its threads, once they have ended."""
        return sum(self._cpu_seconds)

    def _run(self) -> None:
        began = time.thread_time()
        try:
            self._do()
        except BaseException as err:  # noqa: BLE001 - handed to the caller, who raises it
            self._error = err
            self._abandoned.set()
        finally:
            self._cpu_seconds.append(time.thread_time() - began)

    def _do(self) -> None:
        # One step of `itertools.count` is atomic.
        while not self._abandoned.is_set() and (index := next(self._next)) < len(self._items):
            self._found[index] = self._work(self._items[index])

    def result(self) -> list[U]:
        """What has become of all items, in their order; waits for the threads, whose work is bounded. Once."""
        try:
            for thread in self._threads:
                thread.join()
        except BaseException:
            self.abandon()
            raise
        count = len(self._items)
        try:
            if self._error is not None:
                raise self._error
        finally:
            self._error, self._items = None, ()  # it refers to what has raised it
        return [self._found.pop(index) for index in range(count)]

    def abandon(self, seconds: float = threading.TIMEOUT_MAX) -> bool:
        """Stop after the items at hand; whether all threads have ended within `seconds`."""
        self._abandoned.set()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._items = ()
        return not any(map(threading.Thread.is_alive, self._threads))


def digesting(image: memoryview, cut_layout: CutLayout) -> ParallelMap[memoryview, str]:
    """Digests the pieces of a file image, while the caller writes the same memory to storage."""
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0))) if len(image) >= THREAD_BYTES else 0
    pieces = [image[one] for extents in cut_layout.extents for one in extents]
    return ParallelMap(digest, pieces, threads, "ckpt-digest")


class SupersededError(WriterError):
    """The slot may have been filled again while it was read."""


@dataclass(eq=False)
class Digests:
    """The digests of one image, once they have been worked out. Thread safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    known: list[str] | None = field(default=None, init=False)
    """Of all pieces in order; None: not worked out yet."""

    def settle(self, found: list[str]) -> list[str]:
        """Note them; returns them.

        Raises:
            WriterError: they were others before: the image has changed, and is not a snapshot.
        """
        with self._lock:
            if self.known is not None and self.known != found:
                raise WriterError("an arena slot has changed while its snapshot was in use; it is not written")
            self.known = found
            return found


@dataclass(frozen=True, slots=True)
class Staged:
    """A job with what it refers to, and the id that the snapshot gets.

    `unchanged` is asked once the slot was read: whether it cannot have been filled again meanwhile.
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
        return DataFile(names.data_name(self.snapshot, self.job.rank), self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of its data file."""
        return self.cut_layout.layout.nbytes

    def manifest(self, run: str, digests: Sequence[str] | None) -> Manifest:
        """Its manifest in `run`, where it is the image as it is, given the digests of all pieces; None: any will do."""
        job, cut_layout, sizes = self.job, self.cut_layout, self.cut_layout.entry_bytes
        info = SnapshotInfo(
            id=self.snapshot,
            seq=names.seq_of(self.snapshot),
            step=job.step,
            epoch=job.epoch,
            reason=job.reason,
            created=job.created,
            nbytes=cut_layout.nbytes,
            metrics=job.metrics,
            parent=job.parent,
            components={key: sum([sizes.get(name, 0) for name in one.entries]) for key, one in self.skeletons.items()},
            line=job.line,
        )
        return Manifest(
            info=info,
            run=run,
            world={"size": 1},
            software=job.software,
            files=(self.data,),
            entries=cut_layout.blank if digests is None else cut_layout.entries(digests),
            tree={key: skeleton.fill(job.values.get(key, [])) for key, skeleton in self.skeletons.items()},
            notes=job.notes,
        )

    def timed_digest(self) -> tuple[list[str], float]:
        """The digests of all pieces, worked out now unless they are known, and the CPU time of other threads for that.

        Raises:
            WriterError: the image cannot be read.
        """
        if self.digests.known is not None:
            return self.digests.known, 0.0
        with self.slot.image(self.nbytes) as image:
            begun = digesting(image, self.cut_layout)
            return self.digests.settle(begun.result()), begun.cpu_seconds


class CommitStrategy:
    """A writer's part in the commit of snapshots: the one writer of a run commits what it has written."""

    is_shared = False
    """Whether other writers have parts in each snapshot: this one does not know what they have written."""
    in_flight: Container[str] = ()
    """The snapshots that others may be writing now."""

    def commit(self, _staged: Staged, repository: Repository, manifest: Manifest) -> Manifest:
        """Make it exist; its manifest."""
        repository.commit(manifest)
        return manifest

    def undo(self, staged: Staged, repository: Repository, new: Sequence[str]) -> None:
        """It does not exist: free its data files `new`, if any was put, and say so where others wait for it."""
        if new:
            # The manifest goes first: a commit may have landed although it reported an error.
            repository.forget([staged.snapshot])
            repository.storage.delete(*new)

    def cancel(self, repository: Repository, snapshot: str, why: str) -> None:
        """There is no part of this writer in a snapshot: say so where others wait for it."""


ALONE = CommitStrategy()


class RawContents:
    """What a staged snapshot stores in one repository: the whole image as one file, digested while it is written.

    For one attempt.

    Attributes:
        staged, repository: of which, and where.
        new: the names of the data files that it has put, or begun to put.
        new_bytes: of its data files; at most so many until all are put.
        write_seconds, cpu_seconds: what putting them has taken, and the CPU time of other threads for that.
    """

    def __init__(self, staged: Staged, repository: Repository) -> None:
        self.staged = staged
        self.repository = repository
        self.new: list[str] = []
        self.new_bytes = staged.nbytes
        self.write_seconds = self.cpu_seconds = 0.0

    def manifest(self) -> Manifest:
        """As it will be; the digests may be any until they are known."""
        return self.staged.manifest(self.repository.run_id, self.staged.digests.known)

    def put(self, image: memoryview, _progress: CallProgress) -> Manifest:
        """Store the data files, durably; the manifest of what is stored."""
        staged = self.staged
        digests = digesting(image, staged.cut_layout) if staged.digests.known is None else None
        began = time.monotonic()
        try:
            name = staged.data.name
            self.repository.storage.put(name, [image])
            self.new.append(name)
        except BaseException:
            if digests is not None:
                digests.abandon()
            raise
        self.write_seconds = time.monotonic() - began
        if digests is not None:
            staged.digests.settle(digests.result())
            self.cpu_seconds = digests.cpu_seconds
        return self.manifest()

    def stands(self) -> bool:
        """Whether the older data that it refers to is there, and stays as long as nothing is forgotten.

        Raises:
            StorageError: that cannot be found out.
        """
        return True


def write_snapshot(
    contents: RawContents,
    tier: str,
    progress: CallProgress,
    undo_failed: Callable[[CkptError], object],
    finish: CommitStrategy = ALONE,
) -> tuple[SnapshotCommitted, Manifest, Manifest]:
    """Make a staged snapshot durable in a repository. Needs its lease.

    The arena slot is read until this returns, left behind or not.

    Args:
        tier: how the place is called in the event.
        progress: of the call that this is part of: an abandoned snapshot is not committed.
        undo_failed: called if data of a snapshot that was not committed stays.
        finish: what happens when the data is durable.

    Returns:
        The event, and the manifests of what is stored and of what exists: of several ranks, that of this one's share
        and that of all.

    Raises:
        CkptError: it does not exist there.
        AbandonedError: as before; the caller waits no more.
    """
    staged, repository = contents.staged, contents.repository
    cpu_before = time.thread_time()
    progress.check()
    try:
        with staged.slot.image(staged.nbytes) as image:
            stored = contents.put(image, progress)
        progress.check()
        if not staged.unchanged():
            raise SupersededError(
                f"the snapshot of step {staged.job.step} was dropped: a newer one has taken its place"
            )
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
        metrics=staged.job.metrics,
    )
    return committed, stored, manifest
