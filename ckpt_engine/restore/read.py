"""Read the arrays of one snapshot: parallel ranges straight into their final memory, digests checked on the way."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ckpt_engine.errors import CkptError, CorruptError, FormatError, NewerFormatError, StorageMissingError
from ckpt_engine.snapshot import hugepages
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import Entry, Manifest, Piece
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.local import LocalStorage

READ_BYTES = 16 << 20
"""Bytes per request; requests start at multiples of it, so that the page cache can be bypassed."""
READ_THREADS = 4
REMOTE_READ_THREADS = 16
"""Requests under way to a storage that is not a disk: it is latency that they hide."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A piece and the entry it belongs to."""

    entry: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class Repair:
    """Bytes that came from another place than the rest.

    Args:
        entry: the entry whose digest did not fit; None: the first place could not be read.
        file: data file.
        nbytes: how many.
        bad, good: URLs of the place that failed and of the one that served.
        why: what was wrong.
    """

    entry: str | None
    file: str
    nbytes: int
    bad: str
    good: str
    why: str

    def __str__(self) -> str:
        what = f"{self.entry!r} ({self.nbytes} bytes)" if self.entry else f"{self.nbytes} bytes of {self.file}"
        return f"{what} came from {self.good}, because of {self.bad}: {self.why}"


def read_entries(
    storage: Storage,
    manifest: Manifest,
    names: Sequence[str] | None = None,
    *,
    others: Sequence[Storage] = (),
    repairs: list[Repair] | None = None,
) -> dict[str, torch.Tensor]:
    """Read and verify entries; one allocation per data file, no second copy.

    Args:
        names: which entries; default all.
        others: storages with the same data files, asked for what `storage` does not have as it was written.
        repairs: what they had to serve is appended here.

    Returns:
        Contiguous CPU tensors by entry name, with their stored dtype and shape.

    Raises:
        CorruptError: bytes are missing or differ from their digest, in all storages; names the entry.
        NewerFormatError: an encoding this version does not know.
        StorageError: the storages failed.
    """
    entries = {name: manifest.entries[name] for name in (manifest.entries if names is None else names)}
    by_file: dict[int, list[_Wanted]] = {}
    for name, entry in entries.items():
        for piece in entry.pieces:
            if piece.codec != "raw":
                raise NewerFormatError(f"{name!r} is encoded with {piece.codec!r}, unknown to this version")
            by_file.setdefault(piece.file, []).append(_Wanted(name, piece))
    sources = Sources([storage, *others], [] if repairs is None else repairs)
    threads = READ_THREADS if isinstance(storage, LocalStorage) else REMOTE_READ_THREADS
    pool = ThreadPoolExecutor(threads, thread_name_prefix="ckpt-read")
    try:
        images = {
            file: _Image(sources, manifest.files[file].name, manifest.files[file].nbytes, wanted, pool)
            for file, wanted in sorted(by_file.items())
        }
        for image in images.values():
            image.verify()
    finally:
        pool.shutdown(cancel_futures=True)
    return {name: _tensor(entry, images) for name, entry in entries.items()}


class Sources:
    """Storages with the same objects, the preferred one first. Thread safe.

    Args:
        repairs: what others than the first had to serve is appended here.
    """

    def __init__(self, storages: Sequence[Storage], repairs: list[Repair]) -> None:
        self._storages = list(storages)
        self._repairs = repairs
        self._dead: set[int] = set()

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` from the first storage that can; one that fails otherwise than by what it has is not asked again.

        Raises:
            CkptError: that of the first storage, if none can.
        """
        first: CkptError | None = None
        for number, storage in enumerate(self._storages):
            if number in self._dead and number < len(self._storages) - 1:
                continue
            try:
                storage.get_into(name, start, out)
            except CkptError as err:
                first = first or err
                if not isinstance(err, FormatError | StorageMissingError):
                    self._dead.add(number)
                continue
            if number and (first is not None or self._dead):
                why = first.message if first is not None else "it failed before"
                self._repairs.append(Repair(None, name, out.nbytes, self._storages[0].url, storage.url, why))
            return
        assert first is not None
        raise first

    def repair(self, entry: str, name: str, piece: Piece, out: memoryview) -> None:
        """Fill `out` with a piece whose bytes are not what was written.

        Raises:
            CorruptError: no other storage has it as it was written; names the entry.
        """
        what = f"bytes {piece.offset} to {piece.offset + piece.nbytes} of {name} do not match their digest"
        for storage in self._storages:
            try:
                storage.get_into(name, piece.offset, out)
            except CkptError:
                continue  # it has nothing to offer here; what is wrong with the piece is said already
            if digest(out) == piece.digest:
                if storage is self._storages[0]:
                    return  # it was damaged on the way only
                self._repairs.append(Repair(entry, name, piece.nbytes, self._storages[0].url, storage.url, what))
                return
        raise CorruptError(f"{entry!r}: {what}")


class _Image:
    """Memory for the part of one data file that is wanted, filled in the background in the order of the file."""

    def __init__(
        self, sources: Sources, name: str, nbytes: int, wanted: Sequence[_Wanted], pool: ThreadPoolExecutor
    ) -> None:
        self._sources = sources
        self._name = name
        self._wanted = sorted(wanted, key=lambda w: w.piece.offset)
        last = max(w.piece.offset + w.piece.nbytes for w in wanted)
        if last > nbytes:
            raise CorruptError(f"the manifest names bytes up to {last} of {name}, which has {nbytes}")
        self._base = self._wanted[0].piece.offset // READ_BYTES * READ_BYTES
        # Untouched memory costs nothing, so gaps between wanted pieces are simply not read.
        self._memory = mmap.mmap(-1, last - self._base, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        hugepages.advise(self._memory)
        self._bytes = memoryview(self._memory)
        first_page = self._wanted[0].piece.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._reads: dict[int, Future[None]] = {}
        for number in sorted({n for w in wanted for n in _blocks(w.piece)}):
            start = max(number * READ_BYTES, first_page)
            stop = min((number + 1) * READ_BYTES, last)
            self._reads[number] = pool.submit(sources.read, name, start, self._range(start, stop))

    def verify(self) -> None:
        """Wait for the bytes and compare every piece with its digest."""
        for wanted in self._wanted:
            piece = wanted.piece
            for number in _blocks(piece):
                self._reads[number].result()
            stored = self._range(piece.offset, piece.offset + piece.nbytes)
            if digest(stored) != piece.digest:
                self._sources.repair(wanted.entry, self._name, piece, stored)

    def tensor(self, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A tensor over the bytes from `offset` on; it keeps the memory alive."""
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset - self._base)

    def _range(self, start: int, stop: int) -> memoryview:
        return self._bytes[start - self._base : stop - self._base]


def _blocks(piece: Piece) -> range:
    return range(piece.offset // READ_BYTES, -(-(piece.offset + piece.nbytes) // READ_BYTES))


def _tensor(entry: Entry, images: Mapping[int, _Image]) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    count = math.prod(entry.shape)
    if not entry.pieces or count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    first = entry.pieces[0]
    end = first.offset
    for piece in entry.pieces:
        if piece.file != first.file or piece.offset != end:
            raise NewerFormatError("pieces of an array that do not lie back to back are unknown to this version")
        end += piece.nbytes
    return images[first.file].tensor(first.offset, dtype, count).view(entry.shape)
