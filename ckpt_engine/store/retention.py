"""The plan of retention: what a policy does to the snapshots of a run.

Laws (tests/store/test_retention*.py): a plan depends neither on the order of the snapshots nor on a clock; planning
again after the plan was executed removes nothing; the newest snapshot that is whole always stays, and so does what is
protected; protecting more never makes a rule keep less; after a plan the limits hold, or nothing was removed for them
and the plan says how many bytes are missing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

from ckpt_engine.observe import units
from ckpt_engine.store.manifest import SnapshotInfo, by_age
from ckpt_engine.store.retention_rules import (
    ByteLimits,
    KeepBest,
    Retention,
    RetentionPolicy,
    rules_in,
)

SLACK_BYTES = 64 << 10
"""Room that a quota leaves for what is small: the record, the lease, pins, the last page of a file."""
RESERVE_BYTES = 256 << 20
_RESERVE = 0.01
"""Without `min_free`: this share of the run's and the free bytes stays free, at most `RESERVE_BYTES`."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes a run occupies.

    Args:
        files: by snapshot the files it needs, manifest included, with their bytes. Several may need the same file.
        other_bytes: all our other objects, garbage included.
    """

    files: Mapping[str, Mapping[str, int]]
    other_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Everything, each file once."""
        once = {name: nbytes for files in self.files.values() for name, nbytes in files.items()}
        return sum(once.values()) + self.other_bytes

    def exclusive_bytes(self, snapshots: Collection[str]) -> int:
        """What is free once these snapshots, and no others, are gone."""
        leaving = set(snapshots)
        staying = {name for snapshot, files in self.files.items() if snapshot not in leaving for name in files}
        gone = {name: nbytes for one in leaving for name, nbytes in self.files.get(one, {}).items()}
        return sum(nbytes for name, nbytes in gone.items() if name not in staying)


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What happens to each snapshot: kept with a reason, or removed (oldest first).

    Args:
        why: the reason of each removal.
        slim: kept snapshots that lose components, and which.
        short_bytes: what is missing to keep the limits although everything that may be removed were; else 0.
        gave_way: those of `remove` that a rule keeps, and for which the disk has no room.
    """

    keep: Mapping[str, str]
    remove: tuple[str, ...]
    why: Mapping[str, str] = field(default_factory=dict)
    slim: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    short_bytes: int = 0
    gave_way: tuple[str, ...] = ()


def plan(
    infos: Sequence[SnapshotInfo],
    policy: RetentionPolicy,
    protected: Mapping[str, str] = _NOTHING,
    *,
    verified: str | None = None,
    usage: Usage | None = None,
    free_bytes: int | None = None,
) -> RetentionPlan:
    """What `policy` does to the snapshots `infos`.

    Args:
        protected: ids kept whatever rules and limits say, with the reason.
        verified: the newest snapshot known to be whole; kept whatever the limits say. Unknown: the newest one.
        usage: the bytes behind the snapshots; without it each has its `nbytes`.
        free_bytes: of the storage, if known.
    """
    retention = Retention.of(policy)
    in_order = sorted(infos, key=by_age)
    newest = in_order[-1].id if in_order else ""
    shed = _Shedding(in_order, retention, usage, {*protected, verified or newest})
    always = {newest: "newest"} | ({verified: "newest whole snapshot"} if verified else {})
    reasons = dict(retention.keep(in_order))
    for snapshot, reason in protected.items():
        reasons[snapshot] = f"{reason}; {reasons[snapshot]}" if snapshot in reasons else reason
    for snapshot, reason in always.items():
        reasons.setdefault(snapshot, reason)
    for info in in_order:
        if info.id not in reasons:
            shed.remove(info.id, "no rule keeps it")
    shed.to_limits(retention.limits, free_bytes)
    kept = {info.id: reasons[info.id] for info in shed.left}
    slim = _slim(shed.left, retention.components, {*protected, verified or newest, newest})
    return RetentionPlan(kept, shed.removed_in_order(), shed.why, slim, shed.short_bytes)


def plan_before_write(
    infos: Sequence[SnapshotInfo],
    policy: RetentionPolicy,
    incoming_bytes: int,
    free_bytes: int | None,
    *,
    protected: Mapping[str, str] = _NOTHING,
    verified: str | None = None,
    usage: Usage | None = None,
    incoming: SnapshotInfo | None = None,
    full: bool = False,
) -> RetentionPlan:
    """What has to go before a snapshot of `incoming_bytes` may be written, so that no limit breaks at any instant.

    Nothing goes while there is room. First goes what the policy will not keep beside the new snapshot, then the oldest,
    then the best ones; never what is protected, nor the newest whole snapshot. Nothing goes in vain.

    Args:
        incoming_bytes: everything the write will store: data files and manifest.
        free_bytes: of the storage, if known.
        incoming: the snapshot to come, as far as it is known.
        full: the storage has refused the write whatever it says of its room (inodes, a user's quota): one more goes.

    Returns:
        A plan. If it has `short_bytes` nothing is removed and the write MUST NOT begin.
    """
    retention = Retention.of(policy)
    in_order = sorted(infos, key=by_age)
    newest = {in_order[-1].id} if in_order and verified is None else set()
    shed = _Shedding(in_order, retention, usage, {*protected, *newest, *([verified] if verified else [])})
    coming = incoming or _unknown(in_order, incoming_bytes)
    after = retention.keep([*in_order, coming])
    loose = [info.id for info in in_order if info.id not in after]
    shed.to_limits(retention.limits, free_bytes, incoming_bytes, first=loose)
    limited = set(shed.why)
    if not shed.short_bytes:
        order = [*loose, *shed.by_worth()]
        short_bytes = 0 if free_bytes is None else incoming_bytes + SLACK_BYTES - free_bytes - shed.freed_bytes
        need_bytes = max(int(full), short_bytes)
        reserve_bytes = 0
        if free_bytes is not None and retention.limits.min_free_bytes is None:
            reserve_bytes = min(RESERVE_BYTES, int(_RESERVE * (shed.usage.used_bytes + free_bytes)))
        why = f"room for {units.size(incoming_bytes)}" + (
            "" if free_bytes is None else f", {units.size(free_bytes)} are free"
        )
        if shed.to_free(max(need_bytes, short_bytes + reserve_bytes), order, why):
            shed.to_free(need_bytes, order, why)
    if shed.short_bytes:
        return RetentionPlan(
            {info.id: "removing it would not make room" for info in in_order}, (), {}, {}, shed.short_bytes
        )
    kept = {info.id: after.get(info.id) or protected.get(info.id, "there is room") for info in shed.left}
    removed = shed.removed_in_order()
    gave_way = tuple(one for one in removed if one in after and one not in limited)
    return RetentionPlan(kept, removed, shed.why, gave_way=gave_way)


class _Shedding:
    """Snapshots that go one after another, and the bytes that this frees."""

    def __init__(
        self, in_order: Sequence[SnapshotInfo], retention: Retention, usage: Usage | None, immune: set[str]
    ) -> None:
        self._in_order = in_order
        self._retention = retention
        self.usage = usage or Usage({info.id: {info.id: info.nbytes} for info in in_order})
        self._needed_by = Counter(chain.from_iterable(self.usage.files.values()))
        self._immune = immune
        self.why: dict[str, str] = {}
        self.freed_bytes = 0
        self.short_bytes = 0

    @property
    def left(self) -> list[SnapshotInfo]:
        return [info for info in self._in_order if info.id not in self.why]

    def removed_in_order(self) -> tuple[str, ...]:
        return tuple([info.id for info in self._in_order if info.id in self.why])

    def remove(self, snapshot: str, why: str) -> None:
        self.why[snapshot] = why
        for name, nbytes in self.usage.files.get(snapshot, {}).items():
            self._needed_by[name] -= 1
            if self._needed_by[name] == 0:
                self.freed_bytes += nbytes

    def to_limits(
        self, limits: ByteLimits, free_bytes: int | None, incoming_bytes: int = 0, *, first: Sequence[str] = ()
    ) -> None:
        """Remove until both limits hold with `incoming_bytes` more, those in `first` first."""
        if limits == ByteLimits():
            return
        order = [*first, *(snapshot for snapshot in self.by_worth() if snapshot not in set(first))]
        short_bytes = [0]
        if limits.quota_bytes is not None:
            slack = SLACK_BYTES if incoming_bytes else 0
            need_bytes = self.usage.used_bytes - self.freed_bytes + incoming_bytes + slack - limits.quota_bytes
            short_bytes.append(self.to_free(need_bytes, order, f"over the quota of {units.size(limits.quota_bytes)}"))
        if limits.min_free_bytes is not None and free_bytes is not None:
            need_bytes = limits.min_free_bytes + incoming_bytes - free_bytes - self.freed_bytes
            why = f"{units.size(limits.min_free_bytes)} must stay free"
            short_bytes.append(self.to_free(need_bytes, order, why))
        self.short_bytes = max(short_bytes)

    def to_free(self, need_bytes: int, order: Sequence[str], why: str) -> int:
        """Remove in `order` until `need_bytes` are free. Where that is impossible nothing goes.

        Returns:
            How many bytes could not be freed.
        """
        candidates = [snapshot for snapshot in order if snapshot not in self._immune and snapshot not in self.why]
        gone = set(self.why)
        possible_bytes = self.usage.exclusive_bytes({*gone, *candidates}) - self.usage.exclusive_bytes(gone)
        if need_bytes > possible_bytes:
            return need_bytes - possible_bytes
        until_bytes = self.freed_bytes + need_bytes
        for snapshot in candidates:
            if self.freed_bytes >= until_bytes:
                break
            self.remove(snapshot, why)
        return 0

    def by_worth(self) -> list[str]:
        """The oldest first, and after all others what is kept for being the best."""
        best_of = [rule for rule in rules_in(self._retention.rule) if isinstance(rule, KeepBest)]
        best = {snapshot for rule in best_of for snapshot in rule.keep(self._in_order)}
        return [info.id for info in sorted(self._in_order, key=lambda info: (info.id in best, by_age(info)))]


def _unknown(in_order: Sequence[SnapshotInfo], nbytes: int) -> SnapshotInfo:
    """A snapshot to come, of which only the size is known."""
    if not in_order:
        return SnapshotInfo("", 0, 0, None, "", 0.0, nbytes)
    newest = in_order[-1]
    return dataclasses.replace(newest, id="", seq=newest.seq + 1, nbytes=nbytes, metrics={}, step=newest.step + 1)


def _slim(
    kept: Sequence[SnapshotInfo], components: Mapping[str, RetentionPolicy], whole: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Which of the kept snapshots lose which components. One that would lose all of them loses none."""
    drops: dict[str, list[str]] = {}
    if not components:
        return {}
    for component in sorted(components):
        having = [info for info in kept if component in info.components]
        wanted = components[component].keep(having)
        for info in having:
            if info.id not in wanted and info.id not in whole:
                drops.setdefault(info.id, []).append(component)
    slimmed = [info for info in kept if set(info.components) - set(drops.get(info.id, info.components))]
    return {info.id: tuple(drops[info.id]) for info in slimmed}
