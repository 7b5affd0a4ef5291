"""Adds what only a place with parity has.

That is the parity of its data files, and a second copy of each manifest.
Both follow the commit of a snapshot. What was interrupted is made when this is called the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ckpt_engine.copy.file_parity import FileParity
from ckpt_engine.copy.transfer import mapped, pieces_of, scratch_file, scratch_of, viewed
from ckpt_engine.errors import FormatError, StorageMissingError
from ckpt_engine.store import container, names
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.names import ParityName
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage


def parts_of(place: Repository, wanted: tuple[int, int] | None = None) -> tuple[int, int] | None:
    """Into how many ranges data files of a place that was listed are cut, and how many parts of parity they have, or
    should have; None: none.

    Args:
        wanted: what they should have where nothing there says it.
    """
    names_there = (item.name for item in (place.storage.list(names.DATA) if place.copied else ()))
    return next(((one.data, one.parity) for one in map(names.parity_of, names_there) if one is not None), wanted)


def more_bytes(parts: tuple[int, int] | None, nbytes: int) -> int:
    """What the parity of so many bytes of data takes, about."""
    return 0 if parts is None else nbytes * parts[1] // parts[0]


def copy_manifests(place: Repository) -> None:
    """Store each manifest a second time that is stored once. Needs the lease.

    Raises:
        StorageError: some have only one object still; calling again continues.
    """
    for parsed in place.ids():
        if parsed.id not in place.copied:
            with suppress(FormatError, StorageMissingError):  # `ckpt verify` names it
                text = place.read_text(parsed.id)[1]
                place.storage.put(names.copy_name(parsed.id), [memoryview(text)], exclusive=False)
                place.copied.add(parsed.id)


def lacking_parity(place: Repository, parts: tuple[int, int]) -> dict[ParityName, tuple[Manifest, int]]:
    """The parity that data files lack, those of the newest snapshot first: with a manifest that names the file, and its
    number there.
    """
    listed = [item.name for item in place.storage.list(names.DATA)]
    without = set(filter(names.data_owner, listed)) - {one.file for one in map(names.parity_of, listed) if one}
    found: dict[str, tuple[Manifest, int]] = {}
    for parsed in place.ids():
        with suppress(FormatError, StorageMissingError):  # `ckpt verify` names it
            if without.intersection(place.files_of(parsed.id)):
                manifest = place.read(parsed.id)
                found |= {file.name: (manifest, index) for index, file in enumerate(manifest.files)}
    return {
        ParityName(name, *parts, manifest.files[index].nbytes): (manifest, index)
        for name, (manifest, index) in reversed(found.items())
        if name in without
    }


def missing_objects(place: Repository, wanted: tuple[int, int] | None) -> list[str]:
    """The parity and the second copies of manifests that a place lacks which has others, or should have: the names."""
    parts = parts_of(place, wanted)
    if parts is None:
        return []
    parity = map(str, lacking_parity(place, parts))
    return [*parity, *(names.copy_name(parsed.id) for parsed in place.ids() if parsed.id not in place.copied)]


def add_parity(
    place: Repository,
    parts: tuple[int, int],
    check_lease: Callable[[], object],
    scratch: str | None = None,
    step: Callable[[], object] = lambda: None,
) -> None:
    """Make the parity that data files lack, those of the newest snapshot first, from what is there.

    Args:
        parts: as of `parts_of`.
        check_lease: raises `LeaseHeldError` if the place is not ours any more.
        scratch: a folder for what is on no disk; None: the system's temporary one.
        step: called between parts of the work.

    Raises:
        StorageError: of the place, or the library is not installed; calling again continues.
    """
    for name, (manifest, index) in lacking_parity(place, parts).items():
        with (
            suppress(FormatError, StorageMissingError),  # `ckpt verify` names it
            mapped(place.storage, manifest.files[index], pieces_of(manifest, index), scratch) as image,
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
        FormatError: the header of the data file is damaged.
        StorageError: there is no room, or the library is not installed.
    """
    container.parse_header(bytes(image[: container.header_nbytes(bytes(image[:8]))]))  # the digests are of what follows
    parity = FileParity(storage, name)
    with viewed(scratch_file(scratch or scratch_of(storage), parity.nbytes)) as whole:
        parity.encode(image, whole, step)
        yield whole
