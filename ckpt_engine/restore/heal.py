"""Heals the tiers of a run after a load, as far as their next writer cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt_engine.errors import CkptError, FormatError, StorageMissingError
from ckpt_engine.observe.events import Event
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.writer.mend_damage import mend_damage

if TYPE_CHECKING:
    from ckpt_engine.restore.load import Loaded

LEASE_SECONDS = 60.0
"""How long the writer of the dead trainer may keep the lease of the nearest tier."""


def after_load(
    memory: Storage | None,
    tiers: Sequence[Storage],
    found: Loaded,
    emit: Callable[[Event], object],
) -> set[str]:
    """Note what a load has passed over for good, and mend the nearest tier from memory; the files that are mended.

    Args:
        memory: what the writer of a dead trainer has; None: nothing.
        tiers: nearest first.
        found: what was loaded; the next load tries last what this one has passed over.
        emit: takes a notice for each file.
    """
    for place in map(Repository, tiers if passed_over(found) else ()):
        with suppress(CkptError):  # the writer reports what is wrong there
            for snapshot in {one.id for one in place.ids()}.intersection(passed_over(found)):
                if files := found.damaged.intersection(place.files_of(snapshot)):
                    place.damage.note(snapshot, files)
    if memory is not None:
        with suppress(CkptError), acquire(tiers[0], LeaseHolder.current(), LEASE_SECONDS) as lease:  # as above
            places = map(Repository, (tiers[0], memory, *tiers[1:]))
            return mend_damage(places, found.damaged, lease.check, emit)
    return set()


def passed_over(found: Loaded) -> set[str]:
    """What a load has passed over for good. A place that is unreachable may still have it whole."""
    useless = FormatError.code[:-2], StorageMissingError.code
    return set() if found.away else {one.id for one in found.rejected if one.code.startswith(useless)}
