"""Numbers as words of bits, and words as byte planes: which width a dtype has, cutting and joining.

Words are little endian. A word is cut into lanes of 16 bits and each lane into two planes of bytes. In the uppermost
lane of a floating-point number the sign is moved first: bits 14 to 7 become the upper byte, and bit 15 and bits 6 to 0
the lower one. Of bfloat16 and float32 numbers one plane is then exactly the exponent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]
Bytes = NDArray[np.uint8]
Lane = NDArray[np.uint16]

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


class Scratch:
    """Reused arrays of one block; one object per thread."""

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


def lane_of(words: Words, number: int, scratch: Scratch) -> Lane:
    """Bits `16 * number` and up of every word: a view where words are 16 bits wide, else in scratch."""
    width = words.itemsize
    if width == 2:
        return words
    lane = scratch.lanes[0][: words.size]
    copy_lane(words, number, lane, scratch)
    return lane


def copy_lane(words: Words, number: int, lane: Lane, scratch: Scratch) -> None:
    """As `lane_of`, into `lane`."""
    if number == 0:
        np.copyto(lane, words, casting="unsafe")
    else:
        shifted = scratch.words(words.itemsize, 0, words.size)
        np.right_shift(words, words.dtype.type(16 * number), out=shifted)
        np.copyto(lane, shifted, casting="unsafe")


def split_lane(lane: Lane, moved: bool, scratch: Scratch) -> tuple[Bytes, Bytes]:
    """The lower and the upper byte of each number of a lane, in scratch.

    Args:
        moved: whether the sign is moved behind the exponent first.
    """
    low, high = (plane[: lane.size] for plane in scratch.planes)
    first, second = scratch.lanes[1][: lane.size], scratch.words(2, 1, lane.size)
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


def join_lane(low: Bytes | None, high: Bytes | None, moved: bool, lane: Lane, scratch: Scratch) -> None:
    """Undo `split_lane` into `lane`; a plane that is None is all zeros."""
    upper, lower = scratch.lanes[1][: lane.size], scratch.words(2, 1, lane.size)
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


def add_lane(words: Words, number: int, lane: Lane, out: Words, scratch: Scratch) -> None:
    """Set bits `16 * number` and up, which are zero in `words`, and put the result into `out`."""
    other = scratch.words(words.itemsize, 1, words.size)
    np.copyto(other, lane)
    np.left_shift(other, words.dtype.type(16 * number), out=other)
    np.bitwise_or(words, other, out=out)
