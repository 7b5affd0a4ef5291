"""The line of history that a load goes on with: all of its snapshot's, or none where others went on from there."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.errors import CkptError, FormatError, StorageMissingError
from ckpt_engine.restore import places
from ckpt_engine.restore.load import Loaded
from ckpt_engine.store.lines import continued
from ckpt_engine.store.repository import Repository

TIDY_FROM = 16
"""A line that names so many attempts is looked through for those that have left nothing."""


def before_of(
    found: Loaded, where: Sequence[Repository], *, newest: bool, back: bool = False
) -> tuple[tuple[str, int], ...]:
    """What is `before` in the line of a process that has loaded `found`; see `lines.continued`.

    Args:
        newest: it was asked for the newest usable one: what is newer cannot be used.
        back: what is newer is to be left: the run has diverged in it.
    """
    is_newest = found.newest_seq <= found.info.seq
    if is_newest and len(found.info.line.before) < TIDY_FROM:
        return continued(found.info, (), ())
    try:
        there = places.snapshots(where)
    except CkptError:
        return continued(found.info, (), ()) if is_newest else ()  # who knows what there is
    newer = [info for info in there if info.seq > found.info.seq]
    superseded = {info.id for info in newer} if back else _damaged(found) if newest else set()
    before = continued(found.info, newer, superseded)
    left = {info.line.attempt for info in there}
    return before if found.away else tuple(one for one in before if one[0] in left)


def _damaged(found: Loaded) -> set[str]:
    """What a load has passed over for good. A place that is away may still have it whole."""
    useless = FormatError.code[:-2], StorageMissingError.code
    return set() if found.away else {one.snapshot for one in found.rejected if one.code.startswith(useless)}
