"""What of a state one of several ranks writes: its own arrays, and its share of what several ranks have alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckpt_engine.errors import StateError
from ckpt_engine.ranks.boxes import leading
from ckpt_engine.ranks.share import Item, Slice, divide
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.snapshot.draft import Draft
from ckpt_engine.snapshot.flatten import show_path
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import RANKS


def mine(drafts: Sequence[Draft], ranks: Ranks) -> list[Draft]:
    """The drafts of `ranks.rank`, cut to its rows, in their order.

    Ranks that have the same box of a DTensor share it out among themselves, and all ranks what all have alike.
    """
    teams: dict[tuple[int, ...], list[_Part]] = defaultdict(list)
    found: dict[int, list[Draft]] = {}
    for number, draft in enumerate(drafts):
        if _is_own(draft):
            found[number] = [draft]
        elif (part := _part(number, draft, ranks)) is not None:
            teams[part.team].append(part)
    for team, parts in teams.items():
        for part, slices in zip(parts, divide([part.item for part in parts], len(team)), strict=True):
            taken = [_sliced(drafts[part.draft], one) for one in slices if team[one.rank] == ranks.rank]
            found[part.draft] = taken
    return [draft for number in range(len(drafts)) for draft in found.get(number, ())]


def structure_of(drafts: Sequence[Draft]) -> str:
    """Equal on ranks whose common arrays are the same: names, dtypes, shapes and how they are divided."""
    return digest("".join(_structure(drafts)).encode())


def require_all(drafts: Sequence[Draft], ranks: Ranks | None) -> None:
    """Raise if a DTensor is not one of all ranks that take the snapshot.

    Raises:
        StateError: names it.
    """
    everyone = frozenset(range(ranks.size if ranks is not None else 1))
    for draft in drafts:
        leaf = draft.leaves[0]
        if leaf.shard is None:
            continue
        where = f"the DTensor at {show_path(leaf.path)}"
        if ranks is not None and _is_own(draft):
            raise StateError(
                f"{where} is in a component of each rank's own", hint="take the component out of `own`: it is of all"
            )
        if ranks is None and len(leaf.shard.ranks) > 1:
            raise StateError(
                f"{where} is divided over {len(leaf.shard.ranks)} ranks, and this checkpointer saves for one",
                hint="make it on every rank with ranks=ProcessGroupRanks(), see docs/sharded.md",
            )
        if ranks is not None and leaf.shard.ranks != everyone:
            raise StateError(
                f"the mesh of {where} has {len(leaf.shard.ranks)} of the {len(everyone)} ranks",
                hint="divide it over a mesh of all ranks: meshes of some of them (pipeline stages) are not supported",
            )


@dataclass(frozen=True, slots=True)
class _Part:
    """What `team` has of draft number `draft`: all of them the same."""

    draft: int
    team: tuple[int, ...]
    item: Item


def _part(number: int, draft: Draft, ranks: Ranks) -> _Part | None:
    """None: this rank has nothing of it."""
    everyone = tuple(range(ranks.size))
    if draft.grid is None:
        item = Item(draft.nbytes, _rows(draft.shape), ranks.divides(draft.leaves[0].path))
        return _Part(number, everyone, item)
    box = draft.grid.of(ranks.rank)
    if box is None:
        return None
    return _Part(number, draft.grid.holders[box], Item(draft.nbytes, _rows(draft.shape)))


def _structure(drafts: Sequence[Draft]) -> Iterator[str]:
    for draft in drafts:
        if not _is_own(draft):
            form = draft.shape if draft.grid is None else draft.grid.signature
            yield f"{draft.name}\0{draft.dtype}\0{form}\n"


def _is_own(draft: Draft) -> bool:
    return bool(draft.leaves[0].path[0] == RANKS)


def _rows(shape: Sequence[int]) -> int:
    return shape[leading(shape)] if shape else 1


def _sliced(draft: Draft, part: Slice) -> Draft:
    rows = _rows(draft.shape)
    if part.rows == rows:
        return draft
    dimension = leading(draft.shape)
    shape = (*draft.shape[:dimension], part.rows, *draft.shape[dimension + 1 :])
    row_bytes = draft.nbytes // rows
    return replace(
        draft,
        shape=shape,
        nbytes=part.rows * row_bytes,
        rows=(dimension, part.start, part.rows),
        whole=draft.whole or draft.shape,
        start_bytes=draft.start_bytes + part.start * row_bytes,
    )
