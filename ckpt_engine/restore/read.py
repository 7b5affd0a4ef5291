"""Read the arrays of one snapshot: parallel ranges straight into their final memory, digests checked on the way.

Arrays that lie in pieces, or are encoded, are put together by `stream`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ckpt_engine.errors import CorruptError, FormatError
from ckpt_engine.observe import units
from ckpt_engine.restore.named import dtype_of
from ckpt_engine.restore.sources import Sources
from ckpt_engine.restore.stream import READ_BYTES, stream_into
from ckpt_engine.snapshot import headroom, pages
from ckpt_engine.store.decode import chain_of, is_plain
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import Entry, Manifest, Piece

UNASKED_BYTES = 64 << 20
"""What any machine has room for: it is not asked."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A piece and the entry it belongs to."""

    entry: str
    piece: Piece


def require_room(manifest: Manifest, names: Iterable[str]) -> None:
    """Refuse what this machine has no memory for: the kernel would give it out, and kill somebody later.

    Raises:
        FormatError: says how much is needed, and how much there is.
    """
    needed = sum(piece.raw_nbytes for name in names for piece in manifest.entries[name].pieces)
    room = headroom.look() if needed > UNASKED_BYTES else None
    if room is not None and needed > room.nbytes:
        raise FormatError(
            f"its tensors need {units.size(needed)} of memory, and {units.size(room.nbytes)} are left ({room.limit})",
            hint="load it where there is more, or with `into`, into tensors that are there",
        )


def _memory(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as err:
        raise FormatError(f"this machine gives no {units.size(nbytes)} of memory: {err}") from err


def read_entries(sources: Sources, manifest: Manifest, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Read and verify entries; of those that lie in one piece one allocation per data file, no second copy.

    Args:
        names: which entries; default all.

    Returns:
        Contiguous CPU tensors by entry name, with their stored dtype and shape.

    Raises:
        CorruptError: bytes are missing or differ from their digest, in all storages; names the entry.
        NewerFormatError: an encoding this version does not know.
        StorageError: the storages failed.
    """
    entries = {name: manifest.entries[name] for name in (manifest.entries if names is None else names)}
    require_room(manifest, entries)
    by_file: dict[int, list[_Wanted]] = {}
    composed: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        if not is_plain(entry):
            composed[name] = _fresh(manifest, name, entry)
            continue
        for piece in entry.pieces:
            by_file.setdefault(piece.file, []).append(_Wanted(name, piece))
    pool = ThreadPoolExecutor(sources.threads, thread_name_prefix="ckpt-read")
    try:
        images = {
            file: _Image(sources, manifest.files[file].name, manifest.files[file].nbytes, wanted, pool)
            for file, wanted in sorted(by_file.items())
        }
        for image in images.values():
            image.verify()
    finally:
        pool.shutdown(cancel_futures=True)
    if composed:
        stream_into(sources, manifest, composed, fresh=True)
    return {name: composed[name] if name in composed else _tensor(entry, images) for name, entry in entries.items()}


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
        self._memory = _memory(last - self._base)
        pages.advise(self._memory)
        self._bytes = memoryview(self._memory)
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        first_page = self._wanted[0].piece.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._reads: dict[int, Future[None]] = {}
        for number in sorted({n for w in wanted for n in _blocks(w.piece)}):
            start = max(number * READ_BYTES, first_page)
            stop = min((number + 1) * READ_BYTES, last)
            self._reads[number] = pool.submit(self._read, start, stop)

    def _read(self, start: int, stop: int) -> None:
        pages.populate(self._address + start - self._base, stop - start)
        self._sources.read(self._name, start, self._range(start, stop))

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


def _fresh(manifest: Manifest, name: str, entry: Entry) -> torch.Tensor:
    """A tensor for an entry, to be filled; it begins in a page where its first bytes do in a file."""
    nbytes = sum(piece.raw_nbytes for piece in entry.pieces)
    dtype, count = dtype_of(entry.dtype), math.prod(entry.shape)
    if count * dtype.itemsize != nbytes:
        raise CorruptError(f"the manifest has {nbytes} bytes for {entry.dtype} of shape {entry.shape}")
    skew = chain_of(manifest, name, 0, entry.pieces[0])[-1].offset % mmap.PAGESIZE
    skew -= skew % dtype.itemsize
    memory = _memory(skew + nbytes)
    pages.advise(memory)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=skew).view(entry.shape)


def _tensor(entry: Entry, images: Mapping[int, _Image]) -> torch.Tensor:
    dtype = dtype_of(entry.dtype)
    count = math.prod(entry.shape)
    if count * dtype.itemsize != sum(piece.nbytes for piece in entry.pieces):
        raise CorruptError(f"the manifest has other bytes than {entry.dtype} of shape {entry.shape} needs")
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    first = entry.pieces[0]
    return images[first.file].tensor(first.offset, dtype, count).view(entry.shape)
