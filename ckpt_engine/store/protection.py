"""Says which snapshots stay because they are young, whatever retention says.

The option `protect` says for how long. Ages are counted by the wall clock from when a snapshot was taken. The run's
record has the days, so that all that prune the place know them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository

DAY_SECONDS = 86_400
PROTECTED = "protected until"


def young(infos: Sequence[SnapshotInfo], days: float, now: float) -> dict[str, str]:
    """Id → reason of the snapshots that are younger than `days` at the wall-clock time `now`."""
    ends = {info.id: info.created + days * DAY_SECONDS for info in infos}
    return {
        snapshot: f"{PROTECTED} {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(end))}"
        for snapshot, end in ends.items()
        if days and end > now
    }


def begin(repository: Repository, days: float, say: Callable[[str], object]) -> None:
    """Note in the run's record how long its snapshots stay. Needs the lease.

    Args:
        say: takes what users have to know where the store does not refuse others; of a folder they know it.
    """
    repository.create_if_absent(days)
    able = repository.storage.capabilities
    if days and able.locks is None:
        why = able.retain(()) if able.retain is not None else "its client sets no Object Lock"
        if why is not None:
            say(
                f"others can delete the snapshots at {repository.storage.url} that `protect` keeps: {why}; use an S3 "
                "bucket with Object Lock, or credentials that cannot delete"
            )
