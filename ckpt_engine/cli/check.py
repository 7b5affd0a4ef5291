"""Re-reads every byte of snapshots and says what is wrong and which tensor it hits. No torch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ckpt_engine.errors import CkptError, CorruptError, FormatError, StorageMissingError
from ckpt_engine.store import container, layout
from ckpt_engine.store.decode import is_plain, require_decodable, stored_pieces
from ckpt_engine.store.digest import PIECE_BYTES, digest
from ckpt_engine.store.manifest import Entry, Manifest, Partial, Piece
from ckpt_engine.store.repository import Repository

READERS = 2
_PENDING_PER_READER = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a snapshot.

    Args:
        code: of the error.
        entry: the entry that is hit; None where it is the manifest or a whole file.
    """

    code: str
    message: str
    file: str | None = None
    entry: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one snapshot. `forgotten`: retention removed it while it was read, which is no damage.

    `partial`: only the shares of some ranks are here, and were checked.
    """

    snapshot: str
    problems: tuple[Problem, ...]
    read_bytes: int
    forgotten: bool = False
    partial: Partial | None = None

    @property
    def ok(self) -> bool:
        """Whether every byte is what was written."""
        return not self.problems


class Checker:
    """Checks snapshots of one repository; bytes that several of them share are read once.

    Args:
        advance: called with the bytes just read, on this thread.
    """

    def __init__(self, repository: Repository, advance: Callable[[int], object]) -> None:
        self._repository = repository
        self._storage = repository.storage
        self._advance = advance
        self._good: set[tuple[str, int, int, str]] = set()
        self._buffers = threading.local()

    def check(self, snapshot: str) -> Verdict:
        """Read and digest everything the snapshot needs."""
        try:
            manifest = self._repository.read(snapshot)
        except StorageMissingError as err:
            return self._verdict(snapshot, [Problem(err.code, err.message)], 0)
        except FormatError as err:
            return Verdict(snapshot, (Problem(err.code, err.message, layout.manifest_name(snapshot)),), 0)
        problems: list[Problem] = []
        try:
            require_decodable(manifest)
        except CorruptError as err:
            problems.append(Problem(err.code, err.message, layout.manifest_name(snapshot)))
        read_bytes = 0
        sizes = {item.name: item.nbytes for item in self._storage.list(layout.DATA)}
        for index, file in enumerate(manifest.files):
            if file.name not in sizes:
                problems.append(
                    Problem(StorageMissingError.code, f"missing; it holds {_holds(manifest, index)}", file.name)
                )
                continue
            if sizes[file.name] != file.nbytes:
                text = f"has {sizes[file.name]:,} bytes instead of {file.nbytes:,}"
                problems.append(Problem(CorruptError.code, text, file.name))
            problems += self._header(manifest, index)
            for found, nbytes in self._pieces(manifest, index):
                problems += found
                read_bytes += nbytes
                self._advance(nbytes)
        return self._verdict(snapshot, problems, read_bytes, manifest.info.partial)

    def _verdict(
        self, snapshot: str, problems: Sequence[Problem], read_bytes: int, partial: Partial | None = None
    ) -> Verdict:
        # Data goes after its manifest: what was missing may have been forgotten since the listing.
        if problems and all(parsed.id != snapshot for parsed in self._repository.ids()):
            return Verdict(snapshot, (), read_bytes, forgotten=True)
        return Verdict(snapshot, tuple(problems), read_bytes, partial=partial)

    def _header(self, manifest: Manifest, index: int) -> Iterator[Problem]:
        """The container's own header, which the digests do not cover and other programs read."""
        name = manifest.files[index].name
        try:
            nbytes = container.header_nbytes(self._storage.get(name, 0, 8))
            header = container.parse_header(self._storage.get(name, 0, nbytes))
        except CkptError as err:
            yield Problem(err.code, f"header: {err.message}", name)
            return
        arrays = {array.name: array for array in header.entries}
        for entry_name, entry in manifest.entries.items():
            if _in_file(manifest, entry, index) and not _says_the_same(arrays.get(entry_name), entry):
                text = "the file's header does not say what the manifest says"
                yield Problem(CorruptError.code, text, name, entry_name)

    def _pieces(self, manifest: Manifest, index: int) -> Iterator[tuple[list[Problem], int]]:
        name = manifest.files[index].name
        pieces = [
            (entry_name, piece)
            for entry_name, piece in dict.fromkeys(stored_pieces(manifest))
            if piece.file == index and (name, piece.offset, piece.nbytes, piece.digest) not in self._good
        ]
        pending: deque[Future[tuple[list[Problem], int]]] = deque()
        with ThreadPoolExecutor(READERS, thread_name_prefix="ckpt-verify") as pool:
            for span in _spans(sorted(pieces, key=lambda item: item[1].offset)):
                if len(pending) == READERS * _PENDING_PER_READER:
                    yield pending.popleft().result()
                pending.append(pool.submit(self._read, name, span))
            while pending:
                yield pending.popleft().result()

    def _read(self, name: str, span: Sequence[tuple[str, Piece]]) -> tuple[list[Problem], int]:
        """Digest neighbouring pieces with one read; piece by piece where that fails, to say which ones are hit."""
        start, stop = span[0][1].offset, span[-1][1].offset + span[-1][1].nbytes
        buffer = self._buffer(stop - start)
        try:
            self._storage.get_into(name, start, buffer)
        except CkptError as err:
            if len(span) == 1:
                return [Problem(err.code, err.message, name, span[0][0])], stop - start
            return [problem for one in span for problem in self._read(name, [one])[0]], stop - start
        problems = []
        for entry_name, piece in span:
            at = piece.offset - start
            if digest(buffer[at : at + piece.nbytes]) == piece.digest:
                self._good.add((name, piece.offset, piece.nbytes, piece.digest))
            else:
                where = f"bytes {piece.offset:,} to {piece.offset + piece.nbytes:,}"
                problems.append(Problem(CorruptError.code, f"{where} are not what was written", name, entry_name))
        return problems, stop - start

    def _buffer(self, nbytes: int) -> memoryview:
        memory: bytearray | None = getattr(self._buffers, "memory", None)
        if memory is None or len(memory) < nbytes:
            memory = self._buffers.memory = bytearray(max(nbytes, PIECE_BYTES))
        return memoryview(memory)[:nbytes]


def _in_file(manifest: Manifest, entry: Entry, index: int) -> bool:
    """Whether the entry is an array of that file as it is: whole, and not encoded."""
    if not entry.pieces:
        return len(manifest.files) == 1
    return entry.pieces[0].file == index and is_plain(entry)


def _says_the_same(array: container.ContainerEntry | None, entry: Entry) -> bool:
    """Whether the header has the entry where and as what the manifest has it."""
    nbytes = sum(piece.nbytes for piece in entry.pieces)
    shape = entry.shape if entry.dtype in container.DTYPES else (nbytes,)
    if array is None or (array.container_dtype, array.shape) != (entry.container_dtype, shape):
        return False
    start = entry.pieces[0].offset if entry.pieces else array.start
    return (array.start, array.end) == (start, start + nbytes)


def _spans(pieces: Sequence[tuple[str, Piece]]) -> Iterator[list[tuple[str, Piece]]]:
    """Neighbours joined to reads of about `PIECE_BYTES`."""
    span: list[tuple[str, Piece]] = []
    for name, piece in pieces:
        if span:
            start, end = span[0][1].offset, span[-1][1].offset + span[-1][1].nbytes
            if piece.offset != end or piece.offset + piece.nbytes - start > PIECE_BYTES:
                yield span
                span = []
        span.append((name, piece))
    if span:
        yield span


def _holds(manifest: Manifest, index: int) -> str:
    names = list(dict.fromkeys(name for name, piece in stored_pieces(manifest) if piece.file == index))
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
