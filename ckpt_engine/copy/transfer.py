"""Copies snapshots byte for byte from one run folder to another of the same run.

Bounded memory: what is local is mapped; what is remote is streamed in ranges to a local target, each piece verified
before it is written, and comes through a mapped scratch file to a remote one. Whatever is interrupted continues where
it was (see also `storage.s3_multipart`); nothing half-copied is ever seen as a snapshot.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Self

from ckpt_engine.copy.write_plan import is_sound
from ckpt_engine.copy.write_snapshot import ParallelMap
from ckpt_engine.errors import CkptError, CorruptError, ForeignError, StorageExistsError, StorageMissingError
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.store.container import digest
from ckpt_engine.store.data_files import lacking
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.manifest import (
    DataFile,
    Manifest,
    Piece,
    require_whole,
)
from ckpt_engine.store.repository import Repository, encode_record, parse_record
from ckpt_engine.store.storage.base import Folder, Storage
from ckpt_engine.store.storage.disk import closing_fd, open_regular, translating
from ckpt_engine.store.storage.partial_file import PartialFile

RANGE_BYTES = 16 << 20
"""Bytes per read of a remote object, and at most per read of the check before a copy."""
RANGES_AT_ONCE = 4


class CopySourceError(Exception):
    """The copy failed at its source; `error` says how. The target is not to blame."""

    def __init__(self, error: CkptError) -> None:
        self.error = error
        super().__init__(str(error))


@contextmanager
def reading_source() -> Iterator[None]:
    """What fails inside the `with` has failed at the source of a copy."""
    try:
        yield
    except CkptError as err:
        raise CopySourceError(err) from err


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy did: bytes sent, and bytes that were there already."""

    sent_bytes: int
    present_bytes: int


Put = Callable[[Manifest], tuple[Manifest, Copied]]
"""Stores the data files of a manifest at a target, durably; the manifest of what is stored. Raises as `copy_data`."""


def copy_snapshot(
    source: Repository,
    target: Repository,
    snapshot: str,
    put: Put | None = None,
    committing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Copied:
    """Copy one snapshot. Its bytes are verified on the way: damage does not spread. Needs the target's lease.

    Args:
        put: stores the data; default: `copy_data`.
        committing: entered while the manifest is written: no snapshot may be forgotten at the target meanwhile.

    Raises:
        CopySourceError: the snapshot is missing or damaged at the source, or that cannot be read or has a part of it.
        StorageError: from the target.
    """
    with reading_source():
        manifest, text = source.read_text(snapshot)
        require_whole(manifest.info, source.storage.url)
    stored, copied = copy_data(source, target, manifest) if put is None else put(manifest)
    with committing():
        if lost := lacking(target.storage, [file for file in stored.files if snapshot not in file.name]):
            raise StorageMissingError(
                f"{target.storage.url}: {', '.join(lost)} was removed while a copy that refers to it was made",
                hint="the copy is made again",
            )
        target.commit_copy(stored, text if stored is manifest else manifest_codec.encode(stored))
    return copied


def copy_data(
    source: Repository, target: Repository, manifest: Manifest, *, scratch: str | None = None
) -> tuple[Manifest, Copied]:
    """Copy the data files of a manifest as they are; see `Put`.

    Args:
        scratch: a folder for what is not local on its way; default: the system's temporary one.

    Raises:
        CopySourceError: a file is missing or damaged at the source, or that cannot be read.
        StorageError: from the target.
    """
    sent = present = 0
    there = [has_file(target.storage, file) for file in manifest.files]
    damaged = {index for index, file in enumerate(manifest.files) if file.name in target.damage.files}
    damaged.add(_damaged(target.storage, manifest, there))
    for index, file in enumerate(manifest.files):
        if there[index] and index not in damaged:
            present += file.nbytes
        else:
            sent_bytes = _copy_file(source.storage, target.storage, manifest, index, scratch, index not in damaged)
            sent += sent_bytes
            present += file.nbytes - sent_bytes
    if present:
        settle_data(target.storage)
    return manifest, Copied(sent, present)


def _damaged(target: Storage, manifest: Manifest, there: Sequence[bool]) -> int:
    """The number of a data file at the target that is damaged, -1: none; each snapshot has one piece of another one
    read back.
    """
    pieces = [
        (index, piece) for index, is_there in enumerate(there) if is_there for piece in pieces_of(manifest, index)
    ]
    if not pieces:
        return -1
    index, piece = pieces[manifest.info.seq % len(pieces)]
    return -1 if is_sound(target.get_into, manifest.files[index].name, piece) else index


@dataclass(frozen=True, slots=True)
class RunText:
    """The record of a run as it is to be stored, the same at each of its places."""

    run: str
    text: bytes

    @classmethod
    def of(cls, repository: Repository) -> Self:
        """Read it.

        Raises:
            CkptError: there is none that can be read.
        """
        record = repository.require_record()
        return cls(record.run, encode_record(replace(record, protect_days=0.0)))  # that is the place's own

    @classmethod
    def parse(cls, text: str) -> Self:
        """The record with this text.

        Raises:
            CorruptError, ForeignError, NewerFormatError: it is none.
        """
        return cls(parse_record(text.encode(), "another node").run, text.encode())


def adopt_run(run: RunText, target: Storage) -> Repository:
    """The repository at `target`, which is a place of `run` from now on. Needs the target's lease.

    Raises:
        ForeignError: the target holds another run, or other files; nothing is changed.
        CorruptError, NewerFormatError, StorageError: from the target.
    """
    found = Repository(target)
    is_empty = not found.ids()
    try:
        record = found.record()
    except CorruptError:
        if not is_empty:
            raise
        record = None
    there = record.run if record is not None else None
    if not is_empty and (there := found.run_of_manifests() or there) not in (None, run.run):
        raise ForeignError(
            f"{target.url} holds another run ({there[:8]}…, this one is {run.run[:8]}…)",
            hint="give this run a place of its own",
        )
    if there == run.run:
        found.create_if_absent()  # mends it
        return found
    target.put(names.RECORD, [memoryview(run.text)], exclusive=False)
    return Repository(target)


def has_file(storage: Storage, file: DataFile) -> bool:
    """Whether the data file is there whole. One of another size is not reliable: it is removed."""
    for item in storage.list(file.name):
        if item.name == file.name:
            if item.nbytes == file.nbytes:
                return True
            storage.delete(file.name)
    return False


def settle_data(storage: Storage) -> None:
    """Make durable that the data files are there which an earlier attempt has left: it may have died before that."""
    folder = storage.capabilities.locks
    if folder is not None:
        folder.settle(names.DATA)


def _copy_file(
    source: Storage, sink: Storage, manifest: Manifest, index: int, scratch: str | None, exclusive: bool
) -> int:
    """Copy a data file; returns the bytes that were sent, fewer than it has where an earlier attempt is continued.

    Args:
        exclusive: False: it takes the place of a damaged one.
    """
    file = manifest.files[index]
    pieces = pieces_of(manifest, index)
    folder = sink.capabilities.folder
    if exclusive and folder is not None and source.capabilities.folder is None:
        return _stream(source, folder, file, pieces)
    with ExitStack() as opened:
        with reading_source():
            image = opened.enter_context(mapped(source, file, pieces, scratch))
        try:
            sink.put(file.name, [image], exclusive=exclusive)
        except StorageExistsError:
            if not has_file(sink, file):
                raise
    return file.nbytes


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes of a file that are fetched together, and the pieces in them."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


def _stream(source: Storage, sink: Folder, file: DataFile, pieces: Sequence[Piece]) -> int:
    """Write a remote file once, straight to the disk where it belongs; returns the bytes that were fetched."""
    text = f"{file.name} {file.nbytes} {' '.join(piece.digest for piece in pieces)}"
    token = digest(text.encode()).partition(":")[2][:16]
    fetched: list[int] = []

    def fill(partial: PartialFile) -> None:
        def move(part: _Range) -> int:
            buffer = memoryview(bytearray(part.stop - part.start))
            if partial.has_begun and partial.read(part.start, buffer) and _is_good(part, buffer):
                return 0
            with reading_source():
                source.get_into(file.name, part.start, buffer)
                for piece in part.pieces:
                    _require_digest(file, piece, buffer[piece.offset - part.start :][: piece.nbytes])
            partial.write(part.start, buffer)
            return len(buffer)

        fetched.extend(ParallelMap(move, _ranges(file.nbytes, pieces), RANGES_AT_ONCE, "ckpt-fetch").result())

    try:
        sink.receive(file.name, file.nbytes, token, fill)
    except StorageExistsError:
        if not has_file(sink, file):
            raise
    return sum(fetched)


def _ranges(nbytes: int, pieces: Sequence[Piece]) -> list[_Range]:
    """A file cut between pieces, into ranges of about `RANGE_BYTES` with what lies between them."""
    found: list[_Range] = []
    start = 0
    inside: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        end = max((one.offset + one.nbytes for one in inside), default=start)
        if inside and piece.offset >= end and piece.offset + piece.nbytes - start > RANGE_BYTES:
            found.append(_Range(start, end, tuple(inside)))
            start, inside = end, []
        inside.append(piece)
    return [*found, _Range(start, nbytes, tuple(inside))] if nbytes else []


def _is_good(part: _Range, data: memoryview) -> bool:
    """Whether these bytes are those of its pieces, and no others."""
    is_covered = sum(piece.nbytes for piece in part.pieces) == len(data)
    return is_covered and all(
        digest(data[one.offset - part.start :][: one.nbytes]) == one.digest for one in part.pieces
    )


@contextmanager
def mapped(
    source: Storage, file: DataFile, pieces: Sequence[Piece], scratch: str | None = None
) -> Iterator[memoryview]:
    """The bytes of a data file in mapped memory, in which `pieces` have been verified.

    Args:
        scratch: as of `copy_data`.

    Raises:
        CkptError: it is damaged, missing or cannot be read.
    """
    folder = source.capabilities.folder
    # A scratch file has no name, and is gone when it is unmapped.
    with viewed(scratch_file(scratch, file.nbytes) if folder is None else _map_local(folder, file, pieces)) as image:
        if folder is None:
            _fetch(source, file, pieces, image)
        yield image


@contextmanager
def viewed(memory: mmap.mmap) -> Iterator[memoryview]:
    """The bytes of mapped memory, which is unmapped afterwards."""
    try:
        with memoryview(memory) as image:
            yield image
    finally:
        # The frames of what was raised, also in a thread, may still hold views: then the memory goes with them.
        with suppress(BufferError):
            memory.close()


def _map_local(source: Folder, file: DataFile, pieces: Sequence[Piece]) -> mmap.mmap:
    # Read before it is mapped: a disk that cannot read raises here, where a mapped page would kill the process.
    buffer = memoryview(bytearray(max((piece.nbytes for piece in pieces), default=0)))
    for piece in pieces:
        source.get_into(file.name, piece.offset, buffer[: piece.nbytes])
        _require_digest(file, piece, buffer[: piece.nbytes])
    path = source.path(file.name)
    with translating("read", path), closing_fd(open_regular(path, os.O_RDONLY)) as fd:
        if os.fstat(fd).st_size != file.nbytes:
            raise CorruptError(f"{path} does not have {file.nbytes} bytes")
        return mmap.mmap(fd, file.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)


def _fetch(source: Storage, file: DataFile, pieces: Sequence[Piece], image: memoryview) -> None:
    """Fill `image` with the file, verified."""

    def fetch(start: int) -> None:
        with image[start : start + RANGE_BYTES] as part:
            source.get_into(file.name, start, part)

    ParallelMap(fetch, range(0, file.nbytes, RANGE_BYTES), RANGES_AT_ONCE, "ckpt-fetch").result()
    for piece in pieces:
        with image[piece.offset : piece.offset + piece.nbytes] as part:
            _require_digest(file, piece, part)


def pieces_of(manifest: Manifest, index: int) -> list[Piece]:
    """The pieces that a manifest names in one of its data files, in order."""
    found = {(piece.offset, piece.nbytes): piece for _, piece in stored_pieces(manifest) if piece.file == index}
    return [found[key] for key in sorted(found)]


def _require_digest(file: DataFile, piece: Piece, found: memoryview) -> None:
    if digest(found) != piece.digest:
        end = piece.offset + piece.nbytes
        raise CorruptError(f"bytes {piece.offset} to {end} of {file.name} do not match their digest")


def scratch_file(folder: str | None, nbytes: int) -> mmap.mmap:
    """A mapped file that has no name, and is gone when unmapped.

    Args:
        folder: None: the system's temporary one.

    Raises:
        StorageError: there is no room.
    """
    folder = folder or tempfile.gettempdir()
    with translating("write", folder), tempfile.TemporaryFile(dir=folder) as temporary:
        # Reserved: a full disk raises here, where a mapped page would kill the process.
        os.posix_fallocate(temporary.fileno(), 0, nbytes)
        return mmap.mmap(temporary.fileno(), nbytes)


def scratch_of(storage: Storage) -> str | None:
    """A folder for `copy_snapshot` on the disk of `storage`, where it has one that can be written."""
    folder = storage.capabilities.folder
    return folder.root if folder is not None and os.access(folder.root, os.W_OK) else None
