"""Retention: a `keep` setting as the policy it asks for, and the names of everything around it in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_engine.store.retention_plan import (
    NEWEST,
    NEWEST_WHOLE,
    SLACK_BYTES,
    Limits,
    Plan,
    Retention,
    Usage,
    plan,
    plan_before_write,
)
from ckpt_engine.store.retention_rules import (
    KeepAge,
    KeepAll,
    KeepBest,
    KeepEveryNSteps,
    KeepLast,
    KeepPeriods,
    Period,
    RetentionPolicy,
    Union,
)

__all__ = [
    "NEWEST",
    "NEWEST_WHOLE",
    "SLACK_BYTES",
    "KeepAge",
    "KeepAll",
    "KeepBest",
    "KeepEveryNSteps",
    "KeepLast",
    "KeepPeriods",
    "Limits",
    "Plan",
    "Retention",
    "RetentionPolicy",
    "Union",
    "Usage",
    "plan",
    "plan_before_write",
    "policy_from",
]

_LADDER: Mapping[str, Period] = {"hourly": "hour", "daily": "day", "weekly": "week"}
_RULES = ("last", "every_n_steps", *_LADDER, "age", "best")
_LIMITS = ("quota", "min_free")
_COMPONENTS = "components"


def policy_from(keep: Mapping[str, Any]) -> RetentionPolicy:
    """The policy of a `keep` setting.

    Args:
        keep: rules `last`, `every_n_steps`, `hourly`, `daily`, `weekly` (counts), `age` (seconds),
            `best` (`{"monitor": m, "mode": "min", "k": k}` or a list of these); limits `quota` and `min_free` (bytes);
            `components` (component → rules). Each is optional and may be None; no rule at all keeps every snapshot.

    Returns:
        A rule, or a `Retention` where there are limits or components.

    Raises:
        ValueError: an unknown key or an impossible number.
    """
    _require_known(keep, (*_RULES, *_LIMITS, _COMPONENTS), "keep")
    rule = _rule_from(keep)
    limits = Limits(*(_bytes_from(keep, name) for name in _LIMITS))
    components = {}
    for name, rules in (keep.get(_COMPONENTS) or {}).items():
        _require_known(rules, _RULES, f"keep.components.{name}")
        components[name] = _rule_from(rules)
    if limits == Limits() and not components:
        return rule
    return Retention(rule, limits, components)


def _rule_from(keep: Mapping[str, Any]) -> RetentionPolicy:
    policies: list[RetentionPolicy] = []
    if keep.get("last") is not None:
        policies.append(KeepLast(keep["last"]))
    if keep.get("every_n_steps") is not None:
        policies.append(KeepEveryNSteps(keep["every_n_steps"]))
    policies += [KeepPeriods(period, keep[name]) for name, period in _LADDER.items() if keep.get(name) is not None]
    if keep.get("age") is not None:
        policies.append(KeepAge(keep["age"]))
    best = keep.get("best") or []
    policies += [KeepBest(**one) for one in ([best] if isinstance(best, Mapping) else best)]
    return Union(tuple(policies)) if policies else KeepAll()


def _bytes_from(keep: Mapping[str, Any], name: str) -> int | None:
    value = keep.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"keep.{name} must be a number of bytes above 0, not {value!r}")
    return value


def _require_known(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    if unknown := set(given) - set(known):
        raise ValueError(f"{where} knows {', '.join(known)}, not {', '.join(sorted(unknown))}")
