"""Adds what a place with parity has more than others: the parity of its data files, and a second copy of manifests.

Both follow the commit of a snapshot. What is missing was interrupted, and is made when this is called the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from ckpt_engine.copy.file_parity import FileParity
from ckpt_engine.copy.transfer import mapped, pieces_of, scratch_file, scratch_of
from ckpt_engine.errors import CorruptError, FormatError, StorageError, StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.names import ParityName
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage

Parts = tuple[int, int]
"""So many ranges that a data file is cut into, and so many parts of parity."""


def parts_of(place: Repository) -> Parts | None:
    """How the newest parity of a place is made; None: it has none. Of a place that was listed."""
    if not place.copied:
        return None
    found = [one for item in place.storage.list(names.DATA) if (one := names.parity_of(item.name))]
    newest = max(found, key=str, default=None)
    return None if newest is None else (newest.data, newest.parity)


def more_bytes(parts: Parts | None, nbytes: int) -> int:
    """What the parity of so many bytes of data takes, about."""
    return 0 if parts is None else nbytes * parts[1] // parts[0]


def add_parity(
    target: Repository,
    parts: Parts,
    sources: Sequence[Repository] = (),
    *,
    scratch: str | None = None,
    check: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """Make the parity that data files lack, those of the newest snapshot first. Needs the lease.

    Args:
        sources: places that have the same data files, which are read first.
        scratch: a folder for what is not on a disk; None: the system's temporary one.
        check: called between parts of the work, and before each object is written; what it raises ends this.

    Returns:
        The names of the parity objects, each once it is durable.

    Raises:
        StorageError: of the target, or the library is not installed; calling again continues.
    """
    there = [item.name for item in target.storage.list(names.DATA)]
    made = {one.file: one for name in there if (one := names.parity_of(name)) is not None}
    for manifest, index in _lacking(target, {name for name in there if names.data_owner(name)} - made.keys()):
        file = manifest.files[index]
        name = ParityName(file.name, *parts, file.nbytes)
        with suppress(CorruptError):  # `ckpt verify` names it
            with (
                _image(manifest, index, (*sources, target), scratch) as image,
                encoded(target.storage, name, image, scratch, check) as whole,
            ):
                check()
                target.storage.put(str(name), [whole], exclusive=False)
            made[file.name] = name
            yield str(name)
    newest = target.ids()[-1:]
    if newest and (retain := target.storage.capabilities.retain) is not None:
        retain([str(made[file]) for file in target.files_of(newest[0].id) if file in made])


@contextmanager
def encoded(
    storage: Storage,
    name: ParityName,
    image: memoryview,
    scratch: str | None = None,
    check: Callable[[], object] = lambda: None,
) -> Iterator[memoryview]:
    """The bytes of a parity object, in a scratch file.

    Args:
        storage: where it is to be put.
        image: the bytes of the data file.
        scratch, check: as of `add_parity`.

    Raises:
        StorageError: there is no room, or the library is not installed.
    """
    parity = FileParity(storage, name)
    memory = scratch_file(scratch or scratch_of(storage), parity.nbytes)
    try:
        with memoryview(memory) as whole:
            parity.encode(image, whole, check)
            yield whole
    finally:
        with suppress(BufferError):  # what was raised may still hold views
            memory.close()


def _lacking(place: Repository, without: set[str]) -> Iterator[tuple[Manifest, int]]:
    """The data files that have no parity, each in the newest manifest that names it, and its number there."""
    for parsed in reversed(place.ids()):
        with suppress(FormatError, StorageMissingError):  # as above
            if without.intersection(place.files_of(parsed.id)):
                manifest = place.read(parsed.id)
                for index, file in enumerate(manifest.files):
                    if file.name in without:
                        without.remove(file.name)
                        yield manifest, index


@contextmanager
def _image(manifest: Manifest, index: int, places: Sequence[Repository], scratch: str | None) -> Iterator[memoryview]:
    """A data file from the first place that has it as the manifest says. Raises CorruptError if none does."""
    file, image = manifest.files[index], None
    with ExitStack() as opened:
        for place in places:
            with suppress(FormatError, StorageError):
                image = opened.enter_context(mapped(place.storage, file, pieces_of(manifest, index), scratch))
                break
        if image is None:
            raise CorruptError(f"no place has {file.name} as it was written")
        yield image
