"""Replaces damaged files of a run by the same bytes, which another of its places has.

A file is put in one step. What no place has stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from ckpt_engine.copy.add_parity import missing_objects
from ckpt_engine.copy.whole_file import whole_file
from ckpt_engine.errors import CorruptError, LeaseHeldError, StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.tools.check_run import CheckedCopies, Counting
from ckpt_engine.tools.stored_run import Run


@dataclass(frozen=True, slots=True)
class MendedFile:
    """A damaged file of a tier, its bytes, and the place that has what it lacked."""

    tier: str
    file: str
    nbytes: int
    source: str


def mend_run(
    run: Run, others: Sequence[Repository], checked: Sequence[CheckedCopies], counting: Counting, *, dry_run: bool
) -> list[MendedFile]:
    """Replace the damaged manifests and data files of a run, as far as another place has their bytes.

    Parity that is missing is made, too. That of a run which trains is left to its writer.

    Args:
        others: more places of the same run.
        checked: what is damaged at each place.
        counting: follows the bytes.
        dry_run: everything is read and compared, and nothing is written.

    Raises:
        LeaseHeldError: a process writes the run, and something is damaged.
        StorageError: a place cannot be written.
    """
    mended: list[MendedFile] = []
    for copies in checked:
        (place,) = (one for one in run.places if one.storage.url == copies.url)
        sources = [one for one in (*run.places, *others) if one.storage.url != copies.url]
        damaged = {one.file for one in copies.problems if one.file}
        # Manifests come first: they say what is needed of data files.
        wanted = sorted(damaged.union(missing_objects(place, run.parts.get(copies.url))), reverse=True)
        nbytes = sum(item.nbytes for item in place.storage.list("") if item.name in damaged)
        with (
            suppress(*() if damaged else (LeaseHeldError,)),
            acquire(place.storage) if wanted and not dry_run else nullcontext() as lease,
            counting(nbytes) as advance,
        ):
            for name in wanted:
                with (
                    suppress(CorruptError, StorageMissingError),
                    whole_file(place, sources, name) as (image, source),
                ):
                    if lease is not None:
                        lease.check()
                        place.storage.put(name, [image], exclusive=False)
                    mended.append(MendedFile(copies.url, name, image.nbytes, source))
                    advance(image.nbytes)
    return mended


def quarantine_rest(run: Run, checked: Sequence[CheckedCopies], mendable: Sequence[MendedFile]) -> None:
    """Note at each place durably which snapshots need damaged data files, and which are whole again. Needs no lease.

    Args:
        mendable: damaged files that another place has; what only needs these is not noted.

    Raises:
        StorageError: a place cannot be written.
    """
    known = {(one.tier, one.file) for one in mendable}
    for copies in checked:
        (place,) = (one for one in run.places if one.storage.url == copies.url)
        for verdict in copies.verdicts:
            damaged = {
                one.file for one in verdict.problems if one.file and one.is_damage and names.data_owner(one.file)
            }
            if damaged or verdict.ok:
                place.damage.note(verdict.snapshot, {file for file in damaged if (copies.url, file) not in known})
