"""Which snapshot in memory all ranks can have: from where each share comes, and which are made from parity."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ckpt_engine.store import layout


@dataclass(frozen=True, slots=True)
class Source:
    """A writer that a rank has found on its machine.

    Args:
        writer: whose writer it was.
        shares: the snapshots of which it has a share, by rank.
        host, port, secret: where it serves other machines; port 0: it does not.
        group: its parity group, itself first, as the members follow each other.
        parity: the snapshots of which it has parity.
    """

    writer: int
    shares: Mapping[str, Sequence[str]]
    host: str = ""
    port: int = 0
    secret: str = ""
    group: Sequence[int] = ()
    parity: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks attach to.

    Args:
        snapshot: its id.
        remote: for each rank's share, where it is to be had over the network, if it is.
        lost: for each rank whose share is nowhere, its parity group.
        parity: for each member of those groups, where its parity is to be had over the network.
    """

    snapshot: str
    remote: Mapping[str, Source] = field(default_factory=dict)
    lost: Mapping[str, Sequence[int]] = field(default_factory=dict)
    parity: Mapping[str, Source] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`."""
        remote = {rank: Source(**source) for rank, source in data["remote"].items()}
        parity = {rank: Source(**source) for rank, source in data["parity"].items()}
        return cls(data["snapshot"], remote, data["lost"], parity)


class _Found:
    """What there is of one snapshot."""

    def __init__(self, snapshot: str, found: Sequence[Sequence[Source]]) -> None:
        self.snapshot = snapshot
        self.remote: dict[str, Source] = {}
        self.parity: dict[str, Source] = {}
        for source in (source for one in found for source in one if source.port):
            for rank, snapshots in source.shares.items():
                if snapshot in snapshots:
                    self.remote.setdefault(rank, source)
            if snapshot in source.parity:
                self.parity.setdefault(str(source.writer), source)
        self._local: list[Collection[str]] = [
            {rank for source in one for rank, ids in source.shares.items() if snapshot in ids} for one in found
        ]

    def has(self, rank: int) -> bool:
        """Whether every rank gets this rank's share."""
        return str(rank) in self.remote or all(str(rank) in here for here in self._local)

    def group(self, lost: int) -> Sequence[int] | None:
        """The group of a rank without a share if the others have what makes it."""
        for source in self.parity.values():
            if lost in source.group:
                others = [rank for rank in source.group if rank != lost]
                return source.group if all(self.has(one) and str(one) in self.parity for one in others) else None
        return None


def plan(size: int, found: Sequence[Sequence[Source]]) -> Plan | None:
    """The newest snapshot of which every rank gets all shares: from its own machine, from one that serves others, or
    made from parity.

    Args:
        found: what each rank has found on its machine.
    """
    for snapshot in _newest_first(found):
        there = _Found(snapshot, found)
        lost = {str(rank): there.group(rank) for rank in range(size) if not there.has(rank)}
        groups = {rank: group for rank, group in lost.items() if group is not None}
        if len(groups) == len(lost):
            return Plan(snapshot, there.remote, groups, there.parity if groups else {})
    return None


def lacking(size: int, found: Sequence[Sequence[Source]]) -> tuple[str, list[int]] | None:
    """Where there is no plan: the snapshot that the least is missing of, and the ranks whose shares are nowhere."""
    nearest: tuple[str, list[int]] | None = None
    for snapshot in _newest_first(found):
        there = _Found(snapshot, found)
        missing = [rank for rank in range(size) if not there.has(rank)]
        if nearest is None or len(missing) < len(nearest[1]):
            nearest = snapshot, missing
    return nearest


def _newest_first(found: Sequence[Sequence[Source]]) -> list[str]:
    ids = {one for sources in found for source in sources for ids in source.shares.values() for one in ids}
    known = [parsed for one in ids if (parsed := layout.parse_id(one)) is not None]
    return [parsed.id for parsed in sorted(known, key=lambda parsed: parsed.seq, reverse=True)]
