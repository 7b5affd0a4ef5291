"""The line of history that a load continues, and what it has left of newer snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckpt_engine.errors import CkptError, FormatError, StorageMissingError
from ckpt_engine.restore import ask_tiers
from ckpt_engine.store.branches import continued
from ckpt_engine.store.repository import Repository

if TYPE_CHECKING:
    from ckpt_engine.restore.load import Loaded

TIDY_FROM = 16
"""A line that names so many attempts is looked through for those that have left nothing."""


def before_of(
    found: Loaded, where: Callable[[], Sequence[Repository]], *, newest: bool, back: bool = False
) -> tuple[tuple[str, int], ...]:
    """What is `before` in the line of a process that has loaded `found`; see `branches.continued`.

    Args:
        where: all places; asked for only if it matters what else there is.
        newest: it was asked for the newest usable one: what is newer cannot be used.
        back: what is newer is to be left: the run has diverged in it.
    """
    is_newest = found.newest_seq <= found.info.seq
    if is_newest and len(found.info.line.before) < TIDY_FROM:
        return continued(found.info, (), ())
    try:
        there = ask_tiers.snapshots(where())
    except CkptError:
        return continued(found.info, (), ()) if is_newest else ()  # who knows what there is
    newer = [info for info in there if info.seq > found.info.seq]
    superseded = {info.id for info in newer} if back else passed_over(found) if newest else set()
    before = continued(found.info, newer, superseded)
    left = {info.line.attempt for info in there}
    return before if found.away else tuple(one for one in before if one[0] in left)


def passed_over(found: Loaded) -> set[str]:
    """What a load has passed over for good. A place that is unreachable may still have it whole."""
    useless = FormatError.code[:-2], StorageMissingError.code
    return set() if found.away else {one.snapshot for one in found.rejected if one.code.startswith(useless)}
