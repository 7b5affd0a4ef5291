"""Plans what a snapshot writes into one repository: its whole image as one file, or only what is not there yet.

What is there is referred to in files of older snapshots. A file stays on the disk as long as one byte of it is needed,
so a reference is only worth making to files that are mostly needed: what lies unchanged in others is written once
more, apart from what changes, and referred to from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_engine.persist.job import EntryLayout
from ckpt_engine.persist.pieces import CutLayout, Extent
from ckpt_engine.store import layout as names
from ckpt_engine.store.container import build_header
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece

PAYS = 0.05
"""Less than this share of unchanged bytes is not looked for."""
ALIVE = 0.5
"""A file of which a smaller share is needed is not referred to any more."""
MOST_FILES = 16
"""Older files that one snapshot refers to, at most."""
CHANGED, SETTLED = 1, 2
"""Parts of a snapshot: the data file of what changes, and that of what does not."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A data file to write: its header, then ranges of the image back to back."""

    name: str
    header: bytes
    ranges: tuple[Extent, ...]

    @property
    def data(self) -> DataFile:
        """As the manifest names it."""
        return DataFile(self.name, len(self.header) + sum(extent.nbytes for extent in self.ranges))

    def blocks(self, image: memoryview) -> list[memoryview]:
        """Its bytes; the caller releases them."""
        parts = [image[extent.offset : extent.offset + extent.nbytes] for extent in self.ranges]
        return [memoryview(self.header), *parts] if self.header else parts


@dataclass(frozen=True, slots=True)
class Draft:
    """What one snapshot is to one repository.

    Args:
        new: data files to write.
        files, entries: for its manifest.
        source: the snapshot that holds what is referred to; None: nothing is.
        reused_bytes: what is not written again.
        cpu_seconds: what finding out has cost.
    """

    new: tuple[NewFile, ...]
    files: tuple[DataFile, ...]
    entries: Mapping[str, Entry]
    source: str | None = None
    reused_bytes: int = 0
    cpu_seconds: float = 0.0

    @property
    def new_bytes(self) -> int:
        """Bytes of all new data files."""
        return sum(one.data.nbytes for one in self.new)

    @property
    def old_files(self) -> tuple[DataFile, ...]:
        """The files of older snapshots."""
        mine = {one.name for one in self.new}
        return tuple(file for file in self.files if file.name not in mine)


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of the image: where it is, and where it is or will be stored. `old`: piece of the older snapshot."""

    extent: Extent
    digest: str
    old: Piece | None


def whole(snapshot: str, cut_layout: CutLayout, digests: Sequence[str]) -> Draft:
    """The image as it is, as one data file."""
    data = NewFile(names.data_name(snapshot), b"", (Extent(0, cut_layout.layout.nbytes),))
    return Draft((data,), (data.data,), cut_layout.entries(digests))


def unchanged_bytes(cut_layout: CutLayout, digests: Sequence[str], before: Manifest) -> int:
    """Bytes of the pieces that an older snapshot has too, in the same place of the same entry."""
    return _old_bytes(_paired(cut_layout, digests, before))


def partial(snapshot: str, cut_layout: CutLayout, digests: Sequence[str], before: Manifest) -> Draft | None:
    """Only what an older snapshot does not have. None: writing the whole image is no worse."""
    paired = _paired(cut_layout, digests, before)
    old_bytes = _old_bytes(paired)
    if old_bytes == 0 or old_bytes < PAYS * cut_layout.nbytes:
        return None
    kept = _worth_keeping(paired, before)
    composer = _Composer(snapshot, kept, before)
    for entry, parts in paired:
        composer.add(entry, parts)
    return composer.draft()


def _paired(cut_layout: CutLayout, digests: Sequence[str], before: Manifest) -> list[tuple[EntryLayout, list[_Part]]]:
    """The pieces of the image by entry, each with the same bytes in the older snapshot."""
    found = []
    position = 0
    for entry, extents in zip(cut_layout.layout.entries, cut_layout.extents, strict=True):
        old = before.entries.get(entry.name)
        same_form = old is not None and (old.dtype, old.shape) == (entry.dtype, entry.shape)
        there = _by_start(old.pieces) if old is not None and same_form else {}
        parts = []
        for extent in extents:
            piece = there.get(extent.offset - entry.offset)
            wanted = digests[position]
            is_same = piece is not None and piece.raw_nbytes == extent.nbytes and piece.content_digest == wanted
            parts.append(_Part(extent, wanted, piece if is_same else None))
            position += 1
        found.append((entry, parts))
    return found


def _old_bytes(paired: Sequence[tuple[EntryLayout, Sequence[_Part]]]) -> int:
    return sum(part.extent.nbytes for _, parts in paired for part in parts if part.old is not None)


def _by_start(pieces: Sequence[Piece]) -> dict[int, Piece]:
    found = {}
    start = 0
    for piece in pieces:
        if piece.base is None:
            found[start] = piece
        start += piece.raw_nbytes
    return found


def _worth_keeping(paired: Sequence[tuple[EntryLayout, Sequence[_Part]]], before: Manifest) -> frozenset[int]:
    """The files of the older snapshot that are referred to further."""
    needed: dict[int, int] = {}
    for _, parts in paired:
        for part in parts:
            if part.old is not None:
                needed[part.old.file] = needed.get(part.old.file, 0) + part.old.nbytes
    alive = [index for index, nbytes in needed.items() if nbytes >= ALIVE * before.files[index].nbytes]
    alive.sort(key=lambda index: (-needed[index], index))
    return frozenset(alive[:MOST_FILES])


class _Composer:
    """Puts together the files and the entries of a draft."""

    def __init__(self, snapshot: str, kept: frozenset[int], before: Manifest) -> None:
        self._snapshot = snapshot
        self._kept = kept
        self._before = before
        self._entries: list[tuple[EntryLayout, list[tuple[int, Piece]]]] = []
        self._arrays: dict[int, list[tuple[str, str, Sequence[int], int]]] = {CHANGED: [], SETTLED: []}
        self._ranges: dict[int, list[Extent]] = {CHANGED: [], SETTLED: []}
        self._sizes = {CHANGED: 0, SETTLED: 0}
        self._reused_bytes = 0

    def add(self, entry: EntryLayout, parts: Sequence[_Part]) -> None:
        """The next entry. Pieces of new files get their place in it, as yet without its header."""
        targets = [self._target(part) for part in parts]
        together = len(set(targets)) <= 1
        pieces: list[tuple[int, Piece]] = []
        for run in _runs(targets):
            target = targets[run.start]
            members = parts[run.start : run.stop]
            if target is None:
                for part in members:
                    assert part.old is not None
                    pieces.append((0, part.old))
                    self._reused_bytes += part.extent.nbytes
                continue
            first, last = members[0].extent, members[-1].extent
            low, high = first.offset - entry.offset, last.offset + last.nbytes - entry.offset
            if together:
                self._arrays[target].append((entry.name, entry.container_dtype, _form(entry), entry.nbytes))
            else:
                self._arrays[target].append((f"{entry.name}~[{low}:{high}]", "U8", (high - low,), high - low))
            for part in members:
                size = part.extent.nbytes
                pieces.append((target, Piece(0, self._sizes[target], size, part.digest, size)))
                self._sizes[target] += size
            _extend(self._ranges[target], Extent(first.offset, high - low))
        if not parts:
            self._arrays[CHANGED].append((entry.name, entry.container_dtype, _form(entry), 0))
        self._entries.append((entry, pieces))

    def _target(self, part: _Part) -> int | None:
        """The new file that a piece goes to; None: it is referred to."""
        if part.old is None:
            return CHANGED
        return None if part.old.file in self._kept else SETTLED

    def draft(self) -> Draft:
        """What has been added."""
        new: dict[int, NewFile] = {}
        for target, arrays in self._arrays.items():
            if self._sizes[target]:
                header = build_header(arrays, {"format": "pt"})
                name = names.data_name(self._snapshot, part=target)
                new[target] = NewFile(name, header, tuple(self._ranges[target]))
        used = {piece.file for _, pieces in self._entries for target, piece in pieces if target == 0}
        old = sorted((self._before.files[index] for index in used), key=lambda file: file.name)
        files = (*old, *(one.data for one in new.values()))
        index = {file.name: number for number, file in enumerate(files)}

        def placed(target: int, piece: Piece) -> Piece:
            if target == 0:
                return replace(piece, file=index[self._before.files[piece.file].name])
            file = new[target]
            return replace(piece, file=index[file.name], offset=len(file.header) + piece.offset)

        entries = {
            entry.name: Entry(entry.dtype, entry.shape, tuple(placed(*one) for one in pieces), entry.container_dtype)
            for entry, pieces in self._entries
        }
        source = self._before.info.id if used else None
        return Draft(tuple(new.values()), files, entries, source, self._reused_bytes)


def _form(entry: EntryLayout) -> tuple[int, ...]:
    """The shape under which an entry is an array of the container."""
    return entry.shape if entry.container_dtype != "U8" or entry.dtype == "uint8" else (entry.nbytes,)


def _runs(targets: Sequence[int | None]) -> list[range]:
    """Neighbours that go to the same place."""
    found: list[range] = []
    for number, target in enumerate(targets):
        if found and targets[found[-1].start] == target:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _extend(ranges: list[Extent], more: Extent) -> None:
    if ranges and ranges[-1].offset + ranges[-1].nbytes == more.offset:
        ranges[-1] = Extent(ranges[-1].offset, ranges[-1].nbytes + more.nbytes)
    else:
        ranges.append(more)
