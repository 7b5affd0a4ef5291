"""The codecs for bytes of any kind: unchanged (raw) or as one Zstandard frame (zstd)."""

from __future__ import annotations

from ckpt_engine.store.codecs.codec import Chunk, damaged
from ckpt_engine.store.codecs.zstd_frames import HOPELESS, PAYS, compress, decompress_into, sample


class RawCodec:
    """Stores bytes as they are."""

    name = "raw"
    needs_base = False

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> memoryview:  # noqa: ARG002
        """`data` itself, not a copy."""
        return data

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:  # noqa: ARG002
        """Copy."""
        if stored.nbytes != out.nbytes:
            raise damaged(self.name, f"{stored.nbytes} bytes stored where {out.nbytes} belong")
        out.cast("B")[:] = stored.cast("B")


_SETTINGS = {"compression_level": 1, "write_content_size": 1}


class ZstdCodec:
    """Stores a Zstandard frame that any tool reads. A few samples decide first whether it is worth trying."""

    name = "zstd"
    needs_base = False

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> bytes | None:  # noqa: ARG002
        """One frame of level 1, or None if it saves less than three in a hundred bytes."""
        data = data.cast("B")
        tried = sample(data)
        if len(compress(memoryview(tried), _SETTINGS)) > HOPELESS * len(tried):
            return None
        stored = compress(data, _SETTINGS)
        return stored if len(stored) <= PAYS * data.nbytes else None

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:  # noqa: ARG002
        """Decompress one frame of exactly the size of `out`."""
        decompress_into(self.name, stored, out.cast("B"))
