"""Copies a snapshot to a place where it is stored encoded: the same snapshot, in data files of that place's own.

Piece by piece, verified before it is encoded, in parts of bounded size: while one part is sent the next one is encoded.
A part's name follows from what it holds, so that an interrupted copy finds what it has sent, and a part that another
snapshot needs is never written over. What an older snapshot has there is referred to.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ckpt_engine.errors import CkptError, CorruptError, StorageExistsError, StorageMissingError
from ckpt_engine.store import container, layout, manifest_codec
from ckpt_engine.store.codecs.base import Chunk, get_codec
from ckpt_engine.store.codecs.choose import Speed, class_of
from ckpt_engine.store.decode import Decoder
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import RAW, DataFile, Entry, Manifest, Piece
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.transfer import Copied, SourceError, has_file, settle_data

PART_BYTES = 128 << 20
"""Decoded bytes of a data file, at most. Two of them are in memory at once: one is sent, one encoded."""
THREADS = max(1, min(4, os.cpu_count() or 1))
ALIVE = 0.5
"""A file of which a smaller share is needed is not referred to: what is unchanged in it is written once more."""
_ROW_BYTES, _MORE_BYTES = 160, 220
"""Beside its name, a piece takes at most so much in a header, and so much more in a manifest once it is encoded."""
_PART_NUMBERS = 10**12
"""Parts that are named by what they hold have numbers from here on: no others do."""

Pick = Callable[[str], str]
"""The codec of a class of tensors (`choose.class_of`)."""


@dataclass(slots=True)
class Tally:
    """What encoding and sending have taken, to choose codecs by.

    Args:
        speeds: of every class and codec that was used, without the time that decoding takes.
    """

    raw_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    stored_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    put_bytes: int = 0
    put_seconds: float = 0.0

    def add(self, done: _Done) -> None:
        """Note an encoded piece."""
        key = done.kind, done.tried
        self.raw_bytes[key] += done.work.piece.raw_nbytes
        self.stored_bytes[key] += len(done.stored)
        self.seconds[key] = self.seconds.get(key, 0.0) + done.seconds

    def speeds(self, decode_seconds_per_byte: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], Speed]:
        """What every codec did to the tensors of a class."""
        return {
            key: Speed(
                nbytes / max(1, self.stored_bytes[key]),
                self.seconds[key] / nbytes,
                decode_seconds_per_byte.get(key, 0.0),
            )
            for key, nbytes in self.raw_bytes.items()
            if key[1] != RAW
        }


@dataclass(frozen=True, slots=True)
class _Work:
    """A piece to be written, which begins at byte `start` of its entry."""

    name: str
    start: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class _Done:
    """A piece as it will be stored. `tried`: the codec that it was given to, whether it paid or not."""

    work: _Work
    stored: bytes | memoryview
    codec: str
    tried: str
    kind: str
    digest: str
    raw_digest: str
    seconds: float

    def piece_at(self, file: int, offset: int) -> Piece:
        """As the manifest names it."""
        if self.codec == RAW:
            return Piece(file, offset, len(self.stored), self.digest, len(self.stored))
        nbytes = self.work.piece.raw_nbytes
        return Piece(file, offset, len(self.stored), self.digest, nbytes, self.codec, None, self.raw_digest)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a copy refers to, and what it writes.

    Args:
        before: the older snapshot at the target that keeps alive what is referred to.
        old: pieces of `before` that are referred to, by entry and the byte where they begin.
        parts: what each data file has, in order.
    """

    before: Manifest | None
    old: Mapping[tuple[str, int], Piece]
    parts: tuple[tuple[_Work, ...], ...]

    def most_bytes(self, manifest: bytes) -> int:
        """At most so many bytes are written: if nothing can be encoded, with headers and manifest.

        Args:
            manifest: that of the source, as it is stored.
        """
        work = [one for part in self.parts for one in part]
        headers = sum(2 * len(one.name.encode()) + _ROW_BYTES for one in work) + len(self.parts) * container.ALIGN_BYTES
        return sum(one.piece.raw_nbytes for one in work) + headers + len(manifest) + _MORE_BYTES * len(work)

    @property
    def old_files(self) -> tuple[DataFile, ...]:
        """The files that are referred to."""
        used = {piece.file for piece in self.old.values()}
        return tuple(self.before.files[index] for index in sorted(used)) if self.before is not None else ()


def plan(manifest: Manifest, target: Repository) -> Plan:
    """How `manifest` is stored at `target`, where the newest older snapshot may have some of it.

    Raises:
        StorageError: from the target.
    """
    before = _before(manifest, target)
    work = [
        _Work(name, start, piece) for name, entry in manifest.entries.items() for start, piece in placed(entry.pieces)
    ]
    same = _same(work, manifest, before) if before is not None else {}
    alive: set[int] = set()
    if before is not None:
        sizes = {item.name: item.nbytes for item in target.storage.list(layout.DATA)}
        needed: Counter[int] = Counter()
        for piece in same.values():
            needed[piece.file] += piece.nbytes
        for index, nbytes in needed.items():
            file = before.files[index]
            if nbytes >= ALIVE * (file.nbytes - container.ALIGN_BYTES) and sizes.get(file.name) == file.nbytes:
                alive.add(index)
    old = {key: piece for key, piece in same.items() if piece.file in alive}
    # What stays is apart from what changes: its files are referred to for long.
    settled = [one for one in work if (one.name, one.start) in same and (one.name, one.start) not in old]
    changed = [one for one in work if (one.name, one.start) not in same]
    return Plan(before, old, (*_parts(settled), *_parts(changed)))


def copy_encoded(
    source: Repository,
    target: Repository,
    snapshot: str,
    pick: Pick,
    tally: Tally,
    *,
    sink: Storage | None = None,
    committing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Copied:
    """Copy one snapshot, encoded; every piece is compared with its digest first. Needs the target's lease.

    Args:
        pick: the codec of each class of tensors; a piece that it does not pay for is stored as it is.
        tally: is told what it took.
        sink: what the objects are put into instead of `target.storage`: the same place at another pace.
        committing: held while the manifest is written: nobody may forget snapshots at the target meanwhile.

    Raises:
        SourceError: the snapshot is missing or damaged at the source, or the source cannot be read.
        StorageError: from the target.
    """
    put = sink or target.storage
    try:
        manifest = source.read(snapshot)
    except CkptError as err:
        raise SourceError(err) from err
    planned = plan(manifest, target)
    encoder = _Encoder(source.storage, manifest, pick)
    made = _Made(manifest, planned)
    sent = present = 0
    with encoder.pool:
        coming = _ahead(encoder, planned.parts)
        try:
            for done in coming:
                file, header = made.add(done)
                for one in done:
                    tally.add(one)
                if has_file(target.storage, file):
                    present += file.nbytes
                    continue
                began = time.monotonic()
                put.put(file.name, [memoryview(header), *(memoryview(one.stored) for one in done)])
                tally.put_seconds += time.monotonic() - began
                tally.put_bytes += file.nbytes
                sent += file.nbytes
        finally:
            encoder.pool.shutdown(cancel_futures=True)
    if present:
        settle_data(target.storage)
    stored = made.manifest()
    with committing():
        _require_old(planned, target)
        text = manifest_codec.encode(stored)
        try:
            put.put(layout.manifest_name(snapshot), [memoryview(text)])
        except StorageExistsError:
            if target.storage.get(layout.manifest_name(snapshot)) != text:
                raise
    target.remember(stored)
    return Copied(sent, present)


class _Encoder:
    """Reads, verifies and encodes pieces of one snapshot in threads of its own."""

    def __init__(self, storage: Storage, manifest: Manifest, pick: Pick) -> None:
        self._manifest = manifest
        self._pick = pick
        self._decoder = decoder_of(storage, manifest)
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ckpt-encode")

    def begin(self, part: Sequence[_Work]) -> list[Future[_Done]]:
        """Start with a part."""
        return [self.pool.submit(self._encode, work) for work in part]

    def _encode(self, work: _Work) -> _Done:
        entry, nbytes = self._manifest.entries[work.name], work.piece.raw_nbytes
        data = memoryview(bytearray(nbytes))
        try:
            self._decoder.read(work.name, work.start, work.piece, data)
        except CkptError as err:
            raise SourceError(err) from err
        chunk = chunk_of(work.name, entry, work.piece)
        kind = class_of(chunk)
        tried = self._pick(kind)
        # Of decoded bytes whose digest nobody has noted, this is the first one.
        content = work.piece.content_digest or digest(data)
        if tried == RAW:
            return _Done(work, data, RAW, RAW, kind, content, content, 0.0)
        began = time.thread_time()
        stored = get_codec(tried).encode(data, chunk, None)
        seconds = time.thread_time() - began
        if stored is None:
            return _Done(work, data, RAW, tried, kind, content, content, seconds)
        return _Done(work, stored, tried, tried, kind, digest(stored), content, seconds)


def decoder_of(storage: Storage, manifest: Manifest) -> Decoder:
    """Decodes pieces of a snapshot in `storage`; what is read is verified."""

    def fetch(entry: str, piece: Piece, out: memoryview) -> None:
        name = manifest.files[piece.file].name
        storage.get_into(name, piece.offset, out)
        if digest(out) != piece.digest:
            raise CorruptError(f"{entry!r}: bytes of {name} do not match their digest")

    return Decoder(manifest, fetch)


def chunk_of(name: str, entry: Entry, piece: Piece) -> Chunk:
    """What a codec is told of a piece of an entry."""
    return Chunk(entry.dtype, (piece.raw_nbytes,), name)


def _ahead(encoder: _Encoder, parts: Sequence[Sequence[_Work]]) -> Iterator[list[_Done]]:
    """The parts, encoded; while one is in use the next one is worked on."""
    waiting: list[Future[_Done]] | None = None
    for part in parts:
        begun = encoder.begin(part)
        if waiting is not None:
            yield [one.result() for one in waiting]
        waiting = begun
    if waiting is not None:
        yield [one.result() for one in waiting]


class _Made:
    """Puts together the files and the manifest of a copy."""

    def __init__(self, manifest: Manifest, planned: Plan) -> None:
        self._source = manifest
        self._plan = planned
        self._files = list(planned.old_files)
        index = {file.name: number for number, file in enumerate(self._files)}
        self._pieces: dict[tuple[str, int], Piece] = {}
        for key, piece in planned.old.items():
            assert planned.before is not None
            self._pieces[key] = replace(piece, file=index[planned.before.files[piece.file].name])

    def add(self, part: Sequence[_Done]) -> tuple[DataFile, bytes]:
        """The next data file: its header, after which the pieces follow."""
        counted = Counter(one.work.name for one in part if one.codec == RAW)
        entries = self._source.entries
        whole = {name for name, count in counted.items() if count == len(entries[name].pieces)}
        rows: list[tuple[str, str, Sequence[int], int]] = []
        for one in part:
            name, start, nbytes = one.work.name, one.work.start, one.work.piece.raw_nbytes
            if name not in whole:
                codec = "" if one.codec == RAW else f"~{one.codec}"
                rows.append((f"{name}~[{start}:{start + nbytes}]{codec}", "U8", (len(one.stored),), len(one.stored)))
            elif start == 0:
                size = sum(piece.raw_nbytes for piece in entries[name].pieces)
                rows.append((name, *container.container_form(entries[name].dtype, entries[name].shape, size), size))
        if len(self._files) == len(self._plan.old_files):
            rows += [
                (name, *container.container_form(entry.dtype, entry.shape, 0), 0)
                for name, entry in entries.items()
                if not entry.pieces
            ]
        header = container.build_header(rows, {"format": "pt"})
        text = b"".join([header, *(one.digest.encode() for one in part)])
        number = _PART_NUMBERS + int(digest(text).partition(":")[2], 16) % _PART_NUMBERS
        nbytes = len(header) + sum(len(one.stored) for one in part)
        file = DataFile(layout.data_name(self._source.info.id, part=number), nbytes)
        offset = len(header)
        for one in part:
            self._pieces[one.work.name, one.work.start] = one.piece_at(len(self._files), offset)
            offset += len(one.stored)
        self._files.append(file)
        return file, header

    def manifest(self) -> Manifest:
        """Of all that was added."""
        entries = {
            name: replace(entry, pieces=tuple(self._pieces[name, start] for start, _ in placed(entry.pieces)))
            for name, entry in self._source.entries.items()
        }
        return replace(self._source, files=tuple(self._files), entries=entries, bases={})


def placed(pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
    """The pieces of an entry, each with the byte of it at which it begins."""
    return zip(accumulate((piece.raw_nbytes for piece in pieces), initial=0), pieces, strict=False)


def _before(manifest: Manifest, target: Repository) -> Manifest | None:
    """The newest older snapshot there; None: there is none, or it is damaged."""
    older = [parsed for parsed in target.ids() if parsed.seq < manifest.info.seq]
    try:
        return target.read(older[-1].id) if older else None
    except (CorruptError, StorageMissingError):
        return None


def _same(work: Sequence[_Work], manifest: Manifest, before: Manifest) -> dict[tuple[str, int], Piece]:
    """The pieces of an older snapshot that have the same bytes in the same place and need no others."""
    there = {
        (name, start): piece
        for name, old in before.entries.items()
        if (entry := manifest.entries.get(name)) and (old.dtype, old.shape) == (entry.dtype, entry.shape)
        for start, piece in placed(old.pieces)
    }
    found = {}
    for one in work:
        key, content = (one.name, one.start), one.piece.content_digest
        old_piece = there.get(key)
        if old_piece is None or old_piece.base is not None or content is None:
            continue
        if (old_piece.content_digest, old_piece.raw_nbytes) == (content, one.piece.raw_nbytes):
            found[key] = old_piece
    return found


def _parts(work: Sequence[_Work]) -> list[tuple[_Work, ...]]:
    """Cut into data files."""
    found: list[list[_Work]] = []
    room = 0
    for one in work:
        room -= one.piece.raw_nbytes
        if room < 0:
            found.append([])
            room = PART_BYTES - one.piece.raw_nbytes
        found[-1].append(one)
    return [tuple(part) for part in found]


def _require_old(planned: Plan, target: Repository) -> None:
    """Whether what is referred to is still there, and will be as long as nothing is forgotten."""
    if not planned.old or planned.before is None:
        return
    there = {item.name: item.nbytes for item in target.storage.list(layout.DATA)}
    if planned.before.info.id not in {parsed.id for parsed in target.ids()} or any(
        there.get(file.name) != file.nbytes for file in planned.old_files
    ):
        raise StorageMissingError(
            f"{target.storage.url}: what a copy was to refer to in {planned.before.info.id} was removed meanwhile",
            hint="the copy is made again",
        )
