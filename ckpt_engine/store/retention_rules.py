"""Rules that say which snapshots stay, and the lines of history they protect: pure functions of what a listing shows.

No rule asks a clock. Ages follow from the times in the snapshots themselves, so a run that pauses loses nothing.

Lines of history: which snapshots one run made one after another, and which are of another branch. Pure.

Each process is an attempt of its own. One that resumes names the attempts that it continues, each up to the snapshot
that it saw: whatever another job makes of the same snapshots, before or after, is of another line. So nothing has to be
known of other jobs to leave their work alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import Literal, Protocol

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
        ...


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keeps every snapshot."""

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        return {info.id: "all" for info in infos}


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keeps the `n` newest snapshots."""

    n: int

    def __post_init__(self) -> None:
        _require_positive("last", self.n)

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        newest = sorted(infos, key=by_age, reverse=True)[: self.n]
        return {info.id: f"last {i + 1} of {self.n}" for i, info in enumerate(newest)}


@dataclass(frozen=True, slots=True)
class KeepEveryNSteps:
    """Keeps the first snapshot at or after each of the steps n, 2n, 3n, …

    Of several with that very step (a resumed run repeats steps) it keeps the newest.
    """

    n: int

    def __post_init__(self) -> None:
        _require_positive("every_n_steps", self.n)

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

    def __post_init__(self) -> None:
        _require_positive({"hour": "hourly", "day": "daily", "week": "weekly"}[self.period], self.n)

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

    def __post_init__(self) -> None:
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float) or not self.seconds > 0:
            raise ValueError(f"keep.age must be a duration above 0, not {self.seconds!r}")

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

    def __post_init__(self) -> None:
        _require_positive("best.k", self.k)
        if self.mode not in ("min", "max"):
            raise ValueError(f"best.mode must be 'min' or 'max', not {self.mode!r}")

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


def _require_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"keep.{name} must be a whole number above 0, not {value!r}")


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
