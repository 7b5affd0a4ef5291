"""Which snapshots a further tier still wants: a pure choice, newest first, without what is obsolete by now."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.retention import KeepAll, RetentionPolicy

ALWAYS_DUE = frozenset({"end", "signal"})
"""Reasons of snapshots that no rhythm leaves out: nothing comes after them."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """What a tier wants.

    Args:
        every_seconds, every_n_steps: see `TierConfig`.
        policy: its retention: what it would remove at once is not sent.
    """

    every_seconds: float | None = None
    every_n_steps: int | None = None
    policy: RetentionPolicy = field(default_factory=KeepAll)

    def wanted(self, near: Sequence[SnapshotInfo], far: Sequence[SnapshotInfo]) -> list[SnapshotInfo]:
        """The snapshots of `near` to copy to where `far` are, newest first.

        That is the newest, if it is due and newer than everything there, and what retention would keep there.
        """
        # By number, not by id: retention may have made another form of it, without some components, here or there.
        there = {info.seq for info in far}
        due = self._due([info for info in sorted(near, key=_age, reverse=True) if info.seq not in there], far)
        newest_there = max(map(_age, far), default=(-1, ""))
        stays = self.policy.keep([*far, *due])
        return [info for i, info in enumerate(due) if info.id in stays or (i == 0 and _age(info) > newest_there)]

    def _due(self, candidates: Sequence[SnapshotInfo], far: Sequence[SnapshotInfo]) -> list[SnapshotInfo]:
        """Those of `candidates`, newest first, that are not too close to one of `far` or before them."""
        if self.every_n_steps is None and self.every_seconds is None:
            return list(candidates)
        due = []
        taken = sorted(far, key=_age)
        for info in candidates:
            # Only neighbours count: a run that resumed from an older snapshot has the same steps once more.
            place = bisect.bisect(taken, _age(info), key=_age)
            before = taken[place - 1] if place > 0 else None
            after = taken[place] if place < len(taken) else None
            if info.reason in ALWAYS_DUE or not (self._close(before, info) or self._close(info, after)):
                due.append(info)
                taken.insert(place, info)
        return due

    def _close(self, earlier: SnapshotInfo | None, later: SnapshotInfo | None) -> bool:
        if earlier is None or later is None:
            return False
        if self.every_n_steps is not None:
            return earlier.step // self.every_n_steps == later.step // self.every_n_steps
        if self.every_seconds is not None:
            return 0 <= later.created - earlier.created < self.every_seconds  # below 0: the clock was set back
        return False


def _age(info: SnapshotInfo) -> tuple[int, str]:
    return info.seq, info.id
