"""Whether what a retention policy keeps will fit, reported before the disk is full."""

from __future__ import annotations

from ckpt_engine.observe import units
from ckpt_engine.store.retention_rules import (
    KeepBest,
    KeepLast,
    KeepPeriods,
    Retention,
    RetentionPolicy,
    rules_in,
)


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
    count, is_bounded = most_kept(policy)
    if not room or count * snapshot_bytes <= (available_bytes := max(0, min(room))):
        return None
    there = "free" if not used_bytes and len(room) == 1 else "available"
    needed = f"{'' if is_bounded else 'at least '}{units.size(count * snapshot_bytes)}"
    advice = _advice(available_bytes // max(1, snapshot_bytes), last, others or 0)
    return (
        f"this run needs {needed} ({count} snapshots of {units.size(snapshot_bytes)}), "
        f"{units.size(available_bytes)} are {there}: {advice}"
    )


def most_kept(policy: RetentionPolicy) -> tuple[int, bool]:
    """How many snapshots have to fit, and whether there are never more."""
    last, others = _counts(policy)
    # The oldest goes before the next is written where room is short; the newest never does.
    return (2, False) if others is None or Retention.of(policy).protect_days else (max(2, last + others), True)


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
