"""Laws of every codec: exact, and harmless whatever it is given to decode."""

from __future__ import annotations

import tracemalloc

import pytest

from ckpt_engine.errors import CorruptError, NewerFormatError
from ckpt_engine.store.codecs.codec import _CODECS, Chunk, Codec, get_codec
from ckpt_engine.testing import CodecContract

NAMES = sorted(_CODECS)


class TestCodecs(CodecContract):
    """Each codec of ours."""

    @pytest.fixture(params=NAMES)
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        codec = get_codec(request.param)
        assert codec.name == request.param
        return codec


def test_a_frame_that_claims_to_be_huge_allocates_nothing() -> None:
    """A zstd frame with a size of one exbibyte, or of 2 GB of zeros, is refused before memory is taken."""
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(200_000_000))
    liar = bytearray(bomb[:4] + b"\xe0" + (1 << 60).to_bytes(8, "little") + bomb[9:])
    tracemalloc.start()
    try:
        for stored in (bomb, bytes(liar)):
            with pytest.raises(CorruptError):
                get_codec("zstd").decode(memoryview(stored), memoryview(bytearray(1000)), None)
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
