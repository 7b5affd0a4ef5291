"""What is said where a whole snapshot is asked for, and a place has only what some of the ranks wrote."""

from __future__ import annotations

from ckpt_engine.errors import PartialError
from ckpt_engine.store.manifest import SnapshotInfo


def require_whole(info: SnapshotInfo, url: str) -> None:
    """Raises `PartialError` if it is not whole; says where all of it is to be had."""
    if info.partial is not None:
        raise PartialError(
            f"{url} has the shares of {info.partial} only",
            hint="`ckpt cp` the folders of all nodes to one place and use that, or a tier that all nodes share",
        )
