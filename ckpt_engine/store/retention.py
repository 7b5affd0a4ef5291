"""Which snapshots stay: pure policies over a run's snapshots, and the plan they lead to.

Laws (tests/store/test_retention.py): a plan depends neither on the order of the snapshots nor on the clock; planning
again after the plan was executed removes nothing; the newest snapshot always stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

from ckpt_engine.store.manifest import SnapshotInfo

NEWEST = "newest"
_NOTHING: Mapping[str, str] = MappingProxyType({})


class RetentionPolicy(Protocol):
    """Says what to keep, given all snapshots of a run in any order. Pure."""

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
        newest = sorted(infos, key=_age, reverse=True)[: self.n]
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
        for info in sorted(infos, key=lambda info: (-info.step, _age(info))):
            first[info.step // self.n] = info
        return {info.id: f"first from step {mark * self.n} on" for mark, info in first.items() if mark > 0}


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


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to each snapshot: kept with a reason, or removed (oldest first)."""

    keep: Mapping[str, str]
    remove: tuple[str, ...]


def plan(infos: Sequence[SnapshotInfo], policy: RetentionPolicy, protected: Mapping[str, str] = _NOTHING) -> Plan:
    """What `policy` does to the snapshots `infos`.

    Args:
        protected: ids kept whatever the policy says, with the reason. The newest snapshot always is.
    """
    if not infos:
        return Plan({}, ())
    in_order = sorted(infos, key=_age)
    reasons = dict(policy.keep(infos))
    for snapshot, reason in {in_order[-1].id: NEWEST, **protected}.items():
        reasons.setdefault(snapshot, reason)
    keep = {info.id: reasons[info.id] for info in in_order if info.id in reasons}
    return Plan(keep, tuple(info.id for info in in_order if info.id not in keep))


def policy_from(keep: Mapping[str, Any]) -> RetentionPolicy:
    """The policy of a `keep` setting: `{"last": n, "every_n_steps": n, "best": {"monitor": m, "mode": "min", "k": k}}`.

    Each key is optional and may be None; `best` may be a list; nothing at all keeps every snapshot.

    Raises:
        ValueError: an unknown key or an impossible number.
    """
    if unknown := set(keep) - {"last", "every_n_steps", "best"}:
        raise ValueError(f"keep knows last, every_n_steps and best, not {', '.join(sorted(unknown))}")
    policies: list[RetentionPolicy] = []
    if keep.get("last") is not None:
        policies.append(KeepLast(keep["last"]))
    if keep.get("every_n_steps") is not None:
        policies.append(KeepEveryNSteps(keep["every_n_steps"]))
    best = keep.get("best") or []
    policies += [KeepBest(**one) for one in ([best] if isinstance(best, Mapping) else best)]
    return Union(tuple(policies)) if policies else KeepAll()


def _age(info: SnapshotInfo) -> tuple[int, str]:
    return info.seq, info.id


def _require_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"keep.{name} must be a whole number above 0, not {value!r}")
