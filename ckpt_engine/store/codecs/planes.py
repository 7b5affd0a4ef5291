"""The stream of byte planes that the codecs for numbers share.

```
header   magic (4 bytes), width of a word (1), moved (1), zero (2), words in a block (u32), zero (u32),
         decoded bytes (u64), xxh3-64 of the base or 0 (u64)
         what the codec itself adds, see there
block    for each plane, lowest first: kind << 28 | stored bytes (u32); then the planes; each part is padded to 8 bytes
tail     the bytes after the last whole word
```

All numbers are little endian. The last block is shorter. Kinds: 0 as it is, 1 one zstd frame, 2 zeros, 3 this plane and
the next one as 16-bit numbers whose sign is not moved, 4 stored with the plane before, 5 the whole block as in
changed_words.py (the version is 2 if there is one).

Numbers as words of bits, and words as byte planes: which width a dtype has, cutting and joining.

Words are little endian. A word is cut into lanes of 16 bits and each lane into two planes of bytes. In the uppermost
lane of a floating-point number the sign is moved first: bits 14 to 7 become the upper byte, and bit 15 and bits 6 to 0
the lower one. Of bfloat16 and float32 numbers one plane is then exactly the exponent.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckpt_engine.errors import NewerFormatError
from ckpt_engine.store.codecs.changed_words import decode_changed, encode_changed
from ckpt_engine.store.codecs.codec import damaged
from ckpt_engine.store.codecs.zstd_frames import HOPELESS, PAYS, Compressor, decompress_into

Words = NDArray[Any]
Bytes = NDArray[np.uint8]
HalfWords = NDArray[np.uint16]

BLOCK_WORDS = 1 << 17
"""Words handled at once: a block with its planes stays in the second-level cache of a core."""

_FLOATS = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "complex32": 2,
    "complex64": 4,
    "float64": 8,
    "complex128": 8,
}
_INTEGERS = {"int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8}
WIDTHS = (1, 2, 4, 8)
ReadWords = Callable[[int, int], Words]
"""Words [start, stop) of what is to be encoded; may return the same memory every time."""
WriteWords = Callable[[int, int, Words], None]
"""Takes words [start, stop) that were decoded; they are overwritten afterwards."""
_HEADER = struct.Struct("<4sBBHIIQQ")
_NO_MORE = struct.Struct("")
HEADER_BYTES = _HEADER.size
_AS_IS, _FRAME, _ZEROS, _PAIR, _WITH_PREVIOUS, _CHANGED = range(6)
_COMPRESSOR = Compressor(strategy=1, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=17, target_length=0)
"""Little but Huffman coding: planes of numbers hardly repeat; looking for repetitions costs time, and even bytes."""
_REST_BLOCKS = 8
"""Blocks after a plane that did not pay for which it is not tried again."""
_SAMPLE_RUNS, _SAMPLE_WORDS = 4, 1024
_MOST_KEPT_BYTES = 20 << 20
_LOW, _HIGH = 7, 8
"""Numbers of scratch memory for two planes."""
_local = threading.local()


def width_of(dtype: str) -> int:
    """Bytes of one word: of the number, or of each half of a complex one; 1 for a dtype without byte structure."""
    return _FLOATS.get(dtype) or _INTEGERS.get(dtype, 1)


def is_float(dtype: str) -> bool:
    """Whether the uppermost bit is a sign and the ones below it are an exponent."""
    return dtype in _FLOATS


def word_type(width: int) -> np.dtype[Any]:
    """The unsigned type of words of `width` bytes."""
    return np.dtype(f"<u{width}")


def words_in(data: memoryview, width: int) -> Words:
    """The whole words of `data`, without a copy, writable if `data` is."""
    return np.frombuffer(data, np.uint8, data.nbytes // width * width).view(word_type(width))


class Scratch(threading.local):
    """Reused arrays of one block, others on each thread."""

    def __init__(self) -> None:
        self.lanes = [np.empty(BLOCK_WORDS, np.uint16) for _ in range(2)]
        self.planes = [np.empty(BLOCK_WORDS, np.uint8) for _ in range(2)]
        self._words: dict[tuple[int, int], Words] = {}

    def words(self, width: int, number: int, count: int) -> Words:
        """Room for `count` words; another array for each `number`."""
        found = self._words.get((width, number))
        if found is None:
            found = self._words[width, number] = np.empty(BLOCK_WORDS, word_type(width))
        return found[:count]


SCRATCH = Scratch()


def copy_lane(words: Words, number: int, lane: HalfWords) -> HalfWords:
    """Fill `lane` with bits `16 * number` and up of every word."""
    if number:
        words = np.right_shift(words, words.dtype.type(16 * number), out=SCRATCH.words(words.itemsize, 0, words.size))
    np.copyto(lane, words, casting="unsafe")
    return lane


def split_lane(lane: HalfWords, moved: bool) -> tuple[Bytes, Bytes]:
    """The lower and the upper byte of each number of a lane, in scratch.

    Args:
        moved: whether the sign is moved behind the exponent first.
    """
    low, high = (plane[: lane.size] for plane in SCRATCH.planes)
    first, second = SCRATCH.lanes[1][: lane.size], SCRATCH.words(2, 1, lane.size)
    if moved:
        np.right_shift(lane, np.uint16(7), out=first)
        np.copyto(high, first, casting="unsafe")
        np.bitwise_and(lane, np.uint16(0x807F), out=first)
        np.right_shift(first, np.uint16(8), out=second)
        np.bitwise_or(first, second, out=first)
        np.copyto(low, first, casting="unsafe")
    else:
        np.copyto(low, lane, casting="unsafe")
        np.right_shift(lane, np.uint16(8), out=first)
        np.copyto(high, first, casting="unsafe")
    return low, high


def join_lane(low: Bytes | None, high: Bytes | None, moved: bool, lane: HalfWords) -> None:
    """Undo `split_lane` into `lane`; a plane that is None is all zeros."""
    upper, lower = SCRATCH.lanes[1][: lane.size], SCRATCH.words(2, 1, lane.size)
    # Multiplications, because numpy shifts 16-bit numbers to the left more slowly.
    if high is None:
        upper.fill(0)
    else:
        np.copyto(upper, high)
        np.multiply(upper, np.uint16(0x80 if moved else 0x100), out=upper)
    if low is None:
        lower.fill(0)
    else:
        np.copyto(lower, low)
        if moved:
            # A copy in each byte; of the upper one the sign stays, of the lower one the rest.
            np.multiply(lower, np.uint16(0x101), out=lower)
            np.bitwise_and(lower, np.uint16(0x807F), out=lower)
    np.bitwise_or(upper, lower, out=lane)


def add_lane(words: Words, number: int, lane: HalfWords) -> None:
    """Set bits `16 * number` and up, which are zero in `words`."""
    other = SCRATCH.words(words.itemsize, 1, words.size)
    np.copyto(other, lane)
    np.left_shift(other, words.dtype.type(16 * number), out=other)
    np.bitwise_or(words, other, out=words)


def _room(nbytes: int) -> Bytes:
    """Memory for stored bytes: what this thread used last, if nothing refers to it any more.

    The first touch of new memory costs as much as all of the encoding.
    """
    kept, user = _local.__dict__.pop("room", (None, None))
    if kept is None or kept.size < nbytes or user() is not None:
        kept = np.empty(nbytes, np.uint8)
    room: Bytes = kept[:]
    if kept.size <= _MOST_KEPT_BYTES:
        # A memoryview of `room` refers to it; a numpy view would refer to `kept`, which nothing here would see.
        _local.room = kept, weakref.ref(room)
    return room


@dataclass(frozen=True, slots=True)
class PlanesHeader:
    """What stored bytes say of themselves.

    Args:
        magic: of the codec; its last byte is the version, as a digit: when read, the latest that is known.
        width: bytes of a word.
        moved: whether the sign was moved behind the exponent.
        nbytes: decoded bytes.
        base: digest of the base, or 0.
        more: what the codec itself adds: numbers of a struct, when read.
    """

    magic: bytes
    width: int
    moved: bool
    nbytes: int
    base: int = 0
    block_words: int = BLOCK_WORDS
    more: tuple[Any, ...] = ()

    def pack(self) -> bytes:
        """The first `HEADER_BYTES` stored bytes."""
        return _HEADER.pack(self.magic, self.width, self.moved, 0, self.block_words, 0, self.nbytes, self.base)

    @classmethod
    def read(
        cls,
        codec: str,
        magic: bytes,
        stored: memoryview,
        nbytes: int,
        base: memoryview | None,
        more: struct.Struct = _NO_MORE,
    ) -> PlanesHeader:
        """Parse and hold against what the caller knows.

        Raises:
            CorruptError: not a header, or of other bytes, or of another base.
            NewerFormatError: a later version of this codec.
        """
        if stored.nbytes < HEADER_BYTES:
            raise damaged(codec, f"{stored.nbytes} bytes, shorter than a header")
        found, width, moved, zero, block_words, zero2, raw, digest = _HEADER.unpack_from(stored)
        if found[:3] == magic[:3] and found[3] > magic[3]:
            raise NewerFormatError(f"a piece is encoded with a later version of {codec!r}")
        good = found[:3] == magic[:3] and found[3] >= ord("1") and width in WIDTHS and moved <= 1 and zero == zero2 == 0
        if not good or not 1 <= block_words <= BLOCK_WORDS or stored.nbytes < HEADER_BYTES + more.size:
            raise damaged(codec, "its header makes no sense")
        if raw != nbytes:
            raise damaged(codec, f"it holds {raw} bytes where {nbytes} belong")
        if base is not None and (base.nbytes != nbytes or base_digest(base) != digest):
            raise damaged(codec, "it was made against another base")
        return cls(found, width, bool(moved), raw, digest, block_words, more.unpack_from(stored, HEADER_BYTES))


def base_digest(base: memoryview) -> int:
    """64 bits that tell bases apart: xxh3-64."""
    return xxhash.xxh3_64_intdigest(base)


class PlaneEncoder:
    """Writes a stream into memory that is large enough for the worst case.

    Args:
        header: of the stream.
        extra: bytes of the codec after the header.
    """

    def __init__(self, header: PlanesHeader, extra: bytes = b"") -> None:
        self._header = header
        blocks = header.nbytes // header.width // header.block_words + 1
        self._out = _room(HEADER_BYTES + len(extra) + header.nbytes + (blocks + 2) * (12 * header.width + 16))
        self._end = 0
        self._rest, self._paid = [0] * header.width, [False] * header.width
        self._put(header.pack() + extra)

    def _put(self, data: bytes | memoryview) -> int:
        """Append bytes; their number."""
        self._space(len(data))[:] = np.frombuffer(data, np.uint8)
        return len(data)

    def _space(self, nbytes: int) -> Bytes:
        """Where the next bytes belong: 16-bit planes lie where the processor wants them."""
        start = -(-self._end // 8) * 8
        self._out[self._end : start] = 0
        self._end = start + nbytes
        return self._out[start : self._end]

    def encode(self, source: ReadWords, tail: memoryview, base: Words | None = None) -> memoryview:
        """All blocks and the tail; the stored bytes.

        Args:
            base: what the words are folded differences to. None: blocks are planes.
        """
        count = self._header.nbytes // self._header.width
        for start in range(0, count, self._header.block_words):
            words = source(start, min(count, start + self._header.block_words))
            self._block(words, encode_changed(words, base[start : start + words.size]) if base is not None else None)
        self._put(tail)
        return memoryview(self._out)[: self._end]  # type: ignore[arg-type]

    def _block(self, words: Words, changed: bytes | None) -> None:
        width = self._header.width
        space, table = self._space(4 * width), [0] * width
        if changed is not None:
            self._out[3] = ord("2")
            table[0] = _CHANGED << 28 | self._put(changed)
        elif width == 1:
            table[0] = self._plane(0, words)
        else:
            for number in range(width // 2):
                table[2 * number : 2 * number + 2] = self._lane(number, words)
        space[:] = np.frombuffer(struct.pack(f"<{width}I", *table), np.uint8)

    def _lane(self, number: int, words: Words) -> tuple[int, int]:
        moved = self._header.moved and number == self._header.width // 2 - 1
        rest = self._rest
        for plane in (2 * number, 2 * number + 1):
            if rest[plane]:
                rest[plane] -= 1
            elif not self._paid[plane] and not self._worth_it(words, plane, moved):
                rest[plane] = _REST_BLOCKS
        if rest[2 * number] and rest[2 * number + 1]:
            nbytes = 2 * words.size
            copy_lane(words, number, self._space(nbytes).view(np.uint16))
            return _PAIR << 28 | nbytes, _WITH_PREVIOUS << 28
        lane = SCRATCH.lanes[0][: words.size]
        lane = words if words.itemsize == 2 else copy_lane(words, number, lane)
        low, high = split_lane(lane, moved)
        return self._plane(2 * number, low), self._plane(2 * number + 1, high)

    def _worth_it(self, words: Words, plane: int, moved: bool) -> bool:
        """Whether a sample of a plane can be compressed."""
        if words.size > _SAMPLE_RUNS * _SAMPLE_WORDS:
            starts = np.linspace(0, words.size - _SAMPLE_WORDS, _SAMPLE_RUNS, dtype=int).tolist()
            words = np.concatenate([words[start : start + _SAMPLE_WORDS] for start in starts])
        sample = split_lane(copy_lane(words, plane // 2, SCRATCH.lanes[0][: words.size]), moved)[plane % 2]
        return bool(len(_COMPRESSOR.compress(memoryview(sample))) <= HOPELESS * sample.size)  # type: ignore[arg-type]

    def _plane(self, number: int, plane: Bytes) -> int:
        data: bytes | memoryview = memoryview(plane)  # type: ignore[arg-type]
        kind = _AS_IS
        if not self._rest[number]:
            if not plane.any():
                return _ZEROS << 28
            frame = _COMPRESSOR.compress(memoryview(plane))  # type: ignore[arg-type]
            self._paid[number] = len(frame) <= PAYS * plane.size
            if self._paid[number]:
                kind, data = _FRAME, frame
            else:
                self._rest[number] = _REST_BLOCKS
        return kind << 28 | self._put(data)


class PlaneDecoder:
    """Reads a stream block by block; every length is checked before it is used.

    Args:
        position: where the first block begins in `stored`.
        base: what the words are folded differences to; None: of those there are none.
    """

    def __init__(
        self,
        codec: str,
        header: PlanesHeader,
        stored: memoryview,
        position: int = HEADER_BYTES,
        base: Words | None = None,
    ) -> None:
        self._codec = codec
        self._base = base
        self._header = header
        self._stored = np.frombuffer(stored, np.uint8)
        self._at = position

    def decode(self, tail: memoryview, sink: WriteWords = lambda *_: None, out: Words | None = None) -> None:
        """All blocks, then the tail; nothing may be left over.

        Args:
            sink: takes each block.
            out: where blocks are made; None: in scratch memory.
        """
        count, most = self._header.nbytes // self._header.width, self._header.block_words
        for start in range(0, count, most):
            stop = min(count, start + most)
            words = SCRATCH.words(self._header.width, 3, stop - start) if out is None else out[start:stop]
            self._block(words, start)
            sink(start, stop, words)
        last = self._take(tail.nbytes, "its tail")
        if self._at != self._stored.size:
            raise damaged(self._codec, f"{self._stored.size - self._at} bytes are left over")
        tail[:] = memoryview(last)  # type: ignore[arg-type]

    def _take(self, nbytes: int, what: str) -> Bytes:
        start = -(-self._at // 8) * 8
        self._at = start + nbytes
        if self._at > self._stored.size:
            raise damaged(self._codec, f"{what} would end at byte {self._at} of {self._stored.size}")
        return self._stored[start : self._at]

    def _block(self, out: Words, start: int) -> None:
        width, count = self._header.width, out.size
        table = struct.unpack(f"<{width}I", self._take(4 * width, "a table of planes").tobytes())
        if table[0] >> 28 == _CHANGED and self._base is not None:
            changed, base = self._take(table[0] & 0xFFFFFFF, "a block"), self._base[start : start + count]
            decode_changed(self._codec, changed, base, out)
            return
        if width == 1:
            plane = self._plane(table[0], count, _LOW)
            out[:] = 0 if plane is None else plane
            return
        for number in range(width // 2):
            lane = self._lane(number, table[2 * number], table[2 * number + 1], count)
            if number == 0:
                out[:] = 0 if lane is None else lane
            elif lane is not None:
                add_lane(out, number, lane)

    def _lane(self, number: int, low: int, high: int, count: int) -> HalfWords | None:
        """A lane: where it is stored, or else in scratch; None if it is all zeros."""
        if low >> 28 == _PAIR:
            if low & 0xFFFFFFF != 2 * count or high != _WITH_PREVIOUS << 28:
                raise damaged(self._codec, "two planes stored together do not fit")
            return self._take(2 * count, "a plane").view(np.uint16)
        planes = self._plane(low, count, _LOW), self._plane(high, count, _HIGH)
        if planes[0] is planes[1] is None:
            return None
        lane, moved = SCRATCH.lanes[0][:count], self._header.moved and number == self._header.width // 2 - 1
        join_lane(*planes, moved, lane)
        return lane

    def _plane(self, entry: int, count: int, room: int) -> Bytes | None:
        """A plane: where it is stored, or else in the scratch memory with this number; None if it is all zeros."""
        kind, nbytes = entry >> 28, entry & 0xFFFFFFF
        if kind == _ZEROS and nbytes == 0:
            return None
        if kind not in (_AS_IS, _FRAME):
            raise damaged(self._codec, f"a plane of unknown kind {kind}")
        data = self._take(nbytes, "a plane")
        if kind == _FRAME:
            plane = SCRATCH.words(1, room, count)
            decompress_into(self._codec, memoryview(data), memoryview(plane))  # type: ignore[arg-type]
            return plane
        if nbytes != count:
            raise damaged(self._codec, f"a plane of {nbytes} bytes where {count} belong")
        return data
