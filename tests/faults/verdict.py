"""What must hold after a fault: nothing acknowledged is lost, and what is listed is whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckpt_engine.errors import CkptError
from ckpt_engine.restore import load as restore
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage
from tests.faults.life import Heard
from tests.faults.trainer import fingerprint


@dataclass(frozen=True)
class Place:
    """A tier as the verdict sees it: past every proxy and every disk that fails.

    Args:
        name: in the draw.
        url: what the training calls it.
        options: for the storage, straight to the server.
        keep: how many snapshots its retention keeps.
    """

    name: str
    url: str
    options: Mapping[str, Any]
    keep: int

    @cached_property
    def storage(self) -> Storage:
        """It keeps nothing but a connection."""
        return open_storage(self.url, self.options)

    def repository(self) -> Repository:
        """The run as a new process would read it from the disk."""
        return Repository(self.storage)


@dataclass
class Ledger:
    """What the trainings of one run have said.

    `expected` has the bits of the state at each step that was saved, `acknowledged` the snapshots that each tier was
    said to have, `spoiled` those that the campaign itself has damaged at a tier.
    """

    expected: dict[int, str] = field(default_factory=dict)
    acknowledged: dict[str, set[str]] = field(default_factory=dict)
    spoiled: set[tuple[str, str]] = field(default_factory=set)
    bad: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def take(self, heard: Iterable[Heard], places: Sequence[Place]) -> None:
        """Enter what a training has said."""
        committed: set[str] = set()
        for one in heard:
            if one.kind == "saving":
                bits = self.expected.setdefault(one.row["step"], one.row["bits"])
                if bits != one.row["bits"]:
                    self.bad.append(f"step {one.row['step']} was trained again with another result")
            elif one.is_event("snapshot_committed") or one.is_event("snapshot_replicated"):
                committed.add(one.row["snapshot"])
                tier = next(place for place in places if plain(place.url) == plain(one.row["tier"]))
                self.acknowledged.setdefault(tier.name, set()).add(one.row["snapshot"])
            elif one.kind == "durable" and one.row["snapshot"] not in committed:
                self.bad.append(f"{one.row['snapshot']} was acknowledged without an event")
            elif one.kind == "broken":
                self.bad.append(f"the training broke down: {one.row['text']}")

    def newest(self) -> int:
        """The highest number that was acknowledged anywhere and not damaged by the campaign there; 0: none."""
        known = {(name, one) for name, ids in self.acknowledged.items() for one in ids}
        return max((seq(one) for _, one in known - self.spoiled), default=0)

    def wiped(self, name: str) -> None:
        """A tier was taken away with all it had."""
        self.acknowledged.pop(name, None)

    def inspect(self, places: Sequence[Place], *, when: str, spare: int = 0) -> None:
        """Look at every tier.

        Args:
            spare: how many snapshots fewer than `keep` a tier may have had to make do with.
        """
        for place in places:
            repository = place.repository()
            listing = repository.scan()
            for damaged in listing.damaged:
                self.bad.append(f"{when}: damaged manifest at {place.name}: {damaged}")
            whole: list[int] = []
            for info in listing.snapshots:
                if (place.name, info.id) in self.spoiled:
                    whole.append(info.seq)  # retention cannot know
                elif (why := self._wrong(repository, info.step)) is None:
                    whole.append(info.seq)
                else:
                    self.bad.append(f"{when}: {info.id} is listed at {place.name}, but {why}")
            listed = {info.id for info in listing.snapshots}
            for snapshot in sorted(self.acknowledged.get(place.name, set()) - listed):
                newer = sum(number > seq(snapshot) for number in whole)
                if newer < max(1, place.keep - spare):
                    self.lost.append(f"{when}: {snapshot} is gone from {place.name}, which has {newer} newer ones")

    def _wrong(self, repository: Repository, step: int) -> str | None:
        try:
            found = restore.load([repository], step)
        except CkptError as err:
            return f"cannot be loaded: {err}"
        if found is None:
            return "is not found"
        return None if fingerprint(found.state) == self.expected.get(step) else f"has not the bits of step {step}"

    def loaded(self, row: Mapping[str, Any], *, at_least: int) -> None:
        """A training has resumed."""
        if row["bits"] != self.expected.get(row["step"]):
            self.bad.append(f"resumed from {row['snapshot']} with other bits than were saved")
        if row["seq"] < at_least:
            self.lost.append(f"resumed from {row['snapshot']}, though number {at_least} was acknowledged")


def seq(snapshot: str) -> int:
    """The number of a snapshot."""
    parsed = names.parse_id(snapshot)
    assert parsed is not None
    return parsed.seq


def plain(url: str) -> str:
    """A place, however it is written."""
    return url.removeprefix("file://").rstrip("/")
