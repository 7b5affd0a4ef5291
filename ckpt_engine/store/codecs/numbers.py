"""The codecs that store numbers as byte planes.

One stores the numbers themselves, the other one their differences to an older snapshot.
"""

from __future__ import annotations

import numpy as np

from ckpt_engine.store.codecs.codec import Chunk, damaged
from ckpt_engine.store.codecs.planes import (
    SCRATCH,
    PlaneDecoder,
    PlaneEncoder,
    PlanesHeader,
    Words,
    base_digest,
    is_float,
    width_of,
    words_in,
)
from ckpt_engine.store.codecs.zstd_frames import PAYS

_MAGIC = b"CKB1"
_DELTA_MAGIC = b"CKD2"


class BytePlaneCodec:
    """Compresses exponents, which repeat, and leaves mantissas, which do not, as they are."""

    name = "byteplane-zstd"
    needs_base = False

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> memoryview | None:  # noqa: ARG002
        """A stream of planes (docs/codecs.md), or None if it saves less than three in a hundred bytes."""
        words = words_in(data, width_of(chunk.dtype))
        header = PlanesHeader(_MAGIC, words.itemsize, is_float(chunk.dtype), data.nbytes)
        stored = PlaneEncoder(header).encode(lambda start, stop: words[start:stop], data[words.nbytes :])
        return stored if stored.nbytes <= PAYS * data.nbytes else None

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:  # noqa: ARG002
        """Join the planes."""
        header = PlanesHeader.read(self.name, _MAGIC, stored, out.nbytes, None)
        words = words_in(out, header.width)
        PlaneDecoder(self.name, header, stored).decode(out[words.nbytes :], out=words)


class DeltaCodec:
    """Subtracts the bits of the base, read as integers: what changed little becomes small numbers.

    Subtraction beats exclusive or, which turns a carry into a run of ones.
    """

    name = "delta-byteplane-zstd"
    needs_base = True

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> memoryview | None:
        """A stream of planes, or None if it saves too little, or `base` is absent or of another size."""
        if base is None or base.nbytes != data.nbytes:
            return None
        width = width_of(chunk.dtype)
        words, old = words_in(data, width), words_in(base, width)

        def differences(start: int, stop: int) -> Words:
            return fold_difference(words[start:stop], old[start:stop])

        header = PlanesHeader(b"CKD1", width, False, data.nbytes, base_digest(base))
        stored = PlaneEncoder(header).encode(differences, data[words.nbytes :], old)
        return stored if stored.nbytes <= PAYS * data.nbytes else None

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:
        """Add the differences to the base."""
        if base is None:
            raise damaged(self.name, "the bytes it was made against are missing")
        header = PlanesHeader.read(self.name, _DELTA_MAGIC, stored, out.nbytes, base)
        words, old = words_in(out, header.width), words_in(base, header.width)

        def put(start: int, stop: int, folded: Words) -> None:
            unfold_difference(folded, old[start:stop], words[start:stop])

        PlaneDecoder(self.name, header, stored, base=old).decode(out[words.nbytes :], put)


def fold_difference(new: Words, old: Words) -> Words:
    """`new - old` modulo the word size, folded so that small differences of either sign are small: 0, -1, 1, -2, ..."""
    width = new.itemsize
    difference, sign = SCRATCH.words(width, 3, new.size), SCRATCH.words(width, 1, new.size)
    np.subtract(new, old, out=difference)
    signed = f"<i{width}"
    np.right_shift(difference.view(signed), np.dtype(signed).type(8 * width - 1), out=sign.view(signed))
    np.left_shift(difference, new.dtype.type(1), out=difference)
    np.bitwise_xor(difference, sign, out=difference)
    return difference


def unfold_difference(folded: Words, old: Words, out: Words) -> None:
    """Undo `fold_difference`; overwrites `folded`."""
    sign = SCRATCH.words(folded.itemsize, 1, folded.size)
    one = folded.dtype.type(1)
    np.bitwise_and(folded, one, out=sign)
    np.negative(sign, out=sign)
    np.right_shift(folded, one, out=folded)
    np.bitwise_xor(folded, sign, out=folded)
    np.add(folded, old, out=out)
