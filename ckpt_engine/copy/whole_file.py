"""Makes the bytes of a damaged file of a run again from what several places of the run have.

They are whole only if every piece that a snapshot of the place needs has the digest in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from ckpt_engine.copy.add_parity import encoded
from ckpt_engine.copy.file_parity import restored
from ckpt_engine.copy.transfer import mapped, scratch_file, scratch_of, viewed
from ckpt_engine.errors import CkptError, CorruptError, FormatError, StorageMissingError
from ckpt_engine.grouping import grouped
from ckpt_engine.store import container, names
from ckpt_engine.store.container import digest
from ckpt_engine.store.data_files import lacking
from ckpt_engine.store.decode import decoder_of, stored_pieces
from ckpt_engine.store.manifest import DataFile, Piece
from ckpt_engine.store.repository import Repository

_Needed = Mapping[Piece, Sequence[tuple[str, str]]]
"""The pieces of a data file, each with the snapshots and entries that it is of, by what they have in common."""


@contextmanager
def whole_file(place: Repository, sources: Sequence[Repository], name: str) -> Iterator[tuple[memoryview, str]]:
    """The bytes of a damaged file as they were written, and where they come from.

    Raises:
        CorruptError: no place has them.
        StorageMissingError: no snapshot of the place needs them.
    """
    if (owner := names.manifest_id(name) or names.copy_id(name)) is not None:
        yield _manifest(place, sources, owner.id)
        return
    file, needed = _needed(place, names.data_file_of(name))
    if (parity := names.parity_of(name)) is not None:
        with mapped(place.storage, file, list(needed)) as image, encoded(place.storage, parity, image) as made:
            yield made, f"{place.storage.url}/{file.name}"
        return
    with viewed(scratch_file(scratch_of(place.storage), file.nbytes)) as image:
        yield image, _fill(place, sources, file, needed, image)


def _manifest(place: Repository, sources: Sequence[Repository], snapshot: str) -> tuple[memoryview, str]:
    """The manifest of the place, or of a source of the same run, whose data files the place has."""
    for source in (place, *sources):
        with suppress(CkptError):
            manifest, text = source.read_text(snapshot)
            ours = place.run_of_manifests() or place.run_id  # a fork has the snapshots of its origin by the same ids
            if manifest.run == ours and (source is place or not lacking(place.storage, manifest.files)):
                return memoryview(text), source.storage.url
    raise CorruptError(f"no place has the manifest of {snapshot}")


def _needed(place: Repository, name: str) -> tuple[DataFile, _Needed]:
    """A data file as the manifests of its place describe it. Raises StorageMissingError if none does."""
    files: set[DataFile] = set()
    found: list[tuple[Piece, tuple[str, str]]] = []
    for parsed in place.ids():
        with suppress(FormatError):
            manifest = place.read(parsed.id)
            files.update(file for file in manifest.files if file.name == name)
            found += [
                (replace(piece, file=0, alias=False), (parsed.id, entry))
                for entry, piece in stored_pieces(manifest)
                if manifest.files[piece.file].name == name
            ]
    if not files:
        raise StorageMissingError(f"no snapshot needs {name}")
    return files.pop(), grouped(found)


def _fill(
    place: Repository,
    sources: Sequence[Repository],
    file: DataFile,
    needed: _Needed,
    image: memoryview,
) -> str:
    """Fill `image` with a data file, from its place as far as that is whole there; the URL of what served the rest."""

    def part_of(piece: Piece) -> memoryview:
        return image[piece.offset : piece.offset + piece.nbytes]

    made_by = restored(place.storage, file.name, out=image)
    if made_by is not None and all(digest(part_of(piece)) == piece.digest for piece in needed):
        return made_by
    every = (place, *sources)
    # What is left of a file that no place has whole is the last resort: at least its header has to be.
    for base, least in (*((one, file.nbytes) for one in every), (place, 1)):
        with suppress(CkptError):
            there = image[: sum(item.nbytes for item in base.storage.list(file.name) if item.name == file.name)]
            if there.nbytes >= least:
                base.storage.get_into(file.name, 0, there)
                container.parse_header(bytes(image[: container.header_nbytes(bytes(image[:8]))]))
                bad = [piece for piece in needed if digest(part_of(piece)) != piece.digest]
                if bad or base is not place:  # else it is the header that is wrong
                    break
    else:
        raise CorruptError(f"no place has the header of {file.name}")
    served = base.storage.url
    for piece in bad:
        found = (one for one in every for owner in needed[piece] if _serve(one, *owner, file, piece, part_of(piece)))
        if (source := next(found, None)) is None:
            raise CorruptError(f"no place has the bytes of {needed[piece][0][1]!r} in {file.name}")
        served = served if source is place else source.storage.url
    return served


def _serve(source: Repository, snapshot: str, entry: str, file: DataFile, piece: Piece, part: memoryview) -> bool:
    """Fill `part` with the bytes of a piece; whether the source has them."""
    with suppress(CkptError):
        source.storage.get_into(file.name, piece.offset, part)
        if digest(part) == piece.digest:
            return True
    with suppress(CkptError):  # it may store the snapshot in another form
        theirs = source.read(snapshot)
        placed = theirs.entries[entry].placed() if entry in theirs.entries else ()
        for start, one in placed:
            if one.content_digest == piece.digest:
                decoder_of(source.storage.get_into, theirs).read(entry, start, one, part)
                return True
    return False
