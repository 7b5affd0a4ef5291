"""Which snapshots a further tier still wants: a pure choice, newest first, without what is obsolete by now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.retention import KeepAll, RetentionPolicy, policy_from

ALWAYS_DUE = frozenset({"end", "signal"})
"""Reasons of snapshots that no rhythm leaves out: nothing comes after them."""
_LASTING = ("every_n_steps", "hourly", "daily", "weekly", "best")
"""Rules that may want a snapshot although a newer one is there."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """What a tier wants.

    Args:
        every_seconds, every_n_steps: see `TierConfig`.
        lasting: keeps what is worth sending after a newer one was sent; None: only newer ones are.
    """

    every_seconds: float | None = None
    every_n_steps: int | None = None
    lasting: RetentionPolicy | None = field(default_factory=KeepAll)

    @classmethod
    def of(cls, every_seconds: float | None, every_n_steps: int | None, keep: Mapping[str, Any]) -> Rhythm:
        """The rhythm of a tier with the retention `keep`.

        Raises:
            ValueError: `keep` is impossible.
        """
        given = {name: value for name, value in keep.items() if value}
        if not given.keys() & {"last", "age", *_LASTING}:
            return cls(every_seconds, every_n_steps)  # everything stays there
        lasting = {name: given[name] for name in _LASTING if name in given}
        return cls(every_seconds, every_n_steps, policy_from(lasting) if lasting else None)

    def wanted(self, near: Sequence[SnapshotInfo], far: Sequence[SnapshotInfo]) -> list[SnapshotInfo]:
        """The snapshots of `near` to copy to where `far` are, the most valuable first.

        That is the newest, if it is due and newer than everything there, then what the tier would keep for longer.
        """
        there = {info.id for info in far}
        due = self._due([info for info in sorted(near, key=_age, reverse=True) if info.id not in there], list(far))
        newest_there = max(map(_age, far), default=(-1, ""))
        stays = self.lasting.keep([*far, *due]) if self.lasting is not None else {}
        return [info for i, info in enumerate(due) if info.id in stays or (i == 0 and _age(info) > newest_there)]

    def _due(self, candidates: Sequence[SnapshotInfo], taken: list[SnapshotInfo]) -> list[SnapshotInfo]:
        """Those of `candidates`, newest first, that are not too close to one that is taken or before them."""
        due = []
        for info in candidates:
            # Only neighbours count: a run that resumed from an older snapshot has the same steps once more.
            before = max((other for other in taken if _age(other) < _age(info)), key=_age, default=None)
            after = min((other for other in taken if _age(other) > _age(info)), key=_age, default=None)
            if info.reason in ALWAYS_DUE or not (self._close(before, info) or self._close(info, after)):
                due.append(info)
                taken.append(info)
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
