"""The rules of retention: which snapshots a policy keeps.

No rule asks a clock. Ages follow from the times in the snapshots themselves, so a run that pauses loses nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, Protocol

from ckpt_engine.observe import units
from ckpt_engine.store.manifest import SnapshotInfo, by_age

Period = Literal["hour", "day", "week"]
_PERIOD_SECONDS: Mapping[Period, int] = {"hour": 3600, "day": 86_400, "week": 604_800}
_PERIOD_STARTS: Mapping[Period, int] = {"hour": 0, "day": 0, "week": -3 * 86_400}
"""When period 0 began. 1970 began on a Thursday; weeks begin on Mondays."""
_PERIOD_TEXT: Mapping[Period, str] = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "week": "%Y-%m-%d"}
_END_OF_TIME = 253_402_300_800.0
"""The year 10000: what a broken clock says beyond that is no date."""
_LIMITS = ("quota", "min_free")


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
        by_step = sorted(infos, key=lambda info: (-info.step, by_age(info)))
        first = {info.step // self.n: info for info in by_step}
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


def rules_in(policy: RetentionPolicy) -> tuple[RetentionPolicy, ...]:
    """The single rules that a policy unites."""
    return policy.policies if isinstance(policy, Union) else (policy,)


def _has_date(info: SnapshotInfo) -> bool:
    return 0 <= info.created < _END_OF_TIME


def policy_from(keep: Mapping[str, Any]) -> RetentionPolicy:
    """The policy of a `keep` setting, as the options of a run have it.

    Args:
        keep: rules `last`, `every_n_steps`, `hourly`, `daily`, `weekly` (counts), `age` (seconds),
            `best` (`{"monitor": m, "mode": "min", "k": k}`); limits `quota` and `min_free` (bytes); `components`
            (component → rules); `protect_days`. Each is optional and may be None; no rule at all keeps every snapshot.

    Returns:
        A rule, or a `Retention` where there is more than rules.
    """
    rule, limits = _rule_from(keep), ByteLimits(*map(keep.get, _LIMITS))
    days = keep.get("protect_days") or 0
    components = {name: _rule_from(rules) for name, rules in (keep.get("components") or {}).items()}
    return Retention(rule, limits, components, days) if components or days or limits != ByteLimits() else rule


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


@dataclass(frozen=True, slots=True)
class ByteLimits:
    """What stored bytes may be at most (`quota_bytes`), and free ones at least (`min_free_bytes`). None: no limit."""

    quota_bytes: int | None = None
    min_free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """A rule, the limits that cut what it keeps, rules for single components, and the days in which nothing goes."""

    rule: RetentionPolicy
    limits: ByteLimits = ByteLimits()
    components: Mapping[str, RetentionPolicy] = field(default_factory=dict)
    protect_days: float = 0.0

    def keep(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str]:
        """What `rule` keeps."""
        return self.rule.keep(infos)

    @classmethod
    def of(cls, policy: RetentionPolicy) -> Retention:
        """`policy` with limits: its own, or none."""
        return policy if isinstance(policy, Retention) else cls(policy)
