"""The byteplane-zstd codec: numbers cut into byte planes, of which those that pay are compressed."""

from __future__ import annotations

from ckpt_engine.store.codecs.base import Chunk
from ckpt_engine.store.codecs.frames import PAYS
from ckpt_engine.store.codecs.planes import Header, PlaneDecoder, PlaneEncoder
from ckpt_engine.store.codecs.words import is_float, width_of, words_in

_MAGIC = b"CKB1"


class BytePlaneCodec:
    """Compresses exponents, which repeat, and leaves mantissas, which do not, as they are."""

    name = "byteplane-zstd"
    needs_base = False

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> memoryview | None:  # noqa: ARG002
        """A stream of planes (docs/codecs.md), or None if it saves less than three in a hundred bytes."""
        data = data.cast("B")
        words = words_in(data, width_of(chunk.dtype))
        header = Header(_MAGIC, words.itemsize, is_float(chunk.dtype), data.nbytes)
        stored = PlaneEncoder(header).encode(lambda start, stop: words[start:stop], data[words.nbytes :])
        return stored if stored.nbytes <= PAYS * data.nbytes else None

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:  # noqa: ARG002
        """Join the planes."""
        stored, out = stored.cast("B"), out.cast("B")
        header = Header.read(self.name, _MAGIC, stored, out.nbytes, None)
        words = words_in(out, header.width)
        PlaneDecoder(self.name, header, stored).decode_into(words, out[words.nbytes :])
