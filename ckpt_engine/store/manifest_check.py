"""Whether what was decoded as a manifest is one: the type and the range of every field, before anything uses it.

A digest finds damage, and anybody can compute it. So nothing behind this looks again: what passes has pieces inside of
their files, arrays of the size that their shape says, and a tree that can be followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ckpt_engine.errors import CorruptError
from ckpt_engine.store import container, layout, tree
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.digest import PIECE_BYTES
from ckpt_engine.store.fields import is_number, is_object, is_shape, is_time, is_whole, require, require_shallow
from ckpt_engine.store.manifest import RANKS, RAW, Entry, Manifest, Piece, SnapshotInfo

MOST_OVERHEAD_BYTES = 4096
"""By which the stored bytes of an encoded piece may exceed those it stands for."""
MOST_SHARED = 4
"""Together the pieces name at most so many times the bytes of the files: each is read, and digested, as often."""
_MOST_RANKS = 1 << 24
_NAME = re.compile(r"[0-9A-Za-z_]{1,40}")
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")
_WHOLE, _TEXT = frozenset({int}), frozenset({str})
_SLIMMED = "slimmed"


def check(manifest: Manifest, *, is_part: bool) -> None:
    """Raise if a manifest contradicts the format.

    Args:
        is_part: it is a part record: some of what its tree refers to is in others.

    Raises:
        CorruptError, ValueError: says where.
    """
    info = manifest.info
    require(type(manifest.run) is str, "'run' is no text")
    for what in ("world", "software", "notes", "tree", "entries", "bases"):
        require(is_object(getattr(manifest, what)), f"{what!r} is no object")
    for beside in (manifest.world, manifest.software, manifest.notes):
        require_shallow(beside, tree.MAX_DEPTH)
    size = manifest.world.get("size", 1)
    require(is_whole(size, 1, _MOST_RANKS), "'size' of the world is none")
    for file in manifest.files:
        require(
            type(file.name) is str and layout.data_owner(file.name) is not None, f"bad data file name {file.name!r:.80}"
        )
        require(is_whole(file.nbytes), f"{file.name} cannot have {file.nbytes!r:.40} bytes")
    _check_pieces(manifest)
    for name, entry in manifest.entries.items():
        _check_entry(name, entry)
    for level in manifest.bases.values():
        for name, pieces in level.items():
            require(all(is_whole(start) for start in pieces), f"bad base of {name!r:.80}")
    if size > 1 and RANKS in manifest.tree:
        own = manifest.tree[RANKS]
        require(
            type(own) is dict and all(_RANK.fullmatch(rank) for rank in own), "components of ranks without a number"
        )
        require(all(type(one) is dict and "$" not in one for one in own.values()), "components of a rank are no dict")
    slimmed = manifest.notes.get(_SLIMMED)
    if isinstance(slimmed, Mapping):
        without = slimmed.get("without")
        require(
            type(without) is list and all(type(one) is str for one in without), "bad note of what was taken from it"
        )
    tree.check(manifest.tree, None if is_part or info.partial is not None else manifest.entries)


def check_info(info: SnapshotInfo) -> SnapshotInfo:
    """The same, if it is one.

    Raises:
        ValueError: says what is wrong.
    """
    parsed = layout.parse_id(info.id) if type(info.id) is str else None
    require(parsed is not None and parsed.seq == info.seq and type(info.seq) is int, f"bad snapshot id {info.id!r:.80}")
    require(is_whole(info.step, most=1 << 200), f"bad step {info.step!r:.40}")
    require(info.epoch is None or is_number(info.epoch), f"bad epoch {info.epoch!r:.40}")
    require(type(info.reason) is str, "'reason' is no text")
    require(is_time(info.created), f"bad time {info.created!r:.40}")
    require(is_whole(info.nbytes), f"bad size {info.nbytes!r:.40}")
    require(info.parent is None or type(info.parent) is str, "'parent' is no text")
    require(is_object(info.metrics) and all(map(_is_metric, info.metrics.values())), "a metric is no number")
    require(is_object(info.components) and all(map(is_whole, info.components.values())), "a component has no size")
    "".join((info.reason, info.parent or "", *info.metrics, *info.components)).encode()  # they are printed
    require(type(info.line.attempt) is str, "its attempt is no text")
    require(all(type(one) is str and is_whole(seq) for one, seq in info.line.before), "bad earlier attempts")
    if info.partial is not None:
        ranks, size = info.partial.ranks, info.partial.size
        require(is_whole(size, 1, _MOST_RANKS) and 0 < len(ranks) <= size, "bad number of ranks")
        require(all(is_whole(rank, 0, size - 1) for rank in ranks) and list(ranks) == sorted(set(ranks)), "bad ranks")
    return info


def _is_metric(value: Any) -> bool:
    return isinstance(value, float) or type(value) is bool or is_number(value)


def _check_pieces(manifest: Manifest) -> None:
    sizes = [file.nbytes for file in manifest.files]
    named = 0
    for name, piece in stored_pieces(manifest):
        _check_piece(name, piece, sizes)
        named += piece.nbytes
    files = sum({file.name: file.nbytes for file in manifest.files}.values())
    if named > MOST_SHARED * files:
        raise CorruptError(f"its pieces name {named} bytes of files that have {files}")


def _check_piece(name: str, piece: Piece, sizes: Sequence[int]) -> None:
    numbers = (piece.file, piece.offset, piece.nbytes, piece.raw_nbytes)
    if not set(map(type, numbers)) <= _WHOLE or min(numbers) < 0 or piece.file >= len(sizes):
        raise ValueError(f"a piece of {name!r:.200} is nowhere")
    if piece.offset + piece.nbytes > sizes[piece.file]:
        raise ValueError(f"a piece of {name!r:.200} lies outside its file")
    if not 0 < piece.raw_nbytes <= PIECE_BYTES or not 0 < piece.nbytes <= piece.raw_nbytes + MOST_OVERHEAD_BYTES:
        raise ValueError(f"a piece of {name!r:.200} cannot have {piece.raw_nbytes} bytes, stored as {piece.nbytes}")
    if piece.codec == RAW and piece.raw_nbytes != piece.nbytes:
        raise ValueError(f"a piece of {name!r:.200} cannot have {piece.raw_nbytes} bytes")
    texts = (piece.digest, piece.codec, piece.base or "", piece.raw_digest or "", *piece.group)
    if not set(map(type, texts)) <= _TEXT:
        raise ValueError(f"a piece of {name!r:.200} has something that is no text")


def _check_entry(name: str, entry: Entry) -> None:
    if not isinstance(entry.dtype, str) or not isinstance(entry.container_dtype, str) or not is_shape(entry.shape):
        raise ValueError(f"{name!r:.200} has no dtype, or no shape")
    if _NAME.fullmatch(entry.dtype) is None:
        raise ValueError(f"{name!r:.200} has no dtype")
    nbytes, size = sum(piece.raw_nbytes for piece in entry.pieces), container.item_bytes(entry.dtype)
    if size is not None and nbytes != prod(entry.shape) * size:
        raise ValueError(f"{name!r:.200} has {nbytes} bytes, which is not what {entry.dtype} of its shape needs")
