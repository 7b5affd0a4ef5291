"""The stream of byte planes that the codecs for numbers share: planes that pay are compressed, the others are not.

```
header   magic (4 bytes), width of a word (1), moved (1), zero (2), words in a block (u32), zero (u32),
         decoded bytes (u64), xxh3-64 of the base or 0 (u64)
         what the codec itself adds, see there
block    for each plane, lowest first: kind << 28 | stored bytes (u32); then the planes; each part is padded to 8 bytes
tail     the bytes after the last whole word
```

All numbers are little endian. The last block is shorter. Kinds: 0 as it is, 1 one zstd frame, 2 zeros, 3 this plane and
the next one as 16-bit numbers whose sign is not moved, 4 stored with the plane before.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from ckpt_engine.errors import NewerFormatError
from ckpt_engine.store.codecs.base import damaged
from ckpt_engine.store.codecs.frames import HOPELESS, PAYS, FrameError, compress, decompress
from ckpt_engine.store.codecs.words import (
    BLOCK_WORDS,
    WIDTHS,
    Bytes,
    Lane,
    Scratch,
    Words,
    add_lane,
    copy_lane,
    join_lane,
    lane_of,
    split_lane,
)

Source = Callable[[int, int], Words]
"""Words [start, stop) of what is to be encoded; may return the same memory every time."""
Sink = Callable[[int, int, Words], None]
"""Takes words [start, stop) that were decoded; they are overwritten afterwards."""

_HEADER = struct.Struct("<4sBBHIIQQ")
HEADER_BYTES = _HEADER.size
_AS_IS, _FRAME, _ZEROS, _PAIR, _WITH_PREVIOUS = range(5)
_SETTINGS = {
    "strategy": 1,
    "min_match": 7,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "window_log": 17,
    "target_length": 0,
    "write_content_size": 1,
}
"""Little but Huffman coding: planes of numbers hardly repeat; looking for repetitions costs time, and even bytes."""
_REST_BLOCKS = 8
"""Blocks after a plane that did not pay for which it is not tried again."""
_SAMPLE_RUNS, _SAMPLE_WORDS = 4, 1024
_MOST_KEPT_BYTES = 20 << 20

_local = threading.local()


def scratch() -> Scratch:
    """The reused arrays of this thread."""
    found: Scratch | None = _local.__dict__.get("scratch")
    if found is None:
        found = _local.scratch = Scratch()
    return found


def _room(nbytes: int) -> Bytes:
    """Memory for stored bytes: what this thread used last, if nothing refers to it any more.

    The first touch of new memory costs as much as all of the encoding.
    """
    kept: Bytes | None = _local.__dict__.get("room")
    # Two references: `kept` and the argument of getrefcount; the dictionary's was taken out.
    if kept is not None:
        del _local.room
        if kept.size >= nbytes and sys.getrefcount(kept) == 2:
            _local.room = kept
            return kept
    room = np.empty(nbytes, np.uint8)
    if nbytes <= _MOST_KEPT_BYTES:
        _local.room = room
    return room


@dataclass(frozen=True, slots=True)
class Header:
    """What stored bytes say of themselves.

    Args:
        magic: of the codec; its last byte is the version, as a digit.
        width: bytes of a word.
        moved: whether the sign was moved behind the exponent.
        nbytes: decoded bytes.
        base: digest of the base, or 0.
    """

    magic: bytes
    width: int
    moved: bool
    nbytes: int
    base: int = 0
    block_words: int = BLOCK_WORDS

    def pack(self) -> bytes:
        """The first `HEADER_BYTES` stored bytes."""
        return _HEADER.pack(self.magic, self.width, self.moved, 0, self.block_words, 0, self.nbytes, self.base)

    @classmethod
    def read(cls, codec: str, magic: bytes, stored: memoryview, nbytes: int, base: memoryview | None) -> Header:
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
        good = found == magic and width in WIDTHS and moved <= 1 and zero == zero2 == 0
        if not good or not 1 <= block_words <= BLOCK_WORDS:
            raise damaged(codec, "its header makes no sense")
        if raw != nbytes:
            raise damaged(codec, f"it holds {raw} bytes where {nbytes} belong")
        if base is not None and (base.nbytes != nbytes or base_digest(base) != digest):
            raise damaged(codec, "it was made against another base")
        return cls(found, width, bool(moved), raw, digest, block_words)


def base_digest(base: memoryview) -> int:
    """64 bits that tell bases apart: xxh3-64."""
    return xxhash.xxh3_64_intdigest(base)


class PlaneEncoder:
    """Writes a stream into memory that is large enough for the worst case.

    Args:
        header: of the stream.
        extra: bytes of the codec after the header.
    """

    def __init__(self, header: Header, extra: bytes = b"") -> None:
        self._header = header
        self._scratch = scratch()
        width = header.width
        blocks = header.nbytes // width // header.block_words + 1
        room = HEADER_BYTES + len(extra) + header.nbytes + (blocks + 2) * (12 * width + 16)
        self._out = _room(room)
        self._end = 0
        self._rest = [0] * width
        self._paid = [False] * width
        self.put(header.pack() + extra)
        self._pad()

    def put(self, data: bytes | memoryview) -> int:
        """Append bytes as they are; their number."""
        count = len(data)
        self._out[self._end : self._end + count] = np.frombuffer(data, np.uint8)
        self._end += count
        return count

    def _pad(self) -> None:
        # So that 16-bit planes lie where the processor wants them.
        end = -(-self._end // 8) * 8
        self._out[self._end : end] = 0
        self._end = end

    def encode(self, source: Source, tail: memoryview) -> memoryview:
        """All blocks and the tail; the stored bytes."""
        count = self._header.nbytes // self._header.width
        for start in range(0, count, self._header.block_words):
            self._block(source(start, min(count, start + self._header.block_words)))
        self.put(tail)
        return memoryview(self._out)[: self._end]  # type: ignore[arg-type]

    def _block(self, words: Words) -> None:
        width = self._header.width
        table_at = self._end
        self._end += 4 * width
        self._pad()
        table = [0] * width
        if width == 1:
            table[0] = self._plane(0, words)
        else:
            for number in range(width // 2):
                table[2 * number : 2 * number + 2] = self._lane(number, words)
        self._out[table_at : table_at + 4 * width] = np.frombuffer(struct.pack(f"<{width}I", *table), np.uint8)

    def _lane(self, number: int, words: Words) -> tuple[int, int]:
        top = number == self._header.width // 2 - 1
        moved = top and self._header.moved
        rest = self._rest
        for plane in (2 * number, 2 * number + 1):
            if rest[plane]:
                rest[plane] -= 1
            elif not self._paid[plane] and not self._worth_it(words, plane, moved):
                rest[plane] = _REST_BLOCKS
        if rest[2 * number] and rest[2 * number + 1]:
            nbytes = 2 * words.size
            copy_lane(words, number, self._out[self._end : self._end + nbytes].view(np.uint16), self._scratch)
            self._end += nbytes
            self._pad()
            return _PAIR << 28 | nbytes, _WITH_PREVIOUS << 28
        low, high = split_lane(lane_of(words, number, self._scratch), moved, self._scratch)
        return self._plane(2 * number, low), self._plane(2 * number + 1, high)

    def _worth_it(self, words: Words, plane: int, moved: bool) -> bool:
        """Whether a sample of a plane can be compressed."""
        size = words.size
        if size > _SAMPLE_RUNS * _SAMPLE_WORDS:
            starts = (i * (size - _SAMPLE_WORDS) // (_SAMPLE_RUNS - 1) for i in range(_SAMPLE_RUNS))
            words = np.concatenate([words[start : start + _SAMPLE_WORDS] for start in starts])
        sample = split_lane(lane_of(words, plane // 2, self._scratch), moved, self._scratch)[plane % 2]
        return bool(len(compress(memoryview(sample), _SETTINGS)) <= HOPELESS * sample.size)  # type: ignore[arg-type]

    def _plane(self, number: int, plane: Bytes) -> int:
        data: bytes | memoryview = memoryview(plane)  # type: ignore[arg-type]
        kind = _AS_IS
        if not self._rest[number]:
            if not plane.any():
                return _ZEROS << 28
            frame = compress(memoryview(plane), _SETTINGS)  # type: ignore[arg-type]
            self._paid[number] = len(frame) <= PAYS * plane.size
            if self._paid[number]:
                kind, data = _FRAME, frame
            else:
                self._rest[number] = _REST_BLOCKS
        nbytes = self.put(data)
        self._pad()
        return kind << 28 | nbytes


class PlaneDecoder:
    """Reads a stream block by block; every length is checked before it is used.

    Args:
        position: where the first block begins in `stored`.
    """

    def __init__(self, codec: str, header: Header, stored: memoryview, position: int = HEADER_BYTES) -> None:
        self._codec = codec
        self._header = header
        self._stored = np.frombuffer(stored, np.uint8)
        self._at = -(-position // 8) * 8
        self._scratch = scratch()

    def decode(self, sink: Sink, tail: memoryview) -> None:
        """All blocks through scratch memory to `sink`, then the tail; nothing may be left over."""
        for start, stop in self._blocks():
            words = self._scratch.words(self._header.width, 3, stop - start)
            self._block(words)
            sink(start, stop, words)
        self._finish(tail)

    def decode_into(self, out: Words, tail: memoryview) -> None:
        """All blocks into `out`, then the tail; nothing may be left over."""
        for start, stop in self._blocks():
            self._block(out[start:stop])
        self._finish(tail)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        count, most = self._header.nbytes // self._header.width, self._header.block_words
        return ((start, min(count, start + most)) for start in range(0, count, most))

    def _finish(self, tail: memoryview) -> None:
        last = self._take(tail.nbytes, "its tail")
        if self._at != self._stored.size:
            raise damaged(self._codec, f"{self._stored.size - self._at} bytes are left over")
        tail[:] = memoryview(last)  # type: ignore[arg-type]

    def _take(self, nbytes: int, what: str) -> Bytes:
        end = self._at + nbytes
        if end > self._stored.size:
            raise damaged(self._codec, f"{what} would end at byte {end} of {self._stored.size}")
        taken = self._stored[self._at : end]
        self._at = end
        return taken

    def _skip_padding(self) -> None:
        self._take(-self._at % 8, "padding")

    def _block(self, out: Words) -> None:
        width, count = self._header.width, out.size
        table = struct.unpack(f"<{width}I", self._take(4 * width, "a table of planes").tobytes())
        self._skip_padding()
        if width == 1:
            plane = self._plane(table[0], count)
            out[:] = 0 if plane is None else plane
            return
        words = self._scratch.words(width, 2, count)
        last = width // 2 - 1
        filled: Words | None = None
        for number in range(last + 1):
            lane = self._lane(number, table[2 * number], table[2 * number + 1], count, out if last == 0 else None)
            if lane is None:
                continue
            if filled is None and number == 0:
                filled = lane
                if last:
                    filled = words
                    np.copyto(words, lane)
                continue
            if filled is None:
                words.fill(0)
            target = out if number == last else words
            add_lane(words, number, lane, target, self._scratch)
            filled = target
        if filled is None:
            out.fill(0)
        elif filled is not out:
            np.copyto(out, filled)

    def _lane(self, number: int, low: int, high: int, count: int, out: Lane | None) -> Lane | None:
        """A lane: where it is stored, in `out`, or else in scratch; None if it is all zeros."""
        if low >> 28 == _PAIR:
            if low & 0xFFFFFFF != 2 * count or high != _WITH_PREVIOUS << 28:
                raise damaged(self._codec, "two planes stored together do not fit")
            pair = self._take(2 * count, "a plane").view(np.uint16)
            self._skip_padding()
            return pair
        low_plane = self._plane(low, count)
        high_plane = self._plane(high, count)
        if low_plane is None and high_plane is None:
            return None
        lane = self._scratch.lanes[0][:count] if out is None else out
        moved = self._header.moved and number == self._header.width // 2 - 1
        join_lane(low_plane, high_plane, moved, lane, self._scratch)
        return lane

    def _plane(self, entry: int, count: int) -> Bytes | None:
        kind, nbytes = entry >> 28, entry & 0xFFFFFFF
        if kind == _ZEROS and nbytes == 0:
            return None
        if kind not in (_AS_IS, _FRAME):
            raise damaged(self._codec, f"a plane of unknown kind {kind}")
        data = self._take(nbytes, "a plane")
        self._skip_padding()
        if kind == _FRAME:
            try:
                return np.frombuffer(decompress(memoryview(data), count), np.uint8)  # type: ignore[arg-type]
            except FrameError as err:
                raise damaged(self._codec, str(err)) from err
        if nbytes != count:
            raise damaged(self._codec, f"a plane of {nbytes} bytes where {count} belong")
        return data
