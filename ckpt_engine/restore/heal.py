"""Heals the tiers of a run after a load, as far as their next writer cannot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from ckpt_engine.errors import CkptError
from ckpt_engine.observe.events import Event
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.writer.mend_damage import mend_damage

LEASE_SECONDS = 60.0
"""How long the writer of the dead trainer may keep the lease of the nearest tier."""


def mend_from_memory(
    memory: Storage | None, tiers: Sequence[Storage], damaged: Collection[str], emit: Callable[[Event], object]
) -> set[str]:
    """Mend files of the nearest tier while memory is attached; their names. The next writer does the rest.

    Args:
        memory: what the writer of a dead trainer has; None: nothing.
        tiers: nearest first.
        emit: takes a notice for each file.
    """
    if memory is None or not damaged:
        return set()
    with suppress(CkptError), acquire(tiers[0], LeaseHolder.current(), LEASE_SECONDS) as lease:  # the writer reports it
        places = map(Repository, (tiers[0], memory, *tiers[1:]))
        return mend_damage(places, damaged, lease.check, emit)
    return set()


def quarantine(tiers: Sequence[Storage], snapshots: Collection[str], damaged: Collection[str]) -> None:
    """Note at each tier which snapshots a load has passed over for good: the next one tries them last.

    Args:
        damaged: the data files that it has found damaged.
    """
    for place in map(Repository, tiers if snapshots else ()):
        with suppress(CkptError):  # the writer reports what is wrong there
            for snapshot in {one.id for one in place.ids()}.intersection(snapshots):
                if files := set(damaged).intersection(place.files_of(snapshot)):
                    place.damage.note(snapshot, files)
