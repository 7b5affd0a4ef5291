"""Read the arrays of one snapshot: parallel ranges straight into their final memory, digests checked on the way."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ckpt_engine.errors import CorruptError, NewerFormatError
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import Entry, Manifest, Piece
from ckpt_engine.store.storage.base import Storage

READ_BYTES = 16 << 20
READ_THREADS = 2


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive stored bytes of one file that are read in one request, and the pieces inside."""

    file: int
    start: int
    stop: int
    pieces: tuple[tuple[str, Piece], ...]


def read_entries(storage: Storage, manifest: Manifest, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Read and verify entries; one allocation per data file, no second copy.

    Args:
        names: which entries; default all.

    Returns:
        Contiguous CPU tensors by entry name, with their stored dtype and shape.

    Raises:
        CorruptError: bytes are missing or differ from their digest; names the entry.
        NewerFormatError: an encoding this version does not know.
        StorageError: the storage failed.
    """
    wanted = {name: manifest.entries[name] for name in (manifest.entries if names is None else names)}
    spans = list(_spans(wanted))
    buffers = {file: _Buffer(spans_of) for file, spans_of in _by_file(spans).items()}

    def load(span: _Span) -> None:
        target = buffers[span.file].at(span.start, span.stop)
        storage.get_into(manifest.files[span.file].name, span.start, target)
        for name, piece in span.pieces:
            at = piece.offset - span.start
            if digest(target[at : at + piece.nbytes]) != piece.digest:
                raise CorruptError(
                    f"{name!r}: bytes {piece.offset} to {piece.offset + piece.nbytes} of "
                    f"{manifest.files[piece.file].name} do not match their digest"
                )

    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="ckpt-read") as pool:
        for done in [pool.submit(load, span) for span in spans]:
            done.result()
    return {name: _tensor(entry, buffers) for name, entry in wanted.items()}


class _Buffer:
    """Memory for the part of one file that is wanted; offsets keep their page alignment for direct reads."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        self._base = min(s.start for s in spans) // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = max(s.stop for s in spans) - self._base
        self.memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)

    def at(self, start: int, stop: int) -> memoryview:
        return memoryview(self.memory)[start - self._base : stop - self._base]

    def offset(self, position: int) -> int:
        return position - self._base


def _spans(entries: Mapping[str, Entry]) -> Iterator[_Span]:
    """Neighbouring pieces joined to requests of about `READ_BYTES`."""
    pieces = sorted(
        ((name, piece) for name, entry in entries.items() for piece in entry.pieces),
        key=lambda item: (item[1].file, item[1].offset),
    )
    run: list[tuple[str, Piece]] = []
    for name, piece in pieces:
        if piece.codec != "raw":
            raise NewerFormatError(f"{name!r} is encoded with {piece.codec!r}, unknown to this version")
        if run:
            first, last = run[0][1], run[-1][1]
            joined = piece.offset + piece.nbytes - first.offset
            if piece.file != last.file or piece.offset != last.offset + last.nbytes or joined > READ_BYTES:
                yield _span(run)
                run = []
        run.append((name, piece))
    if run:
        yield _span(run)


def _span(run: Sequence[tuple[str, Piece]]) -> _Span:
    first, last = run[0][1], run[-1][1]
    return _Span(first.file, first.offset, last.offset + last.nbytes, tuple(run))


def _by_file(spans: Sequence[_Span]) -> dict[int, list[_Span]]:
    found: dict[int, list[_Span]] = {}
    for span in spans:
        found.setdefault(span.file, []).append(span)
    return found


def _tensor(entry: Entry, buffers: Mapping[int, _Buffer]) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    count = 1
    for size in entry.shape:
        count *= size
    if not entry.pieces or count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    first = entry.pieces[0]
    offset = buffers[first.file].offset(first.offset)
    return torch.frombuffer(buffers[first.file].memory, dtype=dtype, count=count, offset=offset).view(entry.shape)
