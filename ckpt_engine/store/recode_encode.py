"""Reads, verifies and encodes the pieces of a snapshot in threads of its own; differences are decoded to be sure."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from ckpt_engine.errors import CkptError
from ckpt_engine.store.adam_groups import AdamGroup
from ckpt_engine.store.codecs.base import Chunk, get_codec, get_group_codec
from ckpt_engine.store.codecs.choose import class_of
from ckpt_engine.store.decode import Decoder
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import RAW, Entry, Manifest, Piece
from ckpt_engine.store.recode_bases import Bases
from ckpt_engine.store.recode_files import Done
from ckpt_engine.store.recode_plan import MOST_BYTES, ROWS, Job, Over, Work
from ckpt_engine.store.transfer import SourceError

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
"""The codec of a class of tensors (`choose.class_of`), or `DELTA`."""
_Told = dict[str, float]


class Encoder:
    """Encodes the jobs of one copy.

    Args:
        manifest: of what is copied.
        decoder: reads that.
        bases: reads what the target has.
    """

    def __init__(self, manifest: Manifest, decoder: Decoder, bases: Bases, pick: Pick) -> None:
        self._manifest = manifest
        self._decoder = decoder
        self._bases = bases
        self._pick = pick
        self._rooms = threading.local()
        self._group_rooms: SimpleQueue[dict[int, bytearray]] = SimpleQueue()
        for _ in range(GROUPS_AT_ONCE):
            self._group_rooms.put({})
        self._steps: dict[str, float | None] = {}
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ckpt-encode")

    def ahead(self, parts: Sequence[Sequence[Job]]) -> Iterator[list[Done]]:
        """The parts, encoded; while one is in use the next one is worked on.

        Raises:
            SourceError: what is copied is damaged or cannot be read.
        """
        waiting: list[Future[list[Done]]] | None = None
        for part in parts:
            begun = [self.pool.submit(self._encode, job) for job in part]
            if waiting is not None:
                yield [done for one in waiting for done in one.result()]
            waiting = begun
        if waiting is not None:
            yield [done for one in waiting for done in one.result()]

    def _encode(self, job: Job) -> list[Done]:
        if job.adam is not None and all(self._tried(one) == DELTA for one in job.work):
            rooms = self._group_rooms.get()  # others give theirs back: what they do with it is bounded
            try:
                found = self._encode_group(job.work, job.adam, rooms)
            finally:
                self._group_rooms.put(rooms)
            if found is not None:
                return found
        return [self._encode_one(one) for one in job.work]

    def _encode_one(self, work: Work) -> Done:
        data = self._read(work)
        # Of decoded bytes whose digest nobody has noted, this is the first one.
        content = work.piece.content_digest or digest(data)
        kind, tried = self._kind(work), self._tried(work)
        if tried == RAW:
            return Done(work, data, RAW, RAW, kind, content, content, 0.0)
        began = time.thread_time()
        found = self._difference(work, data, content) if tried == DELTA else None
        is_over = found is not None
        if found is None:
            codec = FULL if tried == DELTA else tried
            stored = get_codec(codec).encode(data, self._chunk(work), None)
            found = (codec, stored) if stored is not None else (RAW, data)
        seconds = time.thread_time() - began
        codec, stored = found
        stored_digest = content if codec == RAW else digest(stored)
        return Done(work, _snug(stored), codec, tried, kind, stored_digest, content, seconds, is_over)

    def _difference(self, work: Work, data: memoryview, content: str) -> tuple[str, bytes | memoryview] | None:
        """A piece as difference to what the target has; None: it is better written in full."""
        over = work.over
        if over is None or not (over.alone or over.rows):
            return None
        base = _room(self._rooms.__dict__, "base", data.nbytes)
        if not self._bases.read(work.name, work.start, over, base):
            return None
        rows = _in_rows(work.name, self._manifest.entries[work.name], work.piece)
        tries = [(ROWS, rows)] if rows is not None else []
        if not over.rows:
            tries.append(("delta-byteplane-zstd", self._chunk(work)))
        for codec, chunk in tries:
            stored = get_codec(codec).encode(data, chunk, base)
            if stored is not None and _is_worth_it([over], [stored]):
                get_codec(codec).decode(memoryview(stored), base, base)
                return (codec, stored) if digest(base) == content else None
        return None

    def _encode_group(self, work: Sequence[Work], adam: AdamGroup, rooms: dict[int, bytearray]) -> list[Done] | None:
        """Moments and weights together; None: they are not one step of Adam later, or not worth it."""
        step = self._step(adam.step)
        if step is None:
            return None
        began = time.thread_time()
        codec = get_group_codec(ADAM)
        arrays = [self._read(one) for one in work]
        contents = [one.piece.content_digest or digest(data) for one, data in zip(work, arrays, strict=True)]
        bases = [_room(rooms, number, data.nbytes) for number, data in enumerate(arrays)]
        overs = [one.over for one in work if one.over is not None]
        for one, over, base in zip(work, overs, bases, strict=True):
            if not self._bases.read(one.name, one.start, over, base):
                return None
        named = [dict(zip(codec.roles, data, strict=True)) for data in (arrays, bases)]
        made = codec.encode(named[0], named[1], [{**one, "step": step} for one in adam.told])
        if made is None:
            return None
        # Memory of the codec, which it uses again.
        stored = {role: memoryview(data) for role, data in made.items()}
        outs = {role: _room(rooms, 3 + number, arrays[0].nbytes) for number, role in enumerate(codec.roles)}
        codec.decode(stored, outs, named[1])
        if [digest(outs[role]) for role in codec.roles] != contents:
            return None
        if not _is_worth_it(overs, list(stored.values())):
            return None
        group = tuple(one.name for one in work)
        seconds = (time.thread_time() - began) / len(work)
        return [
            Done(one, _snug(data), ADAM, DELTA, self._kind(one), digest(data), content, seconds, True, group)
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
        data = memoryview(bytearray(work.piece.raw_nbytes))
        self._fill(work.name, work.start, work.piece, data)
        return data

    def _fill(self, name: str, start: int, piece: Piece, out: memoryview) -> None:
        try:
            self._decoder.read(name, start, piece, out)
        except CkptError as err:
            raise SourceError(err) from err

    def _chunk(self, work: Work) -> Chunk:
        return chunk_of(work.name, self._manifest.entries[work.name], work.piece)

    def _kind(self, work: Work) -> str:
        return class_of(self._chunk(work))

    def _tried(self, work: Work) -> str:
        return self._pick(self._kind(work))


def _room(kept: dict[Any, bytearray], key: object, nbytes: int) -> memoryview:
    """Memory that is used again."""
    if len(kept.get(key, b"")) < nbytes:
        kept[key] = bytearray(nbytes)
    return memoryview(kept[key])[:nbytes]


def chunk_of(name: str, entry: Entry, piece: Piece) -> Chunk:
    """What a codec is told of a piece of an entry."""
    return Chunk(entry.dtype, (piece.raw_nbytes,), name)


def _in_rows(name: str, entry: Entry, piece: Piece) -> Chunk | None:
    """A piece as rows of its entry; None: it has few of them."""
    nbytes = sum(one.raw_nbytes for one in entry.pieces)
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


def _is_worth_it(overs: Sequence[Over], stored: Sequence[bytes | memoryview]) -> bool:
    """Whether differences are smaller than what their chains end at, and the chains within their bounds."""
    stored_bytes, full_bytes = sum(map(len, stored)), sum(over.chain[-1].nbytes for over in overs)
    under_bytes = sum(piece.nbytes for over in overs for piece in over.chain)
    raw_bytes = sum(over.chain[-1].raw_nbytes for over in overs)
    return stored_bytes < full_bytes and stored_bytes + under_bytes <= MOST_BYTES * raw_bytes
