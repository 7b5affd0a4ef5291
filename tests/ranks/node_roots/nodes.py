"""Ranks on nodes that have a root each, as threads of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_engine.checkpointer import Checkpointer
from tests.ranks.runs import SharedStore, ThreadRanks, on_all
from tests.ranks.test_checkpointer import check


def open_nodes(
    folder: Path, nodes: Sequence[str], each: int, *, further: Sequence[Any] = (), memory: bool = False, **options: Any
) -> list[Checkpointer]:
    """The checkpointers of `each` ranks on each of these nodes, whose root is the folder of its name."""
    store = SharedStore()
    names = [name for name in nodes for _ in range(each)]
    return [
        Checkpointer(
            tiers=[*(["memory"] if memory else []), str(folder / name), *further],
            ranks=ThreadRanks(rank, len(names), store, node=name),
            writer="process" if memory else "thread",
            **options,
        )
        for rank, name in enumerate(names)
    ]


def load_all(ranks: list[Checkpointer], **how: Any) -> list[Any]:
    """What each rank loads."""
    return on_all(lambda rank: ranks[rank].load(**how), len(ranks))


def check_all(ranks: list[Checkpointer], step: int, *, saved: int | None = None) -> None:
    """All ranks load the state of a step, each with what was its own among `saved` ranks."""
    for rank, state in enumerate(load_all(ranks)):
        check(state, step, rank % (saved or len(ranks)))
