"""Which snapshots a further tier wants next.

A pure choice, newest first, without what is obsolete by now.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckpt_engine.store.manifest import SnapshotInfo, by_age
from ckpt_engine.store.retention_rules import KeepAll, RetentionPolicy

LEAST_PACE_SECONDS = 60.0
"""Nearer to each other than that, copies come whenever the tier is ready: so few bytes are not worth a rule."""
ALWAYS_DUE = frozenset({"end", "signal"})
"""Reasons of snapshots that no rhythm leaves out: nothing comes after them."""


@dataclass(frozen=True, slots=True)
class CopySchedule:
    """What a tier wants.

    Args:
        every_seconds, every_n_steps: see `TierConfig`.
        policy: its retention: what it would remove at once is not sent.
        derived: the distance is not the user's.
    """

    every_seconds: float | None = None
    every_n_steps: int | None = None
    policy: RetentionPolicy = field(default_factory=KeepAll)
    derived: bool = False

    def paced(self, seconds: float | None) -> CopySchedule:
        """With copies at least so far apart, unless the user has said how far; None: as before."""
        if seconds is None or (not self.derived and (self.every_n_steps or self.every_seconds) is not None):
            return self
        return replace(self, every_seconds=seconds if seconds >= LEAST_PACE_SECONDS else None, derived=True)

    def wanted(self, near: Sequence[SnapshotInfo], far: Sequence[SnapshotInfo]) -> list[SnapshotInfo]:
        """The snapshots of `near` to copy to where `far` are, newest first.

        That is the newest, if it is due and newer than everything there, and what retention would keep there.
        """
        # By number, not by id: retention may have made another form of it, without some components, here or there.
        there = {info.seq for info in far}
        due = self._due([info for info in sorted(near, key=by_age, reverse=True) if info.seq not in there], far)
        newest_there = max(map(by_age, far), default=(-1, ""))
        stays = self.policy.keep([*far, *due])
        return [info for i, info in enumerate(due) if info.id in stays or (i == 0 and by_age(info) > newest_there)]

    def _due(self, candidates: Sequence[SnapshotInfo], far: Sequence[SnapshotInfo]) -> list[SnapshotInfo]:
        """Those of `candidates`, newest first, that are not too close to one of `far` or before them."""
        if self.every_n_steps is None and self.every_seconds is None:
            return list(candidates)
        due = []
        taken = sorted(far, key=by_age)
        for info in candidates:
            # Only neighbours count: a run that resumed from an older snapshot has the same steps once more.
            place = bisect.bisect(taken, by_age(info), key=by_age)
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
