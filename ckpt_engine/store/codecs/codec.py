"""The seam of codecs: what each of them promises."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from ckpt_engine.errors import ConfigError, CorruptError, NewerFormatError
from ckpt_engine.plugins import CODECS, plugin

if TYPE_CHECKING:
    from ckpt_engine.store.codecs.adam import AdamCodec

_CODECS = {
    "zstd": "simple:ZstdCodec",
    "byteplane-zstd": "numbers:BytePlaneCodec",
    "delta-byteplane-zstd": "numbers:DeltaCodec",
    "rows": "table_rows:RowsCodec",
}
"""Name → module and class. Modules are imported when asked for: most readers need none of them."""
_known: dict[str, Codec] = {}
Stored = bytes | memoryview


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

    One object serves all threads at once. Buffers are contiguous, and bytes are their elements. Stored bytes are not
    digested again here: a damaged byte in a part that is stored as it is decodes to other bytes, which the digest of
    the piece tells.
    """

    @property
    def name(self) -> str:
        """What `Piece.codec` says; stable forever."""

    @property
    def needs_base(self) -> bool:
        """Whether `encode` and `decode` need the bytes of an older snapshot, as many as they have to do with."""

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> bytes | memoryview | None:
        """The bytes to store, or None where encoding does not pay: then the piece is to be stored raw."""

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:
        """Fill `out`, which has exactly the decoded size.

        Raises:
            CorruptError: `stored` is not what `encode` returned for this many bytes and this base.
            NewerFormatError: a later version of this codec wrote it.
        """


def get_codec(name: str) -> Codec:
    """The codec that `Piece.codec` names, also one that an installed package registers in `ckpt_engine.codecs`.

    Raises:
        NewerFormatError: neither this version nor a package has a codec of that name, or the package is not as it
            should be.
    """
    codec = _known.get(name)
    if codec is None:
        codec = _known.setdefault(name, _of_ours(name) if name in _CODECS else _of_a_package(name))
    return codec


def _of_ours(name: str) -> Codec:
    return cast(Codec, pkgutil.resolve_name(f"ckpt_engine.store.codecs.{_CODECS[name]}")())


def _of_a_package(name: str) -> Codec:
    hint = "install the package that has this codec, or the version of ckpt-engine that wrote it"
    try:
        made = plugin(CODECS, name)
        codec = made and made()
    except Exception as err:  # whatever the class of a package raises
        text, hint = (err.message, err.hint or hint) if isinstance(err, ConfigError) else (repr(err), hint)
        raise NewerFormatError(f"a piece is encoded with {name!r:.80}: {text}", hint=hint) from err
    if codec is None or codec.name != name:
        raise NewerFormatError(
            f"a piece is encoded with {name!r:.80}; this version knows {', '.join(_CODECS)}", hint=hint
        )
    return cast(Codec, codec)


def get_group_codec(name: str) -> AdamCodec:
    """The codec that `Piece.codec` names where the piece has a `Piece.group`.

    Raises:
        NewerFormatError: this version has no codec of that name.
    """
    if name != "adam":
        raise NewerFormatError(
            f"pieces are encoded together with {name!r:.80}; this version knows adam",
            hint="read it with the version of ckpt-engine that wrote it, or a later one",
        )
    from ckpt_engine.store.codecs.adam import AdamCodec  # most readers need it not

    return AdamCodec()


def damaged(codec: str, what: str) -> CorruptError:
    """The error of stored bytes that `codec` cannot have written."""
    return CorruptError(f"a piece encoded with {codec!r} is damaged: {what}")


def codec_on_slow_link(dtype: str) -> str:
    """The codec of tensors of a dtype where the link is slower than encoding."""
    return "byteplane-zstd" if "float" in dtype or "complex" in dtype else "zstd"
