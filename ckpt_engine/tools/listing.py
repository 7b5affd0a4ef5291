"""The snapshots of a run by tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_engine.grouping import grouped
from ckpt_engine.restore import ask_tiers
from ckpt_engine.restore.choose import UnreachableTier, away_of
from ckpt_engine.store import names, pins
from ckpt_engine.store.branches import Branch, branches
from ckpt_engine.store.manifest import SnapshotInfo, by_age
from ckpt_engine.store.repository import Listing, Repository
from ckpt_engine.tools.stored_run import Run


@dataclass(frozen=True, slots=True)
class TierListing:
    """What one place has; `number` counts the tiers of ROOT from 1, `data_bytes` is of all data files."""

    number: int
    url: str
    listing: Listing
    data_bytes: int
    pinned: Mapping[str, pins.Pin]

    def to_json(self) -> dict[str, Any]:
        """What `print_json` takes."""
        return {"url": self.url, "snapshots": len(self.listing.snapshots), "data_bytes": self.data_bytes}


def listings(run: Run, say: Callable[[str], object]) -> tuple[list[TierListing], tuple[UnreachableTier, ...]]:
    """What the tiers of a run have, and those that do not answer."""
    answers = ask_tiers.ask(run.places, _look, say=say)
    found = [
        TierListing(run.tiers.index(answer.place.storage.url) + 1, answer.place.storage.url, *answer.value)
        for answer in answers
        if answer.value is not None
    ]
    return found, (*run.away, *away_of(answers))


def _look(place: Repository) -> tuple[Listing, int, Mapping[str, pins.Pin]]:
    pinned = {pin.id: pin for pin in pins.pins(place.storage)}
    return place.scan(), sum(item.nbytes for item in place.storage.list(names.DATA)), pinned


def pin_of(snapshot: str, holders: Sequence[TierListing]) -> pins.Pin | None:
    """The pin of a snapshot, wherever it has one."""
    return next((tier.pinned[snapshot] for tier in holders if snapshot in tier.pinned), None)


def merged(tiers: Sequence[TierListing]) -> list[tuple[SnapshotInfo, list[TierListing]]]:
    """All snapshots, oldest first, and where they are."""
    infos = {info.id: info for tier in reversed(tiers) for info in tier.listing.snapshots}
    holders = grouped((info.id, tier) for tier in tiers for info in tier.listing.snapshots)
    return [(info, holders[info.id]) for info in sorted(infos.values(), key=by_age)]


def named_branches(rows: Sequence[tuple[SnapshotInfo, list[TierListing]]]) -> tuple[list[Branch], Mapping[str, str]]:
    """The branches, first the one that a resume continues, and by snapshot the name of its branch."""
    found = branches([info for info, _ in rows])
    return found, {info.id: branch.id for branch in reversed(found) for info in branch.snapshots}
