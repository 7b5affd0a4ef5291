"""Manifests as bytes: encoded once, verified whenever they are read.

```
{"digest":"xxh3-128:<32 hex>","manifest":<body>}\\n
```
The digest covers the bytes of <body>, a JSON object that begins with `format`, `version` and `info`: a listing needs
only the first few KiB. Every version keeps this envelope, so that an older program says "newer" instead of "damaged".

Whether what was decoded as a manifest is one: the type and the range of every field, before anything uses it.

A digest finds damage, and anybody can compute it. So nothing behind this looks again: what passes has pieces inside of
their files, arrays of the size that their shape says, and a tree that can be followed.
"""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from math import prod
from operator import attrgetter, itemgetter
from typing import Any

import msgspec

from ckpt_engine.errors import CorruptError, ForeignError, NewerFormatError, SnapshotFailedError
from ckpt_engine.store import container, json_checks, names, tree
from ckpt_engine.store.container import PIECE_BYTES, digest
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.json_checks import (
    is_shallow,
    is_shape,
    require,
)
from ckpt_engine.store.manifest import (
    ALIAS_VERSION,
    FORMAT,
    MANIFEST_VERSION,
    PACKED,
    PACKED_VERSION,
    PARTIAL_VERSION,
    RANKS,
    RAW,
    SLIMMED,
    STORED_VERSION,
    UNNAMED,
    VERSION,
    DataFile,
    Entry,
    Manifest,
    Piece,
    RankCount,
    SnapshotInfo,
)

HEAD_BYTES = 4096
"""Enough of a manifest for `decode_info`, unless it has very many metrics."""

_START = re.compile(rb'\{"digest":"([a-z0-9-]+:[0-9a-f]+)","manifest":')
_END = b"}\n"
_INFO = re.compile(rb'\{"format":"([^"\\]*)","version":(\d{1,9}),"info":')
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_STRANGER_BYTES = 1 << 20
"""Of a file that does not begin as a manifest does: a larger one is not parsed to say what it may be."""
MOST_OVERHEAD_BYTES = 4096
"""By which the stored bytes of an encoded piece may exceed those it stands for."""
MOST_SHARED = 4
"""Together the pieces, but for aliases, name at most so many times the bytes of the files."""
MOST_UNUSED = 1 << 16
"""Files of ranks that have written nothing."""
_LAST_STEP = 1 << 200
_NAME = re.compile(r"[0-9A-Za-z_]{1,40}")
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest.

    Raises:
        ValueError, TypeError: something in it is not JSON (NaN and infinity are not, except as metrics).
        SnapshotFailedError: it is larger than any reader takes.
    """
    bases = {
        snapshot: {
            name: [{"start": start, **_piece_to_json(piece)} for start, piece in pieces.items()]
            for name, pieces in entries.items()
        }
        for snapshot, entries in manifest.bases.items()
    }
    body = dump(
        {
            "format": FORMAT,
            "version": version_of(manifest),
            "info": info_to_json(manifest.info),
            "run": manifest.run,
            "world": dict(manifest.world),
            "software": dict(manifest.software),
            "files": [{"name": file.name, "nbytes": file.nbytes} for file in manifest.files],
            "entries": {
                name: {
                    "dtype": entry.dtype,
                    "shape": list(entry.shape),
                    "container_dtype": entry.container_dtype,
                    "pieces": list(map(_piece_to_json, entry.pieces)),
                }
                for name, entry in manifest.entries.items()
            },
            **({"bases": bases} if bases else {}),
            "tree": manifest.tree,
            "notes": dict(manifest.notes),
        }
    )
    text = b'{"digest":"%s","manifest":%s}\n' % (digest(body).encode(), body)
    if len(text) > names.MANIFEST_BYTES:
        raise SnapshotFailedError(
            f"the manifest of {manifest.info.id} has {len(text):,} bytes; the format allows {names.MANIFEST_BYTES:,}",
            hint="keep long lists of numbers in the state as tensors or arrays: their bytes are not in the manifest",
        )
    return text


def version_of(manifest: Manifest) -> int:
    """The oldest format version whose readers can read a manifest."""
    entries = manifest.entries.values()
    needs = {
        STORED_VERSION: not all(map(attrgetter("is_plain"), entries)),
        PARTIAL_VERSION: manifest.info.partial is not None,
        PACKED_VERSION: any(type(node) is dict and node.get("$") == PACKED for node in manifest.tree.values()),
        ALIAS_VERSION: any(map(attrgetter("alias"), chain.from_iterable(map(attrgetter("pieces"), entries)))),
    }
    return max(filter(needs.get, needs), default=VERSION)


@contextmanager
def uncollected() -> Iterator[None]:
    """While many objects are made, which all stay: looking for garbage among all of a process takes as long."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@uncollected()
def decode(data: bytes, *, is_part: bool = False) -> Manifest:
    """The inverse of `encode`; nothing is believed before the digest and every field have been verified.

    Args:
        is_part: it is a part record, see `manifest_codec.check`.

    Raises:
        CorruptError: truncated, changed, or contradicting itself.
        ForeignError: not our manifest.
        NewerFormatError: written by a later version.
    """
    body = _verified_body(data)
    with json_checks.reading("the manifest contradicts the format"):
        document = msgspec.json.decode(body)
        named = msgspec.convert(document["files"], list[DataFile])
        files = tuple(dict.fromkeys(named))  # several ranks may have named the same one
        places = {file.name: number for number, file in enumerate(files)}
        require(len(files) == len(places), "a data file has two sizes")
        numbers = {number: places[file.name] for number, file in enumerate(named)}
        for row in _piece_rows(document):
            row["file"] = numbers.get(row["file"], row["file"])
            row.setdefault("raw_nbytes", row["nbytes"])
        bases = {
            snapshot: {name: {row["start"]: row for row in rows} for name, rows in entries.items()}
            for snapshot, entries in document.get("bases", {}).items()
        }
        info = info_from_json(document["info"])
        manifest = msgspec.convert({**document, "info": info, "files": files, "bases": bases}, Manifest)
        check(manifest, is_part=is_part)
    return manifest


def decode_info(head: bytes) -> SnapshotInfo | None:
    """The info from the first bytes of a manifest, unverified; None if they do not contain it whole.

    Raises:
        CorruptError, ForeignError, NewerFormatError: as `decode`, as far as the head can tell.
    """
    start = _START.match(head)
    if start is None:
        if len(head) < HEAD_BYTES or b'{"digest"'[: len(head)] != head[:9]:
            raise _stranger(head)
        return None
    _check_version(head[start.end() : start.end() + 256])
    found = _INFO.match(head, start.end())
    if found is None:
        raise CorruptError("the manifest's head is damaged")
    try:
        info, _ = json.JSONDecoder().raw_decode(head[found.end() :].decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    with json_checks.reading("the manifest's head is damaged"):
        return info_from_json(info)


def _piece_rows(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All pieces of a manifest."""
    for entry in document["entries"].values():
        yield from entry["pieces"]
    for entries in document.get("bases", {}).values():
        yield from chain.from_iterable(entries.values())


def _verified_body(data: bytes) -> bytes:
    start = _START.match(data)
    if start is None:
        raise _stranger(data)
    body = data[start.end() : -len(_END)]
    algorithm = start[1].decode().partition(":")[0]
    if algorithm != container.ALGORITHM:
        _check_version(body)
        raise CorruptError(f"the manifest has an unknown digest, {algorithm}")
    if not data.endswith(_END) or digest(body).encode() != start[1]:
        raise CorruptError(f"the manifest is truncated or was changed ({len(data)} bytes)")
    if not _check_version(body):
        raise CorruptError("the manifest does not begin with its format, its version and its info")
    return body


def _check_version(body: bytes) -> bool:
    """Whether it says its version, which this program reads."""
    found = _INFO.match(body)
    if found is None:
        return False
    if found[1].decode(errors="replace") != FORMAT:
        raise ForeignError(f"a manifest of another program: format {found[1].decode(errors='replace')!r}")
    if int(found[2]) > MANIFEST_VERSION:
        raise NewerFormatError(
            f"the manifest has format version {int(found[2])}, this program reads up to {MANIFEST_VERSION}",
            hint="upgrade ckpt-engine",
        )
    return True


def _stranger(data: bytes) -> CorruptError | ForeignError:
    """Why `data` does not begin like a manifest: other JSON is foreign, anything else is taken for damage.

    Raises:
        SealError: it is sealed.
    """
    names.refuse_sealed(data)
    try:
        json.loads(data[: _STRANGER_BYTES + 1])  # cut off it is no JSON
    except (ValueError, RecursionError):
        return CorruptError(f"no manifest, or one whose start is damaged ({len(data)} bytes)")
    return ForeignError("not a manifest of ckpt-engine, though it is JSON")


def dump(document: Any) -> bytes:
    """A document as the shortest JSON."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def info_to_json(info: SnapshotInfo) -> dict[str, Any]:
    """A manifest's `info`."""
    partial = info.partial
    return {
        "id": info.id,
        "seq": info.seq,
        "step": info.step,
        "epoch": info.epoch,
        "reason": info.reason,
        "created": info.created,
        "nbytes": info.nbytes,
        "metrics": {
            name: value if math.isfinite(value) else json.dumps(float(value))  # a key of `_NUMBERS`
            for name, value in info.metrics.items()
        },
        "parent": info.parent,
        "components": dict(info.components),
        **({"partial": {"ranks": list(partial.ranks), "size": partial.size}} if partial is not None else {}),
        **({"line": asdict(info.line)} if info.line != UNNAMED else {}),
    }


def _piece_to_json(piece: Piece) -> dict[str, Any]:
    row: dict[str, Any] = {
        "file": piece.file,
        "offset": piece.offset,
        "nbytes": piece.nbytes,
        "digest": piece.digest,
    }
    if piece.raw_nbytes != piece.nbytes:
        row["raw_nbytes"] = piece.raw_nbytes
    codec = None if piece.codec == RAW else piece.codec
    more = {"codec": codec, "base": piece.base, "raw_digest": piece.raw_digest}
    return row | dict(filter(itemgetter(1), {**more, "group": piece.group, "alias": piece.alias}.items()))


def info_from_json(row: Mapping[str, Any]) -> SnapshotInfo:
    """The inverse of `info_to_json`. Raises what an unexpected document raises, with what is wrong."""
    metrics = {name: _NUMBERS[value] if isinstance(value, str) else value for name, value in row["metrics"].items()}
    info = msgspec.convert({**row, "metrics": metrics}, SnapshotInfo)
    parsed = names.parse_id(info.id)
    require(parsed is not None and parsed.seq == info.seq, f"bad snapshot id {info.id!r:.80}")
    require(info.step <= _LAST_STEP, f"bad step {info.step!r:.40}")
    "".join((info.reason, info.parent or "", *info.metrics, *info.components)).encode()  # they are printed
    if info.partial is not None:
        ranks, size = info.partial.ranks, info.partial.size
        require(0 < len(ranks) <= size and list(ranks) == sorted(set(ranks)) and ranks[-1] < size, "bad ranks")
    return info


def check(manifest: Manifest, *, is_part: bool) -> None:
    """Raise if a manifest contradicts the format.

    Args:
        is_part: it is a part record: some of what its tree refers to is in others.

    Raises:
        CorruptError, ValueError: says where.
    """
    info = manifest.info
    beside = [manifest.world, manifest.software, manifest.notes]
    require(is_shallow(beside, tree.MAX_DEPTH + 1), f"something is nested deeper than {tree.MAX_DEPTH} levels")
    size = msgspec.convert(manifest.world.get("size", 1), RankCount)
    _check_pieces(manifest)
    for name, entry in manifest.entries.items():
        _check_entry(name, entry)
    if size > 1 and RANKS in manifest.tree:
        own = manifest.tree[RANKS]
        require(
            type(own) is dict and all(_RANK.fullmatch(rank) for rank in own), "components of ranks without a number"
        )
        require(all(type(one) is dict and "$" not in one for one in own.values()), "components of a rank are no dict")
    slimmed = manifest.notes.get(SLIMMED)
    if isinstance(slimmed, Mapping):
        without = slimmed.get("without")
        require(
            type(without) is list and all(type(one) is str for one in without), "bad note of what was taken from it"
        )
    tree.check(manifest.tree, None if is_part or info.partial is not None else manifest.entries)


def _check_pieces(manifest: Manifest) -> None:
    sizes = [file.nbytes for file in manifest.files]
    named, used = 0, set[int]()
    for name, piece in stored_pieces(manifest):
        _check_piece(name, piece, sizes)
        named += 0 if piece.alias else piece.nbytes
        used.add(piece.file)
    unused = len(sizes) - len(used)
    require(unused <= min(manifest.world_size, MOST_UNUSED), f"no piece lies in {unused:,} of its {len(sizes):,} files")
    for file in manifest.files:
        require(names.data_owner(file.name) is not None, f"bad data file name {file.name!r:.80}")
    if named > MOST_SHARED * sum(sizes):
        raise CorruptError(f"its pieces name {named} bytes of files that have {sum(sizes)}")


def _check_piece(name: str, piece: Piece, sizes: Sequence[int]) -> None:
    if piece.file >= len(sizes) or piece.offset + piece.nbytes > sizes[piece.file]:
        raise ValueError(f"a piece of {name!r:.200} lies outside its file")
    if not 0 < piece.raw_nbytes <= PIECE_BYTES or not 0 < piece.nbytes <= piece.raw_nbytes + MOST_OVERHEAD_BYTES:
        raise ValueError(f"a piece of {name!r:.200} cannot have {piece.raw_nbytes} bytes, stored as {piece.nbytes}")
    if piece.codec == RAW and piece.raw_nbytes != piece.nbytes:
        raise ValueError(f"a piece of {name!r:.200} cannot have {piece.raw_nbytes} bytes")


def _check_entry(name: str, entry: Entry) -> None:
    if _NAME.fullmatch(entry.dtype) is None or not is_shape(entry.shape):
        raise ValueError(f"{name!r:.200} has no dtype, or no shape")
    nbytes, size = entry.nbytes, container.item_bytes(entry.dtype)
    if size is not None and nbytes != prod(entry.shape) * size:
        raise ValueError(f"{name!r:.200} has {nbytes} bytes, which is not what {entry.dtype} of its shape needs")
