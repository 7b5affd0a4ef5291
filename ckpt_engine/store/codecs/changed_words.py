"""The form of a block in which few words differ from the base.

A step of an optimizer that is small beside the last places of numbers changes few words, and most of them by one. How
likely that is depends on the exponent, which is known from the base: exponents make classes.

```
head     classes (u8), zero (u8), escaped numbers (u16), bytes of the rests (u32)
class    least exponent (u8), k of its numbers (u8), changed words (u16); the greatest exponents come first
escaped  numbers that are too large, each as a word
rests    of each class those of its gaps, then, if its k is not 0, of its numbers: as many zeros, and a one
bits     of each class the k lowest bits of its gaps, then of its numbers (one bit if k is 0), the lowest bit first
```

Gaps are the unchanged words before each changed one, among the words of the class; in the first class, among all words.
Their k is one less than the bits of 9/10 of the words per changed word, and at most 15. Numbers are folded differences
less one. A rest is what is left above the k bits; a number whose rest is 16 is the next escaped one. The exponent is
bits 14 to 7 of the uppermost lane.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_engine.store.codecs.codec import damaged

Array = NDArray[Any]
Flags = NDArray[np.uint8]
_HEAD, _CLASS = struct.Struct("<BBHI"), struct.Struct("<BBH")
_MOST_SHARE = 0.25
"""Of changed words, and of the bytes of a block."""
_SHARES = (1 / 2, 2 / 3, 5 / 6)
"""Of the changed words, at which classes end. The first class has most words, and the others are cheap to find."""
_LEAST_WORDS = 64
"""With fewer changed words classes take more bytes than they spare. One word in `_EVERY` is looked at first."""
_MOST_K, _ESCAPED, _EVERY = 15, 16, 64


def encode_changed(folded: Array, base: Array) -> bytes | None:
    """The stored bytes of folded differences to `base`; None: planes are about as small, and quicker."""
    is_dense = np.count_nonzero(folded[::_EVERY]) > folded.size // (2 * _EVERY) + 1
    if is_dense or not 0 < np.count_nonzero(folded) <= _MOST_SHARE * folded.size:
        return None
    changed = folded != 0
    at = np.flatnonzero(changed)
    exponents, numbers = _exponents(base[at]), folded[at] - folded.dtype.type(1)
    reached = np.cumsum(np.bincount(exponents, minlength=256)[::-1])
    ends = [share * at.size for share in _SHARES if at.size >= _LEAST_WORDS]
    bounds = sorted({0, *(255 - np.searchsorted(reached, ends)).tolist()}, reverse=True)
    table, escaped, bits, rests = list[bytes](), [numbers[:0]], list[Flags](), list[Array]()
    for place, bound, above in zip(_places(base, bounds), bounds, (256, *bounds), strict=False):
        mine = np.flatnonzero((exponents >= bound) & (exponents < above))
        ranks = at[mine] if bound == bounds[0] else np.flatnonzero(changed[place])
        gaps, its = np.diff(ranks, prepend=-1) - 1, numbers[mine]
        gaps_k = _k_of_gaps(place, mine.size)
        k = min(int(0.35 * its.mean() + 1).bit_length(), _MOST_K) if its.max(initial=0) > 1 else 0
        table.append(_CLASS.pack(bound, k, mine.size))
        bits += [_low_bits(gaps, gaps_k), _low_bits(its, k or 1)]
        rests.append(gaps >> gaps_k)
        if k:
            rests.append(np.minimum(its >> folded.dtype.type(k), _ESCAPED).astype(np.int64))
            escaped.append(its[rests[-1] == _ESCAPED])
    rest, left = np.concatenate(rests), np.concatenate(escaped)
    unary = np.zeros(int(rest.sum()) + rest.size, np.uint8)
    unary[np.cumsum(rest + 1) - 1] = 1
    packed = [np.packbits(part).tobytes() for part in (unary, np.concatenate(bits))]
    found = b"".join((_HEAD.pack(len(table), 0, left.size, len(packed[0])), *table, left.tobytes(), *packed))
    return found if len(found) <= _MOST_SHARE * folded.nbytes else None


def decode_changed(codec: str, stored: Flags, base: Array, out: Array) -> None:
    """Fill `out` with the folded differences to `base`.

    Raises:
        CorruptError: `stored` has other lengths than it says, or changes words that are not there.
    """
    wrong = partial(damaged, codec, "the lengths of its changed words do not fit")
    if not _HEAD.size <= stored.size <= out.nbytes:
        raise wrong()
    classes, zero, escapes, rest_nbytes = _HEAD.unpack(stored[: _HEAD.size].tobytes())
    ends = np.cumsum([_HEAD.size, classes * _CLASS.size, escapes * out.itemsize, rest_nbytes])
    if zero or not 1 <= classes <= len(_SHARES) + 1 or ends[-1] > stored.size:
        raise wrong()
    _, table, left, unary, low = np.split(stored, ends)
    bounds, ks, counts = zip(*_CLASS.iter_unpack(table.tobytes()), strict=True)
    places = _places(base, bounds)
    runs = [
        run
        for place, k, count in zip(places, ks, counts, strict=True)
        for run in ((count, _k_of_gaps(place, count), count), (count, k or 1, count * (k > 0)))
    ]
    bits, ones = np.unpackbits(low), np.flatnonzero(np.unpackbits(unary).view(np.bool_))
    bit_ends, rest_ends = np.cumsum([(count * k, rests) for count, k, rests in runs], axis=0).T
    do_fit = 0 <= bits.size - bit_ends[-1] < 8 and ones.size == rest_ends[-1]
    if max(ks) > _MOST_K or sum(counts) > out.size or not do_fit:
        raise wrong()
    lows, rests = np.split(bits, bit_ends), np.split(np.diff(ones, prepend=-1) - 1, rest_ends)
    rests = [rest if rest.size else np.zeros(count, np.int64) for rest, (count, *_) in zip(rests, runs, strict=False)]
    found = [_numbers(low, n, k) | rest << k for low, rest, (n, k, _) in zip(lows, rests, runs, strict=False)]
    ranks = [np.cumsum(gaps + 1) - 1 for gaps in found[::2]]
    numbers, far = np.concatenate(found[1::2]), np.concatenate(rests[1::2]) == _ESCAPED
    is_outside = any(one.size and one[-1] >= place.size for one, place in zip(ranks, places, strict=True))
    if is_outside or np.count_nonzero(far) != escapes:
        raise wrong()
    numbers[far] = left.view(out.dtype)
    out.fill(0)
    out[np.concatenate([place[one] for one, place in zip(ranks, places, strict=True)])] = numbers + 1


def _exponents(base: Array) -> Array:
    return (base >> base.dtype.type(max(0, 8 * base.itemsize - 9))).astype(np.uint8)  # type: ignore[no-any-return]


def _places(base: Array, bounds: Sequence[int]) -> list[Array]:
    """The words of each class."""
    exponents = _exponents(base)
    low = np.flatnonzero(exponents < bounds[0])
    those = exponents[low]
    others = (low[np.flatnonzero((those >= least) & (those < above))] for above, least in pairwise(bounds))
    return [np.arange(base.size), *others]


def _k_of_gaps(place: Array, count: int) -> int:
    return min(_MOST_K, max(1, 9 * place.size // (10 * max(1, count))).bit_length() - 1)


def _low_bits(numbers: Array, k: int) -> Flags:
    return np.unpackbits(numbers.astype("<u2").view(np.uint8), bitorder="little").reshape(-1, 16)[:, :k].reshape(-1)


def _numbers(bits: Flags, count: int, k: int) -> Array:
    """Undo `_low_bits`."""
    low = np.zeros((count, 16), np.uint8)
    low[:, :k] = bits.reshape(count, k)
    return np.packbits(low, bitorder="little").view("<u2").astype(np.int64)
