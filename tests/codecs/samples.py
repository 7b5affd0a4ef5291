"""Bytes to encode: the awkward ones, and ones that look like training state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from ckpt_engine.store.codecs.codec import Chunk

WIDTHS = {
    "bool": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int32": 4,
    "complex64": 8,
    "float64": 8,
    "int64": 8,
    "complex128": 16,
}
UNKNOWN = "quaternion512"


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes with what a codec is told of them, and the bytes they grew out of."""

    data: bytes
    base: bytes
    chunk: Chunk


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Any dtype, any length (0, 1, odd ones), any bits (NaN payloads), any likeness of data and base."""
    dtype = draw(st.sampled_from([*WIDTHS, UNKNOWN]))
    nbytes = draw(
        st.one_of(st.integers(0, 40), st.integers(0, 40), st.integers(41, 3000), st.sampled_from([9_999, 300_001]))
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = _kind(draw(st.sampled_from(["random", "normal", "zero", "few"])), nbytes, rng)
    data = base.copy()
    change = draw(st.sampled_from(["none", "one", "some", "small", "all"]))
    if change == "one" and nbytes:
        data[rng.integers(nbytes)] ^= 1 + rng.integers(255)
    elif change == "some" and nbytes:
        data[rng.integers(0, nbytes, size=1 + nbytes // 50)] ^= 0xA5
    elif change == "small":
        data[::4] += rng.integers(0, 3, size=data[::4].size).astype(np.uint8)
    elif change == "all":
        data = _kind("random", nbytes, rng)
    width = WIDTHS.get(dtype, 1)
    columns = draw(st.sampled_from([1, 3, 16]))
    rows = nbytes // (width * columns)
    return Sample(data.tobytes(), base.tobytes(), Chunk(dtype, (rows, columns), "weight"))


def _kind(kind: str, nbytes: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "normal":
        values = (rng.standard_normal(nbytes // 4 + 1) * 0.02).astype(np.float32)
        return values.view(np.uint8)[:nbytes].copy()
    if kind == "few":
        return rng.integers(0, 3, size=nbytes).astype(np.uint8)
    if kind == "zero":
        return np.zeros(nbytes, np.uint8)
    return rng.integers(0, 256, size=nbytes, dtype=np.uint8)


def weights(count: int, seed: int = 0) -> np.ndarray:
    """Float32 numbers as spread as weights are."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 0.02).astype(np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers: bfloat16, cut and not rounded."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
