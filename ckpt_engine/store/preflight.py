"""Preflight: whether what a retention policy keeps will fit, said before the disk is full. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.observe import units
from ckpt_engine.store.retention_plan import Retention
from ckpt_engine.store.retention_rules import KeepBest, KeepLast, KeepPeriods, RetentionPolicy, rules_in


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a run will need at most, and what it has.

    Args:
        count: snapshots at once, the one being written included; None where nothing limits them.
        needed_bytes: for these; without a bound for the two that every run needs: the newest and the next.
        available_bytes: what it may fill, its present snapshots included; None where unknown.
        text: one line for people.
    """

    count: int | None
    needed_bytes: int
    available_bytes: int | None
    text: str

    @property
    def fits(self) -> bool:
        """Whether `needed_bytes` are available, as far as is known."""
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes


def preflight(
    policy: RetentionPolicy, snapshot_bytes: int, *, used_bytes: int = 0, free_bytes: int | None = None
) -> Preflight:
    """Whether snapshots of `snapshot_bytes` fit under `policy`.

    Args:
        used_bytes: what the run occupies already.
        free_bytes: of the storage, if known.
    """
    limits = Retention.of(policy).limits
    room = [] if free_bytes is None else [used_bytes + free_bytes - (limits.min_free_bytes or 0)]
    room += [] if limits.quota_bytes is None else [limits.quota_bytes]
    available_bytes = max(0, min(room)) if room else None
    last, others = _counts(policy)
    # The oldest goes before the next is written where room is short; the newest never does.
    count = None if others is None else max(2, last + others)
    needed_bytes = (count or 2) * snapshot_bytes
    text = f"this run needs {'at least ' if count is None else ''}{units.size(needed_bytes)}"
    text += f" ({count or 2} snapshots of {units.size(snapshot_bytes)})"
    if available_bytes is None:
        return Preflight(count, needed_bytes, None, text)
    text += f", {units.size(available_bytes)} are {'free' if not used_bytes and len(room) == 1 else 'available'}"
    if needed_bytes > available_bytes:
        text += f": {_advice(available_bytes // max(1, snapshot_bytes), last, others or 0)}"
    elif count is None:
        text += f": {available_bytes // max(1, snapshot_bytes)} fit"
    return Preflight(count, needed_bytes, available_bytes, text)


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
