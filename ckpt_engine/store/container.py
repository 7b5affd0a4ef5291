"""The data file of a snapshot, with the digests of its bytes.

A file is an 8-byte little-endian length, that many bytes of JSON padded with spaces, then the arrays back to back in
the order of the header (https://github.com/huggingface/safetensors, "Format"). Our padding makes the arrays start at a
page, so that the file can be written and read around the page cache.

Digests have 128 bits: they are against damage and not against forgery. xxh3-128 (Yann Collet, xxHash 0.8) runs at
memory speed, so that every byte can be checked at every restore.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import xxhash

from ckpt_engine.errors import CorruptError, ForeignError
from ckpt_engine.store.json_checks import are_sizes, is_shape, reading, require

T = TypeVar("T")

ALGORITHM = "xxh3-128"
PIECE_BYTES = 16 << 20
"""Bytes covered by one digest: small enough to locate damage and to hash pieces on several threads."""
ALIGN_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
"""Readers refuse larger headers."""
DTYPES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "bool": ("BOOL", 1),
        "uint8": ("U8", 1),
        "int8": ("I8", 1),
        "float8_e4m3fn": ("F8_E4M3", 1),
        "float8_e5m2": ("F8_E5M2", 1),
        "uint16": ("U16", 2),
        "int16": ("I16", 2),
        "float16": ("F16", 2),
        "bfloat16": ("BF16", 2),
        "uint32": ("U32", 4),
        "int32": ("I32", 4),
        "float32": ("F32", 4),
        "uint64": ("U64", 8),
        "int64": ("I64", 8),
        "float64": ("F64", 8),
        "complex64": ("C64", 8),
    }
)
"""torch dtype name → (container code, bytes per element). Any other dtype is stored as its bytes, `U8`.

Codes that only the newest readers know are left out: one unknown code makes the whole file unreadable to them.
"""
_ITEM_BYTES = dict(DTYPES.values())
_OTHER_BYTES = {"complex128": 16, "complex32": 4, "bcomplex32": 4, "bits16": 2, "qint32": 4}
_BYTES = re.compile(r"u?int[1-7]|bits8|bits1x8|bits2x4|bits4x2|quint4x2|quint2x4|quint8|qint8|float[48]_[a-z0-9_]+")
_SEAL = "header"
_NO_DIGEST = f"{ALGORITHM}:{'0' * 32}"
_SEALED = re.compile(
    rb'(?s:.{8})\{"__metadata__":\{"format":"pt","header":"(' + ALGORITHM.encode() + rb':[0-9a-f]{32})"\}'
)


def digest(data: bytes | bytearray | memoryview) -> str:
    """`"xxh3-128:<32 hex>"` of contiguous bytes; releases the GIL while it runs."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


@lru_cache(256)
def item_bytes(dtype: str) -> int | None:
    """Bytes per element of a torch dtype; None: it is not known here."""
    known = DTYPES.get(dtype)
    if known is not None:
        return known[1]
    return 1 if _BYTES.fullmatch(dtype) else _OTHER_BYTES.get(dtype)


@dataclass(frozen=True, slots=True)
class ContainerEntry:
    """An array of a container: `start` and `end` are absolute byte offsets in the file."""

    name: str
    container_dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: the arrays in file order, and where the first one starts."""

    entries: tuple[ContainerEntry, ...]
    metadata: Mapping[str, str]
    data_start: int

    @property
    def nbytes(self) -> int:
        """The size of the whole file."""
        return self.entries[-1].end if self.entries else self.data_start


def container_form(dtype: str, shape: Sequence[int], nbytes: int) -> tuple[str, tuple[int, ...]]:
    """The container dtype and shape under which an array of torch dtype `dtype` is stored.

    Raises:
        ValueError: `nbytes` is not what `dtype` and `shape` need.
    """
    known = DTYPES.get(dtype)
    if known is None:
        return "U8", (nbytes,)
    code, item_bytes = known
    if prod(shape) * item_bytes != nbytes:
        raise ValueError(f"{dtype} of shape {tuple(shape)} has {prod(shape) * item_bytes} bytes, not {nbytes}")
    return code, tuple(shape)


def build_header(
    entries: Sequence[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """The header of a file whose arrays follow it back to back in the order of `entries`.

    Args:
        entries: (name, container dtype, shape, bytes) of each array.
        metadata: stored as `__metadata__`.

    Raises:
        ValueError: a name twice or reserved, an unknown dtype, a size that does not fit, a header above 100 MB.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, code, shape, nbytes in entries:
        if name in table or name == "__metadata__":
            raise ValueError(f"array name used twice or reserved: {name!r}")
        if code not in _ITEM_BYTES or prod(shape) * _ITEM_BYTES[code] != nbytes:
            raise ValueError(f"array {name!r}: {code} of shape {tuple(shape)} does not have {nbytes} bytes")
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    padded = -(-(8 + len(text)) // ALIGN_BYTES) * ALIGN_BYTES - 8
    if padded > MAX_HEADER_BYTES:
        raise ValueError(f"the header would have {padded} bytes, more than readers take ({MAX_HEADER_BYTES})")
    return padded.to_bytes(8, "little") + text.ljust(padded)


def data_header(entries: Sequence[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The header of our data files: as `build_header`, with a digest of itself in its metadata."""
    header = build_header(entries, {"format": "pt", _SEAL: _NO_DIGEST})
    sealed = _SEALED.match(header)
    assert sealed is not None
    return header[: sealed.start(1)] + digest(header).encode() + header[sealed.end(1) :]


def header_nbytes(start: bytes) -> int:
    """How many bytes the header has, its length field included, from the first 8 bytes of the file.

    Raises:
        CorruptError: fewer than 8 bytes.
        ForeignError: a length no container has.
    """
    if len(start) < 8:
        raise CorruptError(f"a container needs at least 8 bytes, found {len(start)}")
    length = int.from_bytes(start[:8], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ForeignError(f"not a safetensors file: a header of {length} bytes")
    return 8 + length


def _row(name: str, row: Mapping[str, Any]) -> tuple[int, int, str, str, tuple[int, ...]]:
    start, stop = row["data_offsets"]
    require(are_sizes([start, stop]) and is_shape(row["shape"]), f"{name!r:.80} is nowhere")
    require(type(row["dtype"]) is str, f"{name!r:.80} has no dtype")
    return start, stop, name, row["dtype"], tuple(row["shape"])


def parse_header(data: bytes) -> Header:
    """Parse a header from the start of a file; `data` may continue after it.

    Raises:
        CorruptError: truncated, not JSON, not what its digest says, arrays with holes, overlaps or wrong sizes.
        ForeignError: not a safetensors file.
    """
    end = header_nbytes(data)
    if data[8:9] not in (b"{", b""):
        raise ForeignError("not a safetensors file: its header is no JSON object")
    if len(data) < end:
        raise CorruptError(f"the container's header ends at byte {end}, only {len(data)} bytes are there")
    with reading("the container's header is damaged"):
        table = msgspec.json.decode(data[8:end])
        metadata = msgspec.convert(table.pop("__metadata__", {}), dict[str, Any])
        _require_seal(data[:end], metadata)
        rows = sorted(_row(name, row) for name, row in table.items())
    offset = 0
    for start, stop, name, code, shape in rows:
        item_bytes = _ITEM_BYTES.get(code)
        if start != offset or stop < start or (item_bytes is not None and prod(shape) * item_bytes != stop - start):
            raise CorruptError(f"the container's header is damaged at array {name!r}")
        offset = stop
    return Header(tuple(ContainerEntry(n, c, s, end + a, end + b) for a, b, n, c, s in rows), metadata, end)


def _require_seal(header: bytes, metadata: Mapping[str, str]) -> None:
    """Raises ValueError if the header does not match the digest in it; those of other programs have none."""
    sealed = _SEALED.match(header)
    if sealed is not None:
        blank = header[: sealed.start(1)] + _NO_DIGEST.encode() + header[sealed.end(1) :]
        if digest(blank).encode() != sealed[1]:
            raise ValueError("it does not match its digest")
    elif _SEAL in metadata or any(str(text).startswith(f"{ALGORITHM}:") for text in metadata.values()):
        raise ValueError("its digest is damaged")
