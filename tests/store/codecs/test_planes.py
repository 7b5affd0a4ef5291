"""Byte planes and differences: what they save on numbers that look like a model's, and what they leave alone."""

from __future__ import annotations

import struct
import threading
import tracemalloc

import numpy as np
import pytest

from ckpt_engine.errors import CorruptError, NewerFormatError
from ckpt_engine.store.codecs.codec import Chunk, get_codec
from ckpt_engine.store.codecs.planes import HEADER_BYTES
from tests.store.codecs.samples import bf16, weights

PLANES = get_codec("byteplane-zstd")
DELTA = get_codec("delta-byteplane-zstd")


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _back(name: str, stored: bytes | memoryview, nbytes: int, base: memoryview | None = None) -> bytes:
    out = bytearray(nbytes)
    get_codec(name).decode(memoryview(stored), memoryview(out), base)
    return bytes(out)


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 1.45), ("float32", 1.18)])
def test_exponents_are_compressed(dtype: str, ratio: float) -> None:
    """Normally distributed weights reach what the entropy of their exponents allows."""
    values = weights(300_000)
    data = _bytes(bf16(values) if dtype == "bfloat16" else values)
    stored = PLANES.encode(data, Chunk(dtype, (300_000,)), None)
    assert stored is not None and data.nbytes / len(stored) > ratio
    assert _back("byteplane-zstd", stored, data.nbytes) == bytes(data)


def test_float32_that_was_bfloat16_takes_less_than_half() -> None:
    """Planes of zeros take no room: weights that came from bfloat16 lose their empty halves."""
    data = _bytes(bf16(weights(300_000)).astype(np.uint32) << np.uint32(16))
    stored = PLANES.encode(data, Chunk("float32", (300_000,)), None)
    assert stored is not None and len(stored) < 0.36 * data.nbytes
    assert _back("byteplane-zstd", stored, data.nbytes) == bytes(data)


def test_noise_is_left_alone() -> None:
    """Random words are to be stored raw."""
    data = memoryview(np.random.default_rng(0).bytes(1 << 20))
    for dtype in ("float32", "bfloat16", "int64", "uint8"):
        assert PLANES.encode(data, Chunk(dtype, (1,)), None) is None


def test_a_compressible_part_after_noise_is_found() -> None:
    """A plane that did not pay is tried again a few blocks later."""
    noise = np.random.default_rng(0).integers(0, 2**32, 1 << 18, dtype=np.uint32)
    data = _bytes(np.concatenate([noise, np.zeros(1 << 22, np.uint32)]))
    stored = PLANES.encode(data, Chunk("float32", (data.nbytes // 4,)), None)
    assert stored is not None and len(stored) < 0.4 * data.nbytes
    assert _back("byteplane-zstd", stored, data.nbytes) == bytes(data)


def test_small_changes_become_small_differences() -> None:
    """Weights that moved by a few last bits take a fraction of them; moves across a power of two do as well."""
    old = weights(300_000)
    moved = old.view(np.int32) + np.random.default_rng(1).integers(-100, 100, old.size, dtype=np.int32)
    data, base = _bytes(moved.astype(np.int32)), _bytes(old)
    stored = DELTA.encode(data, Chunk("float32", (old.size,)), base)
    assert stored is not None and len(stored) < 0.27 * data.nbytes
    assert _back("delta-byteplane-zstd", stored, data.nbytes, base) == bytes(data)


def test_an_unchanged_tensor_takes_next_to_nothing() -> None:
    """A difference of zeros is stored as tables only."""
    data = _bytes(weights(1 << 20))
    stored = DELTA.encode(data, Chunk("float32", (1 << 20,)), data)
    assert stored is not None and len(stored) < 500


def test_another_base_is_an_error() -> None:
    """A difference knows the digest of its base: another one, none, or a shorter one is a CorruptError."""
    data = _bytes(weights(1000))
    base = _bytes(weights(1000) * np.float32(1.001))
    stored = DELTA.encode(data, Chunk("float32", (1000,)), base)
    assert stored is not None
    for wrong in (data, None, base[:-4]):
        with pytest.raises(CorruptError):
            _back("delta-byteplane-zstd", stored, data.nbytes, wrong)


@pytest.mark.parametrize("base", [None, memoryview(b""), memoryview(bytes(8))])
def test_without_a_base_of_the_same_size_there_is_no_difference(base: memoryview | None) -> None:
    """Tensors that are new or have grown are encoded without a base."""
    for name in ("delta-byteplane-zstd", "rows"):
        assert get_codec(name).encode(memoryview(bytes(4000)), Chunk("float32", (10, 100)), base) is None


def test_buffers_at_odd_addresses_work() -> None:
    """A stored piece lies at any offset of a file, and so may the memory it is decoded to."""
    data = _bytes(weights(10_000))
    shifted = memoryview(bytearray(b"x" + bytes(data)))[1:]
    stored = PLANES.encode(shifted, Chunk("float32", (10_000,)), None)
    assert stored is not None
    room, odd = bytearray(data.nbytes + 1), memoryview(b"xyz" + bytes(stored))[3:]
    PLANES.decode(odd, memoryview(room)[1:], None)
    assert room[1:] == data


def test_headers_that_claim_too_much_allocate_nothing() -> None:
    """Sizes of exabytes, blocks of billions of words and unknown widths are refused before memory is taken."""
    data = _bytes(weights(5000))
    stored = bytes(PLANES.encode(data, Chunk("float32", (5000,)), None) or b"")
    tracemalloc.start()
    try:
        for at, kind, value in [(16, "<Q", 1 << 60), (8, "<I", 0xFFFFFFFF), (8, "<I", 0), (4, "<B", 16), (4, "<B", 3)]:
            bad = bytearray(stored)
            struct.pack_into(kind, bad, at, value)
            with pytest.raises(CorruptError):
                _back("byteplane-zstd", bad, data.nbytes)
        for entry in range(4):
            bad = bytearray(stored)
            struct.pack_into("<I", bad, HEADER_BYTES + 4 * entry, 0x1FFFFFFF)
            with pytest.raises(CorruptError):
                _back("byteplane-zstd", bad, data.nbytes)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_later_version_is_distinguished_from_damage() -> None:
    """The last byte of the magic counts versions."""
    data = _bytes(weights(5000))
    stored = bytearray(PLANES.encode(data, Chunk("float32", (5000,)), None) or b"")
    stored[3] += 1
    with pytest.raises(NewerFormatError):
        _back("byteplane-zstd", stored, data.nbytes)
    stored[:4] = b"PNG1"
    with pytest.raises(CorruptError):
        _back("byteplane-zstd", stored, data.nbytes)


def test_stored_bytes_that_are_kept_do_not_change() -> None:
    """The codec uses its memory for the next piece only when no view of the last piece, or of a part of it, is left."""
    first, second = (_bytes(weights(100_000, seed)) for seed in (1, 2))
    kept = PLANES.encode(first, Chunk("float32", (100_000,)), None)
    assert kept is not None
    nbytes, part, before = len(kept), memoryview(kept)[100:2000], bytes(kept)
    del kept
    assert PLANES.encode(second, Chunk("float32", (100_000,)), None) is not None
    assert part == before[100:2000] and len(before) == nbytes


def test_threads_share_a_codec() -> None:
    """Four threads encode and decode different tensors with one object at once."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        data, base = _bytes(weights(150_000, seed)), _bytes(weights(150_000, seed) * np.float32(1.0001))
        for _ in range(5):
            for name, old in (("byteplane-zstd", None), ("delta-byteplane-zstd", base)):
                stored = get_codec(name).encode(data, Chunk("float32", (150_000,)), old)
                if stored is None or _back(name, stored, data.nbytes, old) != bytes(data):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads) and not wrong
