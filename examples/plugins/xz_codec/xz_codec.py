"""The codec `xz`: slow and small, for a tier that is an archive."""

from __future__ import annotations

import lzma

from ckpt_engine.store.codecs.codec import Chunk, damaged


class XzCodec:
    """`Codec` that stores one .xz stream without a check of its own: each piece has a digest."""

    name = "xz"
    needs_base = False

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> bytes | None:
        stored = lzma.compress(data, check=lzma.CHECK_NONE, preset=1)
        return stored if len(stored) < data.nbytes else None

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        try:
            data = decoder.decompress(stored, max_length=out.nbytes + 1)
        except lzma.LZMAError as err:
            raise damaged(self.name, str(err)) from err
        if len(data) != out.nbytes or not decoder.eof or decoder.unused_data:
            raise damaged(self.name, f"it is not {out.nbytes} bytes")
        out.cast("B")[:] = data
