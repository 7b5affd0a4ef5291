"""Blocks in which few words have changed: small, exact, and harmless whatever is decoded."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from ckpt_engine.errors import CkptError, CorruptError, NewerFormatError
from ckpt_engine.store.codecs.codec import Chunk, get_codec
from ckpt_engine.store.codecs.planes import HEADER_BYTES, PlanesHeader
from tests.store.codecs.samples import bf16, weights

DELTA = get_codec("delta-byteplane-zstd")
BLOCK_AT = HEADER_BYTES + 8
"""Where the first block of 16-bit words begins, behind its table."""


def stepped(count: int, lr: float = 3e-6, seed: int = 1) -> tuple[memoryview, memoryview]:
    """bfloat16 weights before and after a step of Adam, which moves most float32 weights by less than the rate."""
    old, rng = weights(count), np.random.default_rng(seed)
    new = old + np.float32(lr) * rng.normal(0, 0.4, count).astype(np.float32)
    rounded = [(array.view(np.uint32) + np.uint32(0x8000)).view(np.float32) for array in (old, new)]
    before, after = (memoryview(bf16(array).view(np.uint8)) for array in rounded)
    return before, after


def encoded(base: memoryview, data: memoryview, dtype: str = "bfloat16") -> bytes:
    stored = DELTA.encode(data, Chunk(dtype, (data.nbytes // 2,)), base)
    assert stored is not None
    return bytes(stored)


def decoded(stored: bytes | bytearray, base: memoryview) -> bytes:
    out = bytearray(base.nbytes)
    DELTA.decode(memoryview(stored), memoryview(out), base)
    return bytes(out)


def test_a_small_step_of_bfloat16_takes_a_fortieth() -> None:
    """One word in forty changes: the exponents tell which ones are likely."""
    base, data = stepped(1 << 18)
    stored = encoded(base, data)
    assert data.nbytes / len(stored) > 45
    assert decoded(stored, base) == data


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float16", "float32", "float64", "int64"])
@pytest.mark.parametrize("share", [1e-4, 0.01, 0.2])
def test_any_change_of_few_words_comes_back(dtype: str, share: float) -> None:
    """Random bits at random places, as far from the base as can be, in words of any width."""
    width, rng = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}.get(dtype, 8), np.random.default_rng(3)
    old = rng.integers(0, 256, (150_001, width), np.uint8)
    new = old.copy()
    where = rng.random(len(old)) < share
    new[where] = rng.integers(0, 256, (int(where.sum()), width), np.uint8)
    base, data = (memoryview(array.reshape(-1)) for array in (old, new))
    assert decoded(encoded(base, data, dtype), base) == data


def test_the_version_says_whether_a_reader_needs_this_form() -> None:
    """An older reader refuses such a piece by name, and still reads all others."""
    base, data = stepped(1 << 12)
    stored = encoded(base, data)
    assert stored[:4] == b"CKD2"
    with pytest.raises(NewerFormatError, match="later version of 'delta-byteplane-zstd'"):
        PlanesHeader.read(DELTA.name, b"CKD1", memoryview(stored), data.nbytes, base)
    far = stepped(1 << 12, lr=1e-3)[1]
    assert encoded(base, far)[:4] == b"CKD1" and decoded(encoded(base, far), base) == far


@pytest.mark.long
def test_damage_ends_in_an_error_or_in_other_bits() -> None:
    """Thousands of flipped bytes, most of them in the tables; memory stays within a few times that of the block."""
    base, data = stepped(1 << 14)
    stored, rng = encoded(base, data), np.random.default_rng(7)
    tracemalloc.start()
    try:
        for _ in range(2000):
            bad = bytearray(stored)
            for at in rng.integers(BLOCK_AT - 8, rng.choice([BLOCK_AT + 32, len(bad)]), rng.integers(1, 4)):
                bad[at] = rng.integers(0, 256)
            try:
                decoded(bad, base)
            except CkptError as err:
                assert isinstance(err, CorruptError)
        assert tracemalloc.get_traced_memory()[1] < 64 * data.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("at", "form", "values"),
    [
        (0, "<B", (0, 255)),
        (1, "<B", (1,)),
        (2, "<H", (65535,)),
        (4, "<I", (0, 1 << 31)),
        (9, "<B", (16,)),
        (10, "<H", (0, 65535)),
    ],
)
def test_lengths_that_do_not_fit_are_refused(at: int, form: str, values: tuple[int, ...]) -> None:
    """The table is compared with the lengths of what follows it before anything is used."""
    base, data = stepped(1 << 14)
    for value in values:
        bad = bytearray(encoded(base, data))
        struct.pack_into(form, bad, BLOCK_AT + at, value)
        with pytest.raises(CorruptError, match="delta-byteplane-zstd"):
            decoded(bad, base)
