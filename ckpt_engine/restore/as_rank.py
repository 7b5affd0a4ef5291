"""A snapshot of several ranks as one of them sees it, and what each of the others had of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_engine.errors import ResumeError
from ckpt_engine.store.manifest import RANKS, Manifest


def size_of(manifest: Manifest) -> int:
    """How many ranks wrote it."""
    return int(manifest.world.get("size", 1))


def as_rank(manifest: Manifest, rank: int) -> Manifest:
    """The manifest with the components of its own that `rank` had, instead of those of all ranks.

    Where there were fewer ranks it is those of `rank` modulo their number.
    """
    if size_of(manifest) == 1:
        return manifest
    shared = {key: node for key, node in manifest.tree.items() if key != RANKS}
    return replace(manifest, tree={**shared, **own_trees(manifest).get(rank % size_of(manifest), {})})


def require_size(manifest: Manifest, size: int) -> None:
    """Raise where an exact resume is impossible because another number of ranks has taken the snapshot.

    Raises:
        ResumeError: says both numbers.
    """
    if size_of(manifest) != size:
        raise ResumeError(
            f"{size_of(manifest)} ranks took snapshot {manifest.info.id}, and this run has {size}",
            hint=f"start it with {size_of(manifest)} ranks, or with rng: derive, which lets any number go on",
        )


def own_trees(manifest: Manifest) -> dict[int, Mapping[str, Any]]:
    """What each rank had of its own, as trees by component; nothing where one rank wrote."""
    if size_of(manifest) == 1:
        return {}
    return {int(rank): tree for rank, tree in manifest.tree.get(RANKS, {}).items()}
