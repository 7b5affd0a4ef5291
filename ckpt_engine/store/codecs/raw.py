"""The raw codec: stored bytes are the bytes themselves."""

from __future__ import annotations

from ckpt_engine.store.codecs.base import Chunk, damaged


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
