"""What of a state one of several ranks writes: its own arrays, and its share of those that all ranks have alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_engine.ranks.share import Item, Slice, divide
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.snapshot.draft import Draft
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import RANKS


def mine(drafts: Sequence[Draft], ranks: Ranks) -> list[Draft]:
    """The drafts of `ranks.rank`, cut to its rows, in their order."""
    common = [draft for draft in drafts if not _is_own(draft)]
    items = [Item(draft.nbytes, _rows(draft.shape), ranks.divides(draft.leaves[0].path)) for draft in common]
    slices = iter(divide(items, ranks.size))
    found = []
    for draft in drafts:
        if _is_own(draft):
            found.append(draft)
            continue
        found += [_sliced(draft, one) for one in next(slices) if one.rank == ranks.rank]
    return found


def structure_of(drafts: Sequence[Draft]) -> str:
    """Equal on ranks whose common arrays are the same: names, dtypes and shapes."""
    rows = [f"{draft.name}\0{draft.dtype}\0{draft.shape}\n" for draft in drafts if not _is_own(draft)]
    return digest("".join(rows).encode())


def _is_own(draft: Draft) -> bool:
    return bool(draft.leaves[0].path[0] == RANKS)


def _dimension(shape: Sequence[int]) -> int:
    """The first one that can be cut; slices of it are runs of consecutive bytes."""
    return next((dimension for dimension, n in enumerate(shape) if n != 1), 0)


def _rows(shape: Sequence[int]) -> int:
    return shape[_dimension(shape)] if shape else 1


def _sliced(draft: Draft, part: Slice) -> Draft:
    rows = _rows(draft.shape)
    if part.rows == rows:
        return draft
    dimension = _dimension(draft.shape)
    shape = (*draft.shape[:dimension], part.rows, *draft.shape[dimension + 1 :])
    row_bytes = draft.nbytes // rows
    return replace(
        draft,
        shape=shape,
        nbytes=part.rows * row_bytes,
        rows=(dimension, part.start, part.rows),
        whole=draft.shape,
        start_bytes=part.start * row_bytes,
    )
