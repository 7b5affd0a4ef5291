"""The codec for bytes of any kind: one Zstandard frame."""

from __future__ import annotations

from ckpt_engine.store.codecs.codec import Chunk
from ckpt_engine.store.codecs.zstd_frames import HOPELESS, PAYS, Compressor, decompress_into, sample

_COMPRESSOR = Compressor(compression_level=1)


class ZstdCodec:
    """Stores a Zstandard frame that any tool reads. A few samples decide first whether it is worth trying."""

    name = "zstd"
    needs_base = False

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> bytes | None:  # noqa: ARG002
        """One frame of level 1, or None if it saves less than three in a hundred bytes."""
        tried = sample(data)
        if len(_COMPRESSOR.compress(memoryview(tried))) > HOPELESS * len(tried):
            return None
        stored = _COMPRESSOR.compress(data)
        return stored if len(stored) <= PAYS * data.nbytes else None

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:  # noqa: ARG002
        """Decompress one frame of exactly the size of `out`."""
        decompress_into(self.name, stored, out)
