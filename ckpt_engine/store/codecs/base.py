"""The seam of codecs: what a codec knows, what it promises, and which ones there are by name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from ckpt_engine.errors import CorruptError, NewerFormatError
from ckpt_engine.store.codecs.group import GroupCodec


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a codec may know about the bytes it encodes.

    Args:
        dtype: torch dtype name without `torch.`, e.g. "bfloat16".
        shape: shape of the rows in this chunk; the first dimension counts rows.
        name: entry name, for telling classes of tensors apart; never needed for decoding.
    """

    dtype: str
    shape: tuple[int, ...]
    name: str = ""


class Codec(Protocol):
    """Encodes bytes without loss; what it stores describes itself, so that decoding needs nothing but the base.

    One object serves all threads at once. Buffers are contiguous bytes. Stored bytes are not digested again here: a
    damaged byte in a part that is stored as it is decodes to other bytes, which the digest of the piece tells.
    """

    @property
    def name(self) -> str:
        """What `Piece.codec` says; stable forever."""
        ...

    @property
    def needs_base(self) -> bool:
        """Whether `encode` and `decode` need the bytes of an older snapshot, as many as they have to do with."""
        ...

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> bytes | memoryview | None:
        """The bytes to store, or None where encoding does not pay: then the piece is to be stored raw."""
        ...

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:
        """Fill `out`, which has exactly the decoded size.

        Raises:
            CorruptError: `stored` is not what `encode` returned for this many bytes and this base.
            NewerFormatError: a later version of this codec wrote it.
        """
        ...


_CODECS = {
    "raw": ("raw", "RawCodec"),
    "zstd": ("zstd", "ZstdCodec"),
    "byteplane-zstd": ("byteplane", "BytePlaneCodec"),
    "delta-byteplane-zstd": ("delta", "DeltaCodec"),
    "rows": ("rows", "RowsCodec"),
}
"""Name → module and class. Modules are imported when asked for: most readers need none of them."""

_known: dict[str, Codec] = {}


def get_codec(name: str) -> Codec:
    """The codec that `Piece.codec` names.

    Raises:
        NewerFormatError: this version has no codec of that name.
    """
    codec = _known.get(name)
    if codec is None:
        if name not in _CODECS:
            raise NewerFormatError(
                f"a piece is encoded with {name!r}; this version knows {', '.join(_CODECS)}",
                hint="read it with the version of ckpt-engine that wrote it, or a later one",
            )
        module, attribute = _CODECS[name]
        found = importlib.import_module(f"ckpt_engine.store.codecs.{module}")
        codec = _known.setdefault(name, cast(Codec, getattr(found, attribute)()))
    return codec


def get_group_codec(name: str) -> GroupCodec:
    """The codec that `Piece.codec` names where the piece has a `Piece.group`.

    Raises:
        NewerFormatError: this version has no codec of that name.
    """
    if name != "adam":
        raise NewerFormatError(
            f"pieces are encoded together with {name!r}; this version knows adam",
            hint="read it with the version of ckpt-engine that wrote it, or a later one",
        )
    adam = importlib.import_module("ckpt_engine.store.codecs.adam")
    return cast(GroupCodec, adam.AdamCodec())


def damaged(codec: str, what: str) -> CorruptError:
    """The error of stored bytes that `codec` cannot have written."""
    return CorruptError(f"a piece encoded with {codec!r} is damaged: {what}")
