"""Laws of every codec: exact, and harmless whatever it is given to decode."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.errors import CkptError, CorruptError, NewerFormatError
from ckpt_engine.store.codecs.codec import _CODECS, Chunk, Codec, get_codec
from tests.codecs.samples import Sample, samples

NAMES = sorted(_CODECS)
FENCE = b"\xa5" * 64


def _decode(codec: Codec, stored: bytes, nbytes: int, base: bytes | None) -> bytes:
    """Decode in the middle of a larger buffer and see that nothing around it was written."""
    room = bytearray(FENCE + bytes(nbytes) + FENCE)
    try:
        codec.decode(memoryview(stored), memoryview(room)[64 : 64 + nbytes], None if base is None else memoryview(base))
    finally:
        assert room[:64] == FENCE and room[-64:] == FENCE
    return bytes(room[64 : 64 + nbytes])


def _encode(codec: Codec, sample: Sample) -> bytes | None:
    base = memoryview(sample.base) if codec.needs_base else None
    stored = codec.encode(memoryview(sample.data), sample.chunk, base)
    return None if stored is None else bytes(stored)


@pytest.mark.parametrize("name", NAMES)
@given(sample=samples())
@settings(max_examples=25, deadline=None)
def test_decoding_gives_back_every_bit(name: str, sample: Sample) -> None:
    """Whatever is encoded decodes to the same bytes, and takes less room than them."""
    codec = get_codec(name)
    assert codec.name == name
    stored = _encode(codec, sample)
    if stored is None:
        return
    if name != "raw":
        assert len(stored) < len(sample.data)
    base = sample.base if codec.needs_base else None
    assert _decode(codec, stored, len(sample.data), base) == sample.data


@pytest.mark.parametrize("name", NAMES)
@given(sample=samples(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_damaged_bytes_raise_an_error_of_the_tree_or_decode_to_something(
    name: str, sample: Sample, data: st.DataObject
) -> None:
    """Flipped, cut and lengthened bytes never crash and never write outside; lengths that do not fit are seen."""
    codec = get_codec(name)
    stored = _encode(codec, sample)
    if not stored:
        return
    base = sample.base if codec.needs_base else None
    damaged = bytearray(stored)
    # Headers are where damage hurts: half of the flips go there.
    reach = data.draw(st.sampled_from([min(64, len(stored)), len(stored)]))
    for position in data.draw(st.lists(st.integers(0, reach - 1), min_size=1, max_size=4)):
        damaged[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError):
        _decode(codec, stored + b"\0", len(sample.data), base)
    for bad in (bytes(damaged), stored[: data.draw(st.integers(0, len(stored) - 1))]):
        try:
            _decode(codec, bad, len(sample.data), base)
        except CkptError as err:
            assert isinstance(err, CorruptError | NewerFormatError)
    for nbytes in {0, 1, len(sample.data) - 1, len(sample.data) + 1, 2 * len(sample.data)} - {len(sample.data)}:
        with pytest.raises(CorruptError):
            _decode(codec, stored, nbytes, base)


@pytest.mark.parametrize("name", NAMES)
@given(stored=st.binary(max_size=200), nbytes=st.integers(0, 300))
@settings(max_examples=25, deadline=None)
def test_foreign_bytes_raise_an_error_of_the_tree(name: str, stored: bytes, nbytes: int) -> None:
    """Any bytes at all either decode or raise CorruptError or NewerFormatError."""
    codec = get_codec(name)
    try:
        _decode(codec, stored, nbytes, bytes(nbytes) if codec.needs_base else None)
    except (CorruptError, NewerFormatError):
        return
    assert name == "raw" or nbytes == 0 or stored


def test_a_frame_that_claims_to_be_huge_allocates_nothing() -> None:
    """A zstd frame with a size of one exbibyte, or of 2 GB of zeros, is refused before memory is taken."""
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(200_000_000))
    liar = bytearray(bomb[:4] + b"\xe0" + (1 << 60).to_bytes(8, "little") + bomb[9:])
    tracemalloc.start()
    try:
        for stored in (bomb, bytes(liar)):
            with pytest.raises(CorruptError):
                _decode(get_codec("zstd"), stored, 1000, None)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_incompressible_and_empty_bytes_do_not_pay() -> None:
    """Random bytes and no bytes at all are to be stored raw."""
    import random

    noise = random.Random(1).randbytes(100_000)
    for data in (noise, b"", b"x"):
        assert get_codec("zstd").encode(memoryview(data), Chunk("uint8", (len(data),)), None) is None


def test_an_unknown_codec_is_of_a_newer_version() -> None:
    """A name that this version does not know is refused with what to do."""
    with pytest.raises(NewerFormatError, match="wrote it"):
        get_codec("wavelet")
