"""The lines of history of a run: which snapshots continue which.

Each process is an attempt of its own. One that resumes names the attempts that it continues, each up to the snapshot
that it saw: whatever another job makes of the same snapshots, before or after, is of another line. So nothing has to be
known of other jobs to leave their work alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ckpt_engine.store.manifest import Line, SnapshotInfo, by_age

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
    """What is `before` in the line of a process that resumes from `resumed`; empty: it begins a line of its own.

    To resume from a snapshot that was continued already would make two histories of one. Unless what continued it is of
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
