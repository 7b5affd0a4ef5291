"""Ranks as threads of one process, of which those of one node have a root for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.observe.events import Event
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.writer import part_records
from tests.ranks.runs import PATIENCE_SECONDS, SharedStore, ThreadRanks, on_all
from tests.ranks.test_checkpointer import state_of


@dataclass(slots=True)
class Sink:
    """Takes the events of one rank."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)


class Nodes:
    """A run over nodes.

    Args:
        folder: of all roots: node n has `folder/n<n>`.
        of: the node of each rank.
        options: of the run; `tiers` are further ones.
    """

    def __init__(
        self,
        folder: Path,
        of: Sequence[int],
        *,
        wait_seconds: float = PATIENCE_SECONDS,
        tiers: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        self.folder, self.of, self.size = folder, tuple(of), len(of)
        store = SharedStore()
        self.sinks = [Sink() for _ in of]
        self.ranks = [
            Checkpointer(
                tiers=[str(self.root(node)), *tiers],
                ranks=ThreadRanks(rank, self.size, store, wait_seconds=wait_seconds, node=f"node{node}"),
                writer="thread",
                **options,
            )
            for rank, node in enumerate(of)
        ]
        for rank, sink in zip(self.ranks, self.sinks, strict=True):
            rank.engine.events = sink

    def root(self, node: int) -> Path:
        return self.folder / f"n{node}"

    def repository(self, node: int) -> Repository:
        return Repository(open_storage(self.root(node)))

    def steps(self, node: int) -> list[int]:
        """The steps of the snapshots of a node."""
        return [parsed.step for parsed in self.repository(node).ids()]

    def save(self, step: int) -> None:
        """All ranks save, and wait until their shares are durable."""
        for handle in on_all(lambda rank: self.ranks[rank].save(state_of(step, rank), step=step), self.size):
            handle.wait(60)

    def close(self) -> None:
        on_all(lambda rank: self.ranks[rank].close(), self.size)

    def whole(self, step: int) -> Manifest:
        """What the partial manifests of all nodes make."""
        found = []
        for node in sorted(set(self.of)):
            repository = self.repository(node)
            (snapshot,) = [parsed.id for parsed in repository.ids() if parsed.step == step]
            found.append(part_records.of_manifest(repository.read(snapshot)))
        return part_records.merge(found)
