"""Retention: which snapshots stay. Its rules, the lines of history that they protect, and the plan of what goes. Pure.

No rule asks a clock. Ages follow from the times in the snapshots themselves, so a run that pauses loses nothing.

Each process is an attempt of its own. One that resumes names the attempts that it continues, each up to the snapshot
that it saw: whatever another job makes of the same snapshots, before or after, is of another line. So nothing has to be
known of other jobs to leave their work alone.

The plan of retention: what a policy and its limits do to a run's snapshots, after a write and before one.

Laws (tests/store/test_retention*.py): a plan depends neither on the order of the snapshots nor on a clock; planning
again after the plan was executed removes nothing; the newest snapshot that is whole always stays, and so does what is
protected; protecting more never makes a rule keep less; after a plan the limits hold, or nothing was removed for them
and the plan says how many bytes are missing.

Preflight: whether what a retention policy keeps will fit, said before the disk is full.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, Protocol

from ckpt_engine.observe import units
from ckpt_engine.store.manifest import Line, SnapshotInfo

Period = Literal["hour", "day", "week"]
_PERIOD_SECONDS: Mapping[Period, int] = {"hour": 3600, "day": 86_400, "week": 604_800}
_PERIOD_STARTS: Mapping[Period, int] = {"hour": 0, "day": 0, "week": -3 * 86_400}
"""When period 0 began. 1970 began on a Thursday; weeks begin on Mondays."""
_PERIOD_TEXT: Mapping[Period, str] = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "week": "%Y-%m-%d"}
_END_OF_TIME = 253_402_300_800.0
"""The year 10000: what a broken clock says beyond that is no date."""


class RetentionPolicy(Protocol):
    """Says what to keep, given all snapshots of a run in any order. Pure.

    Removing snapshots that it does not keep MUST NOT make it drop others.
    """

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        """Ids to keep, each with its reason for people."""


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keeps every snapshot."""

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        return {info.id: "all" for info in infos}


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keeps the `n` newest snapshots."""

    n: int

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        newest = sorted(infos, key=by_age, reverse=True)[: self.n]
        return {info.id: f"last {i + 1} of {self.n}" for i, info in enumerate(newest)}


@dataclass(frozen=True, slots=True)
class KeepEveryNSteps:
    """Keeps the first snapshot at or after each of the steps n, 2n, 3n, …

    Of several with that very step (a resumed run repeats steps) it keeps the newest.
    """

    n: int

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        first: dict[int, SnapshotInfo] = {}
        for info in sorted(infos, key=lambda info: (-info.step, by_age(info))):
            first[info.step // self.n] = info
        return {info.id: f"first from step {mark * self.n} on" for mark, info in first.items() if mark > 0}


@dataclass(frozen=True, slots=True)
class KeepPeriods:
    """Keeps the newest snapshot of each of the `n` latest hours, days or weeks that have one. Times are UTC.

    Periods without snapshots do not count: a run that slept for a month keeps its ladder. (So do Borg and restic.)
    """

    period: Period
    n: int

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        newest: dict[int, SnapshotInfo] = {}
        start, seconds = _PERIOD_STARTS[self.period], _PERIOD_SECONDS[self.period]
        for info in sorted(filter(_has_date, infos), key=by_age):
            newest[math.floor((info.created - start) / seconds)] = info
        latest = sorted(newest, reverse=True)[: self.n]
        return {
            newest[index].id: f"{self.period} of {self._text(start + index * seconds)} ({i + 1} of {self.n})"
            for i, index in enumerate(latest)
        }

    def _text(self, began: int) -> str:
        return datetime.fromtimestamp(max(0, began), UTC).strftime(_PERIOD_TEXT[self.period])


@dataclass(frozen=True, slots=True)
class KeepAge:
    """Keeps what was taken at most `seconds` before the newest snapshot."""

    seconds: float

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        if not infos:
            return {}
        now = max(infos, key=by_age)
        ages = {info.id: now.created - info.created if _has_date(now) and _has_date(info) else 0.0 for info in infos}
        text = units.duration(self.seconds)
        return {
            snapshot: f"{units.duration(max(0.0, age))} older than the newest, within {text}"
            for snapshot, age in ages.items()
            if age <= self.seconds
        }


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keeps the `k` snapshots with the smallest (`min`) or largest (`max`) value of the metric `monitor`.

    A snapshot without that metric, or with a value that is not finite, is never among them. Equal values: newer first.
    """

    monitor: str
    mode: Literal["min", "max"] = "min"
    k: int = 1

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        sign = 1 if self.mode == "min" else -1
        ranked = [
            (sign * value, -info.seq, info.id, value)
            for info in infos
            if (value := info.metrics.get(self.monitor)) is not None and math.isfinite(value)
        ]
        best = sorted(ranked)[: self.k]
        return {
            snapshot: f"best {i + 1} of {self.k} by {self.monitor} ({self.mode}): {value:.6g}"
            for i, (_, _, snapshot, value) in enumerate(best)
        }


@dataclass(frozen=True, slots=True)
class Union:
    """Keeps what any of its policies keeps."""

    policies: tuple[RetentionPolicy, ...]

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        reasons: dict[str, str] = {}
        for policy in self.policies:
            for snapshot, reason in policy.keep(infos).items():
                reasons[snapshot] = f"{reasons[snapshot]}; {reason}" if snapshot in reasons else reason
        return reasons


def rules_in(policy: RetentionPolicy) -> Iterator[RetentionPolicy]:
    """The single rules that a policy unites."""
    if isinstance(policy, Union):
        for one in policy.policies:
            yield from rules_in(one)
    else:
        yield policy


by_age: Callable[[SnapshotInfo], tuple[int, str]] = attrgetter("seq", "id")
"""Sorts snapshots from old to new."""


def _has_date(info: SnapshotInfo) -> bool:
    return 0 <= info.created < _END_OF_TIME


UNNAMED_BRANCH = "unnamed"
"""The branch of snapshots that do not say of which attempt they are."""
OTHER_LINE = "of another line of history"
MOST_ATTEMPTS = 64
"""That a line names. What is of still earlier ones counts as of another line: it stays."""
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of history as listings show it: what its newest snapshot continues, as far as no newer branch has it too.

    Args:
        id: how it is called.
        snapshots: oldest first.
        own: ids of those that belong to no other branch.
    """

    id: str
    snapshots: tuple[SnapshotInfo, ...]
    own: frozenset[str]

    @property
    def newest(self) -> SnapshotInfo:
        """Its newest snapshot."""
        return self.snapshots[-1]


def branch_id(line: Line) -> str:
    """What the branch is called whose newest snapshot is of this line."""
    return line.attempt[:_SHOWN] or UNNAMED_BRANCH


def branches(infos: Sequence[SnapshotInfo]) -> list[Branch]:
    """All branches, first that of the newest snapshot, which a resume continues."""
    left = sorted(infos, key=by_age)
    found: list[tuple[Line, list[SnapshotInfo]]] = []
    while left:
        line = left[-1].line
        found.append((line, [info for info in left if line.has(info)]))
        left = [info for info in left if not line.has(info)]
    lines = [line for line, _ in found]
    return [
        Branch(
            branch_id(line),
            tuple(mine),
            frozenset(info.id for info in mine if not any(one.has(info) for one in lines if one is not line)),
        )
        for line, mine in found
    ]


def continued(
    resumed: SnapshotInfo, newer: Sequence[SnapshotInfo], superseded: Collection[str]
) -> tuple[tuple[str, int], ...]:
    """What is `before` in the line of a process that goes on from `resumed`; empty: it begins a line of its own.

    Going on from a snapshot that was continued already would make two histories of one. Unless what continued it is of
    no use any more: then that belongs to the line, and retention removes it like all that is old.

    Args:
        newer: what has a higher `seq`, as far as it is known.
        superseded: ids of those that cannot or are not to be resumed.
    """
    after = [info for info in newer if info.line.has(resumed)]
    if any(info.id not in superseded for info in after):
        return ()
    last: dict[str, int] = {}
    for info in sorted([resumed, *after], key=by_age, reverse=True):
        last.setdefault(info.line.attempt, info.seq)
    for attempt, seq in resumed.line.before:
        last.setdefault(attempt, seq)
    return tuple(last.items())[:MOST_ATTEMPTS]


_LIMITS = ("quota", "min_free")


def policy_from(keep: Mapping[str, Any]) -> RetentionPolicy:
    """The policy of a `keep` setting, as the options of a run have it.

    Args:
        keep: rules `last`, `every_n_steps`, `hourly`, `daily`, `weekly` (counts), `age` (seconds),
            `best` (`{"monitor": m, "mode": "min", "k": k}`); limits `quota` and `min_free` (bytes); `components`
            (component → rules). Each is optional and may be None; no rule at all keeps every snapshot.

    Returns:
        A rule, or a `Retention` where there are limits or components.
    """
    rule, limits = _rule_from(keep), ByteLimits(*map(keep.get, _LIMITS))
    components = {name: _rule_from(rules) for name, rules in (keep.get("components") or {}).items()}
    return Retention(rule, limits, components) if components or limits != ByteLimits() else rule


_RULES: Mapping[str, Callable[[Any], RetentionPolicy]] = {
    "last": KeepLast,
    "every_n_steps": KeepEveryNSteps,
    "hourly": partial(KeepPeriods, "hour"),
    "daily": partial(KeepPeriods, "day"),
    "weekly": partial(KeepPeriods, "week"),
    "age": KeepAge,
    "best": lambda best: KeepBest(**best),
}


def _rule_from(keep: Mapping[str, Any]) -> RetentionPolicy:
    policies = tuple(make(keep[name]) for name, make in _RULES.items() if keep.get(name) is not None)
    return Union(policies) if policies else KeepAll()


NEWEST = "newest"
NEWEST_WHOLE = "newest whole snapshot"
NO_RULE = "no rule keeps it"
SLACK_BYTES = 64 << 10
"""Room that a quota leaves for what is small: the record, the lease, pins, the last page of a file."""
RESERVE_BYTES = 256 << 20
_RESERVE = 0.01
"""Without `min_free`: this share of the run's and the free bytes stays free, at most `RESERVE_BYTES`."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ByteLimits:
    """What stored bytes may be at most (`quota_bytes`), and free ones at least (`min_free_bytes`). None: no limit."""

    quota_bytes: int | None = None
    min_free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """A rule, the limits that cut what it keeps, and rules for single components."""

    rule: RetentionPolicy
    limits: ByteLimits = ByteLimits()
    components: Mapping[str, RetentionPolicy] = field(default_factory=dict)

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        """What `rule` keeps."""
        return self.rule.keep(infos)

    @classmethod
    def of(cls, policy: RetentionPolicy) -> Retention:
        """`policy` with limits: its own, or none."""
        return policy if isinstance(policy, Retention) else cls(policy)


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes a run occupies.

    Args:
        files: by snapshot the files it needs, manifest included, with their bytes. Several may need the same file.
        other_bytes: all the rest of ours, garbage included.
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
    always = {newest: NEWEST} | ({verified: NEWEST_WHOLE} if verified else {})
    reasons = dict(retention.keep(in_order))
    for snapshot, reason in protected.items():
        reasons[snapshot] = f"{reason}; {reasons[snapshot]}" if snapshot in reasons else reason
    for snapshot, reason in always.items():
        reasons.setdefault(snapshot, reason)
    for info in in_order:
        if info.id not in reasons:
            shed.remove(info.id, NO_RULE)
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
        best: set[str] = set()
        for rule in rules_in(self._retention.rule):
            if isinstance(rule, KeepBest):
                best.update(rule.keep(self._in_order))
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
    parts = {info.id: set(info.components) for info in kept}
    return {snapshot: tuple(lost) for snapshot, lost in drops.items() if parts[snapshot] - set(lost)}


def preflight(
    policy: RetentionPolicy, snapshot_bytes: int, *, used_bytes: int = 0, free_bytes: int | None = None
) -> str | None:
    """A line for people if snapshots of so many bytes will not fit under `policy`; None: they do, as far as is known.

    Args:
        used_bytes: what the run occupies already.
        free_bytes: of the storage, if known.
    """
    limits = Retention.of(policy).limits
    room = [] if free_bytes is None else [used_bytes + free_bytes - (limits.min_free_bytes or 0)]
    room += [] if limits.quota_bytes is None else [limits.quota_bytes]
    last, others = _counts(policy)
    # The oldest goes before the next is written where room is short; the newest never does.
    count = 2 if others is None else max(2, last + others)
    if not room or count * snapshot_bytes <= (available_bytes := max(0, min(room))):
        return None
    there = "free" if not used_bytes and len(room) == 1 else "available"
    needed = f"{'at least ' if others is None else ''}{units.size(count * snapshot_bytes)}"
    advice = _advice(available_bytes // max(1, snapshot_bytes), last, others or 0)
    return (
        f"this run needs {needed} ({count} snapshots of {units.size(snapshot_bytes)}), "
        f"{units.size(available_bytes)} are {there}: {advice}"
    )


def _counts(policy: RetentionPolicy) -> tuple[int, int | None]:
    """How many snapshots `last` keeps, and how many the other rules may keep; None if they have no bound."""
    last, others = 0, 0
    for rule in rules_in(Retention.of(policy).rule):
        if isinstance(rule, KeepLast):
            last = max(last, rule.n)
        elif isinstance(rule, KeepPeriods):
            others += rule.n
        elif isinstance(rule, KeepBest):
            others += rule.k
        else:
            return last, None
    return last, others


def _advice(fitting: int, last: int, others: int) -> str:
    if fitting < 2:
        return "not even two snapshots fit, and the newest one stays until the next is complete"
    if fitting - others >= 1 and last:
        return f"last: {fitting - others} fits"
    return f"only {fitting} snapshots fit; keep fewer"
