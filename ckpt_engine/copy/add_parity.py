"""Adds what a place with parity has more than others: the parity of its data files, and a second copy of manifests.

Both follow the commit of a snapshot. What was interrupted is made when this is called the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ckpt_engine.copy.file_parity import FileParity
from ckpt_engine.copy.transfer import mapped, pieces_of, scratch_file, scratch_of, viewed
from ckpt_engine.errors import FormatError, StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.names import ParityName
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage

Parts = tuple[int, int]
"""So many ranges that a data file is cut into, and so many parts of parity."""


def parts_of(place: Repository) -> Parts | None:
    """How the parity of a place that was listed is made; None: it has none."""
    listed = place.storage.list(names.DATA) if place.copied else ()
    return next(((one.data, one.parity) for item in listed if (one := names.parity_of(item.name))), None)


def more_bytes(parts: Parts | None, nbytes: int) -> int:
    """What the parity of so many bytes of data takes, about."""
    return 0 if parts is None else nbytes * parts[1] // parts[0]


def add_parity(
    place: Repository,
    parts: Parts,
    check_lease: Callable[[], object],
    scratch: str | None = None,
    step: Callable[[], object] = lambda: None,
) -> None:
    """Make the parity that data files lack, those of the newest snapshot first, from what is there.

    Args:
        check_lease: raises `LeaseHeldError` if the place is not ours any more.
        scratch: a folder for what is on no disk; None: the system's temporary one.
        step: called between parts of the work.

    Raises:
        StorageError: of the place, or the library is not installed; calling again continues.
    """
    listed = [item.name for item in place.storage.list(names.DATA)]
    without = set(filter(names.data_owner, listed)) - {one.file for one in map(names.parity_of, listed) if one}
    found: dict[str, tuple[Manifest, int]] = {}
    for parsed in place.ids():
        with suppress(FormatError, StorageMissingError):  # `ckpt verify` names it
            if without.intersection(place.files_of(parsed.id)):
                manifest = place.read(parsed.id)
                found |= {file.name: (manifest, index) for index, file in enumerate(manifest.files)}
    for manifest, index in reversed([one for name, one in found.items() if name in without]):
        file = manifest.files[index]
        name = ParityName(file.name, *parts, file.nbytes)
        with (
            suppress(FormatError, StorageMissingError),  # as above
            mapped(place.storage, file, pieces_of(manifest, index), scratch) as image,
            encoded(place.storage, name, image, scratch, step) as whole,
        ):
            check_lease()
            place.storage.put(str(name), [whole], exclusive=False)


@contextmanager
def encoded(
    storage: Storage,
    name: ParityName,
    image: memoryview,
    scratch: str | None = None,
    step: Callable[[], object] = lambda: None,
) -> Iterator[memoryview]:
    """The bytes of a parity object, in a scratch file.

    Args:
        storage: where it is to be put.
        image: the bytes of the data file.
        scratch, step: as of `add_parity`.

    Raises:
        StorageError: there is no room, or the library is not installed.
    """
    parity = FileParity(storage, name)
    with viewed(scratch_file(scratch or scratch_of(storage), parity.nbytes)) as whole:
        parity.encode(image, whole, step)
        yield whole
