"""Encodes the pieces of a planned snapshot on threads of its own.

Each piece is verified before it is encoded, and a difference is decoded once to be sure.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter

from ckpt_engine.copy.adam_groups import AdamGroup
from ckpt_engine.copy.sharing_bounds import SharingBounds
from ckpt_engine.copy.transfer import reading_source
from ckpt_engine.copy.write_plan import ROWS, Bases, DeltaBase, Job, Key, Needed, Work, WritePlan
from ckpt_engine.copy.write_snapshot import ParallelMap
from ckpt_engine.store import container, names
from ckpt_engine.store.codecs.codec import Chunk, get_codec, get_group_codec
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import BufferPool, Decoder
from ckpt_engine.store.manifest import RAW, DataFile, Entry, Manifest, Piece

THREADS = max(1, min(4, os.cpu_count() or 1))
DELTA = "delta"
"""Stands for the codecs that need a base, where there is one, and for `FULL` where there is none."""
FULL = "byteplane-zstd"
ADAM = "adam"
GROUPS_AT_ONCE = 2
"""Nine arrays of a piece each are in memory for one."""
_NUMBERS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}
LEAST_ROWS = 64
"""In a piece; with fewer of them most pieces change in most rows."""

Pick = Callable[[str], str]
"""The codec of tensors of a dtype, or `DELTA`; `ROWS`: changed rows, else as it is."""
View = Callable[[str, Piece], memoryview]
"""The stored bytes of a plain piece of an entry, verified, where they are in memory."""
CHANGED, SETTLED, DELTAS = 1, 2, 3
"""Parts of a snapshot: its data files of what changes, those of what stays, and those of what changes in few rows."""
_PART_NUMBERS = 10**12
"""Parts that are named by what they hold have numbers from here on: no others do."""


@dataclass(eq=False)
class Encoder:
    """Encodes the jobs of one copy.

    Args:
        manifest: of what is copied.
        decoder: reads that.
        bases: reads what the target has.
        view: as `decoder`, without a copy.
    """

    _manifest: Manifest
    _planned: WritePlan
    _decoder: Decoder
    _bases: Bases
    _pick: Pick
    _view: View | None = None
    _dense: set[str] = field(default_factory=set, init=False)
    """Entries of which a piece has changed in most rows: the others are not tried."""
    _memory: BufferPool = field(default_factory=BufferPool, init=False)
    _groups_at_once: threading.Semaphore = field(
        default_factory=partial(threading.Semaphore, GROUPS_AT_ONCE), init=False
    )
    _steps: dict[str, float | None] = field(default_factory=dict, init=False)

    def ahead(self) -> Iterator[list[EncodedPiece]]:
        """The parts of the plan, encoded; while one is in use the next one is worked on.

        Raises:
            CopySourceError: what is copied is damaged or cannot be read.
        """
        threads = THREADS if self._planned.bounds.part_bytes is not None else 0
        begun: ParallelMap[Job, list[EncodedPiece]] | None = None
        try:
            for part in (*self._planned.parts, ()):
                done = list(chain.from_iterable(begun.result())) if begun is not None else []
                begun = ParallelMap(self._encode, part, threads, "ckpt-encode")
                if done:
                    yield done
        finally:
            if begun is not None:
                begun.abandon()

    def _encode(self, job: Job) -> list[EncodedPiece]:
        if job.adam is not None and all(self._tried(one) == DELTA for one in job.work):
            sizes = [one.piece.raw_nbytes for one in job.work]
            with self._groups_at_once, self._memory.lend(*sizes, *sizes) as rooms:
                found = self._encode_group(job.work, job.adam, rooms)
            if found is not None:
                return found
        return [self._encode_one(one) for one in job.work]

    def _encode_one(self, work: Work) -> EncodedPiece:
        data = self._read(work)
        # Of decoded bytes without a known digest this is the first one.
        content = work.piece.content_digest or digest(data)
        tried = self._tried(work)
        began = time.thread_time()
        found = self._difference(work, data, content, tried) if tried in (DELTA, ROWS) else None
        is_over = found is not None
        codec = {DELTA: FULL, ROWS: RAW}.get(tried, tried)
        if found is None:
            stored = get_codec(codec).encode(data, self._chunk(work), None) if codec != RAW else None
            found = (codec, stored) if stored is not None else (RAW, data)
        seconds = time.thread_time() - began
        codec, stored = found
        stored_digest = content if codec == RAW else digest(stored)
        stored = stored if codec == RAW else _snug(stored)
        return EncodedPiece(work, stored, codec, stored_digest, content, seconds, is_over)

    def _difference(
        self, work: Work, data: memoryview, content: str, tried: str
    ) -> tuple[str, bytes | memoryview] | None:
        """A piece as difference to what the target has; None: it is better written in full."""
        over, rows = work.over, in_rows(work.name, self._manifest.entries[work.name], work.piece)
        if over is None or not (over.alone or over.rows) or work.name in self._dense:
            return None
        tries = [(ROWS, rows)] if rows is not None else []
        if not over.rows and tried == DELTA:
            tries.append(("delta-byteplane-zstd", self._chunk(work)))
        with self._memory.lend(data.nbytes) as (base,):
            if not tries or not self._bases.read(work.name, work.start, over, base):
                return None
            for codec, chunk in tries:
                stored = get_codec(codec).encode(data, chunk, base)
                if stored is not None and _is_worth_it([over], [stored], self._planned.bounds):
                    get_codec(codec).decode(memoryview(stored), base, base)
                    return (codec, stored) if digest(base) == content else None
                if stored is None and tried == ROWS:
                    self._dense.add(work.name)
        return None

    def _encode_group(
        self, work: Sequence[Work], adam: AdamGroup, rooms: Sequence[memoryview]
    ) -> list[EncodedPiece] | None:
        """Moments and weights together; None: they are not one step of Adam later, or not worth it.

        Args:
            rooms: memory for two arrays of each.
        """
        step = self._step(adam.step)
        if step is None:
            return None
        began = time.thread_time()
        codec = get_group_codec(ADAM)
        arrays = [self._read(one) for one in work]
        contents = [one.piece.content_digest or digest(data) for one, data in zip(work, arrays, strict=True)]
        bases, decoded = rooms[: len(work)], rooms[len(work) :]
        overs = [one.over for one in work if one.over is not None]
        for one, over, base in zip(work, overs, bases, strict=True):
            if not self._bases.read(one.name, one.start, over, base):
                return None
        named = [dict(zip(codec.roles, data, strict=True)) for data in (arrays, bases)]
        made = codec.encode(named[0], named[1], [{**one, "step": step} for one in adam.numbers])
        if made is None:
            return None
        # Memory of the codec, which it uses again.
        stored = {role: memoryview(data) for role, data in made.items()}
        outs = dict(zip(codec.roles, decoded, strict=True))
        codec.decode(stored, outs, named[1])
        if [digest(outs[role]) for role in codec.roles] != contents:
            return None
        if not _is_worth_it(overs, list(stored.values()), self._planned.bounds):
            return None
        group = tuple(one.name for one in work)
        seconds = (time.thread_time() - began) / len(work)
        return [
            EncodedPiece(one, _snug(data), ADAM, digest(data), content, seconds, True, group)
            for one, data, content in zip(work, stored.values(), contents, strict=True)
        ]

    def _step(self, step: str | float) -> float | None:
        """How many steps were taken; None: that is not a number."""
        if not isinstance(step, str):
            return step
        entry = self._manifest.entries.get(step)
        if entry is None or len(entry.pieces) != 1 or entry.pieces[0].raw_nbytes > 8:
            return None
        piece = entry.pieces[0]
        known = piece.content_digest or step
        if known not in self._steps:
            data = memoryview(bytearray(piece.raw_nbytes))
            self._fill(step, 0, piece, data)
            self._steps[known] = _number(entry.dtype, data)
        return self._steps[known]

    def _read(self, work: Work) -> memoryview:
        if self._view is not None:
            with reading_source():
                return self._view(work.name, work.piece)
        data = memoryview(bytearray(work.piece.raw_nbytes))
        self._fill(work.name, work.start, work.piece, data)
        return data

    def _fill(self, name: str, start: int, piece: Piece, out: memoryview) -> None:
        with reading_source():
            self._decoder.read(name, start, piece, out)

    def _chunk(self, work: Work) -> Chunk:
        return Chunk(self._manifest.entries[work.name].dtype, (work.piece.raw_nbytes,), work.name)

    def _tried(self, work: Work) -> str:
        return self._pick(self._manifest.entries[work.name].dtype)


def in_rows(name: str, entry: Entry, piece: Piece) -> Chunk | None:
    """A piece as rows of its entry; None: it has few of them, or parts of rows."""
    nbytes = entry.nbytes
    if len(entry.shape) < 2 or not entry.shape[0] or nbytes % entry.shape[0]:
        return None
    rows, rest = divmod(piece.raw_nbytes, nbytes // entry.shape[0] or 1)
    return Chunk(entry.dtype, (rows, *entry.shape[1:]), name) if rest == 0 and rows >= LEAST_ROWS else None


def _snug(stored: bytes | memoryview) -> bytes | memoryview:
    """Stored bytes that do not keep much more memory than they need."""
    whole = stored.obj if isinstance(stored, memoryview) else stored
    return bytes(stored) if 2 * len(stored) < memoryview(whole).nbytes else stored


def _number(dtype: str, data: memoryview) -> float | None:
    """The one whole number in `data`."""
    form = _NUMBERS.get(dtype)
    if form is None or data.nbytes != struct.calcsize(form):
        return None
    found = float(struct.unpack(form, data)[0])
    return found if found.is_integer() else None


def _is_worth_it(overs: Sequence[DeltaBase], stored: Sequence[bytes | memoryview], bounds: SharingBounds) -> bool:
    """Whether differences are smaller than what their chains end at, and the chains within their bounds."""
    stored_bytes, full_bytes = sum(map(len, stored)), sum(over.chain[-1].nbytes for over in overs)
    under_bytes = sum(piece.nbytes for over in overs for piece in over.chain)
    raw_bytes = sum(over.chain[-1].raw_nbytes for over in overs)
    return stored_bytes < full_bytes and stored_bytes + under_bytes <= bounds.most_bytes * raw_bytes


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """A piece as it will be stored.

    Args:
        digest, raw_digest: of the stored and of the decoded bytes.
        seconds: processor time of encoding.
        is_over: whether it is a difference to `work.over`.
        group: as `Piece.group`.
    """

    work: Work
    stored: bytes | memoryview
    codec: str
    digest: str
    raw_digest: str
    seconds: float
    is_over: bool = False
    group: tuple[str, ...] = ()

    @property
    def kind_of_file(self) -> int:
        """One of `CHANGED`, `SETTLED` and `DELTAS`, the last of which stay needed for longest."""
        return DELTAS if self.codec == ROWS else SETTLED if self.work.settled else CHANGED

    def piece_at(self, file: int, offset: int) -> Piece:
        """As the manifest names it."""
        plain = Piece(file, offset, len(self.stored), self.digest, self.work.piece.raw_nbytes)
        if self.codec == RAW:
            return plain
        base = self.work.over.base if self.is_over and self.work.over is not None else None
        return replace(plain, codec=self.codec, base=base, raw_digest=self.raw_digest, group=self.group)


class Files:
    """The files and the manifest of a planned snapshot, as they grow.

    Args:
        manifest: that of the source.
        rank: whose files they are.
    """

    def __init__(self, manifest: Manifest, planned: WritePlan, rank: int = 0) -> None:
        self._rank = rank
        self.source = manifest
        self.plan = planned
        self.new: list[DataFile] = []
        self._pieces: dict[Key, Piece] = {}
        self._firsts: dict[str, Key] = {}
        self._aliases: dict[Key, Key] = {}
        self._needed: dict[tuple[str, str, int], Piece] = {}
        """Pieces of the older snapshot that are bases, by whose they are, entry and place."""
        self._used: set[int] = set()
        """The files of the older snapshot that are needed."""
        for (name, start), needed in planned.old.items():
            self._pieces[name, start] = piece = needed[None, name]
            self._used.add(piece.file)
            if len(needed) > 1:
                self._keep(start, {key: piece for key, piece in needed.items() if key[0] is not None})

    def encoded(self, encoder: Encoder) -> Iterator[tuple[DataFile, list[memoryview], list[EncodedPiece]]]:
        """The data files, one after another: name, blocks and pieces. While one is in use the next one is encoded.

        Raises:
            CopySourceError: what is copied cannot be read.
        """
        for part in encoder.ahead():
            once = list(filter(self._is_first, part))
            kinds = {kind: [one for one in once if one.kind_of_file == kind] for kind in (CHANGED, SETTLED, DELTAS)}
            once.clear()
            part.clear()  # else a third part would be in memory
            for kind, done in kinds.items():
                if done:
                    file, header = self._add(done, kind)
                    yield file, [memoryview(header), *(memoryview(one.stored) for one in done)], done
                    done.clear()

    def _is_first(self, one: EncodedPiece) -> bool:
        """Whether no piece that is written in full has its bytes already; else it is an alias of that one."""
        first = one.work.key if one.is_over else self._firsts.setdefault(one.raw_digest, one.work.key)
        self._aliases |= {} if first == one.work.key else {one.work.key: first}
        return first == one.work.key

    def _add(self, part: Sequence[EncodedPiece], kind: int) -> tuple[DataFile, bytes]:
        """The next data file: its header, after which the pieces follow.

        What may be interrupted is named by what it holds, so that the next attempt finds it.
        """
        entries = self.source.entries
        runs = ((name, list(run)) for name, run in groupby(part, lambda one: one.work.name))
        whole = {
            name for name, run in runs if len(run) == len(entries[name].pieces) and all(one.codec == RAW for one in run)
        }
        rows: list[tuple[str, str, Sequence[int], int]] = []
        for one in part:
            name, start, nbytes = one.work.name, one.work.start, one.work.piece.raw_nbytes
            if name not in whole:
                codec = "" if one.codec == RAW else f"~{one.codec}"
                rows.append((f"{name}~[{start}:{start + nbytes}]{codec}", "U8", (len(one.stored),), len(one.stored)))
            elif start == 0:
                size = sum(piece.raw_nbytes for piece in entries[name].pieces)
                rows.append((name, *container.container_form(entries[name].dtype, entries[name].shape, size), size))
        if not self.new:
            rows += [
                (name, *container.container_form(entry.dtype, entry.shape, 0), 0)
                for name, entry in entries.items()
                if not entry.pieces
            ]
        header = container.data_header(rows)
        number = kind
        if self.plan.bounds.part_bytes is not None:
            text = b"".join([header, *(one.digest.encode() for one in part)])
            number = _PART_NUMBERS + int(digest(text).partition(":")[2], 16) % _PART_NUMBERS
        nbytes = len(header) + sum(len(one.stored) for one in part)
        file = DataFile(names.data_name(self.source.info.id, self._rank, number), nbytes)
        offset = len(header)
        for one in part:
            self._pieces[one.work.key] = one.piece_at(len(self.new), offset)
            if one.is_over and one.work.over is not None:
                self._keep(one.work.start, one.work.over.needed)
            offset += len(one.stored)
        self.new.append(file)
        return file, header

    def _keep(self, start: int, needed: Needed) -> None:
        for (level, name), piece in needed.items():
            self._needed[level or self.plan.before.info.id, name, start] = piece
            self._used.add(piece.file)

    def old_files(self) -> tuple[DataFile, ...]:
        """The files of older snapshots that are needed, the oldest first."""
        return tuple(sorted(map(self.plan.before.files.__getitem__, self._used), key=attrgetter("name")))

    def manifest(self) -> Manifest:
        """Of all that was added."""
        old = self.old_files()
        files = (*old, *self.new)
        numbers = {index: old.index(self.plan.before.files[index]) for index in self._used}
        pieces = {
            key: _moved(piece, numbers[piece.file] if key in self.plan.old else len(old) + piece.file)
            for key, piece in self._pieces.items()
        }
        pieces |= {key: replace(pieces[first], alias=True) for key, first in self._aliases.items()}
        entries = {
            name: Entry(
                entry.dtype,
                entry.shape,
                tuple([pieces[name, start] for start, _ in entry.placed()]),
                entry.container_dtype,
            )
            for name, entry in self.source.entries.items()
        }
        bases: dict[str, dict[str, dict[int, Piece]]] = {}
        for (snapshot, name, start), piece in self._needed.items():
            bases.setdefault(snapshot, {}).setdefault(name, {})[start] = _moved(piece, numbers[piece.file])
        return replace(self.source, files=files, entries=entries, bases=bases)


def _moved(piece: Piece, file: int) -> Piece:
    """A piece with the number that its file has here."""
    return piece if piece.file == file else replace(piece, file=file)
