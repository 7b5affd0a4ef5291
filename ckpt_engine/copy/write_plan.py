"""Plans what a snapshot writes into one repository: its whole image as one file, or only what is not there yet.

What is there is referred to in files of older snapshots. A file stays on the disk as long as one byte of it is needed,
so what lies unchanged in files that are hardly needed is written once more, apart from what changes, and referred to
from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ckpt_engine.copy.job import EntryLayout
from ckpt_engine.copy.row_deltas import CODEC, Delta
from ckpt_engine.copy.staged import CutLayout, Extent
from ckpt_engine.store import names
from ckpt_engine.store.container import DTYPES, data_header, digest
from ckpt_engine.store.decode import chain_of
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece

PAYS = 0.05
"""Less than this share of unchanged bytes is not looked for."""
LEAST_BYTES = 1 << 20
"""Nor are fewer unchanged bytes: writing them takes a millisecond, and sharing costs another file and its sync."""
HEADER_BYTES = 16 << 10
MOST_FILES = 128
"""Older files that one snapshot refers to, at most."""
MOST_SPACE = 2.5
"""Bytes that older files may have, of those of the state."""
CHANGED, SETTLED, DELTAS = 1, 2, 3
"""Parts of a snapshot: its data file of what changes, that of what stays, and that of what changes in few rows."""

Encode = Callable[[EntryLayout, Extent, str, tuple[Piece, ...]], Delta | None]
"""A piece of the image (with its digest) as a delta against the older snapshot's piece, which comes with its bases."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A data file to write: its header, then back to back ranges of the image and encoded pieces."""

    name: str
    header: bytes
    content: tuple[Extent | bytes, ...]

    @property
    def data(self) -> DataFile:
        """As the manifest names it."""
        return DataFile(self.name, len(self.header) + sum(map(_size, self.content)))

    def blocks(self, image: memoryview) -> list[memoryview]:
        """Its bytes; the caller releases them."""
        parts = [
            memoryview(one) if isinstance(one, bytes) else image[one.offset : one.offset + one.nbytes]
            for one in self.content
        ]
        return [memoryview(self.header), *parts] if self.header else parts


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What one snapshot is to one repository.

    Args:
        new: data files to write.
        files, entries, bases: for its manifest.
        source: the snapshot that keeps alive what is referred to; None: nothing is.
        cpu_seconds: what finding out has cost.
    """

    new: tuple[NewFile, ...]
    files: tuple[DataFile, ...]
    entries: Mapping[str, Entry]
    bases: Mapping[str, Mapping[str, Mapping[int, Piece]]] = field(default_factory=dict)
    source: str | None = None
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
    """A piece of the image.

    Args:
        start: where it begins in its entry.
        chain: what the older snapshot has there, or what the delta was made against, and its bases; empty: nothing.
        delta: None: the piece is the same as the older one, if there is one.
        is_slow: few of its rows have changed until now: it is stored apart from what changes everywhere.
    """

    extent: Extent
    start: int
    digest: str
    chain: tuple[Piece, ...] = ()
    delta: Delta | None = None
    is_slow: bool = False

    @property
    def spared_bytes(self) -> int:
        stored_bytes = len(self.delta.stored) if self.delta is not None else 0
        return self.extent.nbytes - stored_bytes if self.chain else 0


_Paired = list[tuple[EntryLayout, list[_Part]]]


def whole(name: str, cut_layout: CutLayout, digests: Sequence[str]) -> WritePlan:
    """The image as it is, as one data file of that name."""
    data = NewFile(name, b"", (Extent(0, cut_layout.layout.nbytes),))
    return WritePlan((data,), (data.data,), cut_layout.entries(digests))


def partial(
    snapshot: str, rank: int, cut_layout: CutLayout, digests: Sequence[str], before: Manifest, encode: Encode
) -> WritePlan | None:
    """Only what an older snapshot (of this rank) does not have. None: writing the whole image is no worse."""
    paired = _paired(cut_layout, digests, before, encode)
    spared_bytes = _spared_bytes(paired)
    if spared_bytes < max(LEAST_BYTES, PAYS * cut_layout.nbytes):
        return None
    composer = _Composer(snapshot, rank, _worth_keeping(paired, before), before)
    for entry, parts in paired:
        composer.add(entry, parts)
    return composer.draft()


def _paired(cut_layout: CutLayout, digests: Sequence[str], before: Manifest, encode: Encode) -> _Paired:
    """The pieces of the image by entry, each with what the older snapshot has of it."""
    found: _Paired = []
    position = 0
    for entry, extents in zip(cut_layout.layout.entries, cut_layout.extents, strict=True):
        there = old_pieces(before, entry)
        parts = []
        for extent in extents:
            wanted, start = digests[position], extent.offset - entry.offset
            part = _Part(extent, start, wanted)
            piece = there.get(start)
            if piece is not None and piece.raw_nbytes == extent.nbytes:
                chain = tuple(chain_of(before, entry.name, start, piece))
                if any(one.group for one in chain):
                    pass  # decoding needs the other members of the group, too: it is written anew
                elif piece.content_digest == wanted:
                    part = replace(part, chain=chain)
                elif (delta := encode(entry, extent, wanted, chain)) is not None:
                    part = replace(part, chain=delta.over, delta=delta)
                else:
                    part = replace(part, is_slow=len(chain) > 1)
            parts.append(part)
            position += 1
        found.append((entry, parts))
    return found


def _spared_bytes(paired: _Paired) -> int:
    return sum(part.spared_bytes for _, parts in paired for part in parts)


def old_pieces(before: Manifest, entry: EntryLayout) -> dict[int, Piece]:
    """The pieces of an entry in an older snapshot, by the byte they begin at; none if it had another form."""
    old = before.entries.get(entry.name)
    if old is None or (old.dtype, old.shape) != (entry.dtype, entry.shape):
        return {}
    starts = accumulate((piece.raw_nbytes for piece in old.pieces), initial=0)
    return dict(zip(starts, old.pieces, strict=False))


def _worth_keeping(paired: _Paired, before: Manifest) -> frozenset[int]:
    """The files of the older snapshot that are referred to further.

    To leave one means to write anew what needs it. That is done if it frees at least as many bytes, and is no more than
    what changes: of a table of which few rows do, half a file is many times that. Such files are kept as long as all of
    them take no more than a few times the bytes of the state.
    """
    all_parts = [part for _, parts in paired for part in parts]
    needed: Counter[int] = Counter()
    for piece in {piece for part in all_parts for piece in part.chain}:
        needed[piece.file] += piece.nbytes
    costs: Counter[int] = Counter()
    for part in all_parts:
        for file in {piece.file for piece in part.chain}:
            costs[file] += part.extent.nbytes
    freed = {file: max(1, before.files[file].nbytes - HEADER_BYTES - nbytes) for file, nbytes in needed.items()}
    kept = set(sorted(needed, key=lambda file: (-needed[file], file))[:MOST_FILES])
    room_bytes = sum(part.extent.nbytes - part.spared_bytes for part in all_parts if not part.is_slow)
    over_bytes = sum(before.files[file].nbytes for file in kept)
    over_bytes -= int(MOST_SPACE * sum(part.extent.nbytes for part in all_parts))
    for file in sorted(kept, key=lambda file: (costs[file] / freed[file], file)):
        if over_bytes > 0 or costs[file] <= min(room_bytes, freed[file]):
            kept.remove(file)
            room_bytes -= costs[file]
            over_bytes -= before.files[file].nbytes
    return frozenset(kept)


@dataclass(slots=True)
class _Growing:
    """A new data file as it grows; offsets are as yet without its header."""

    arrays: list[tuple[str, str, Sequence[int], int]] = field(default_factory=list)
    content: list[Extent | bytes] = field(default_factory=list)
    nbytes: int = 0

    def append(self, one: Extent | bytes) -> int:
        """Returns where it begins."""
        last = self.content[-1] if self.content else None
        if isinstance(one, Extent) and isinstance(last, Extent) and last.offset + last.nbytes == one.offset:
            self.content[-1] = Extent(last.offset, last.nbytes + one.nbytes)
        else:
            self.content.append(one)
        self.nbytes += _size(one)
        return self.nbytes - _size(one)


class _Composer:
    """Puts together the files and the entries of a draft."""

    def __init__(self, snapshot: str, rank: int, kept: frozenset[int], before: Manifest) -> None:
        self._snapshot = snapshot
        self._rank = rank
        self._kept = kept
        self._before = before
        self._new = {CHANGED: _Growing(), SETTLED: _Growing(), DELTAS: _Growing()}
        self._entries: list[tuple[EntryLayout, list[tuple[int, Piece]]]] = []
        self._bases: dict[str, dict[str, dict[int, Piece]]] = {}

    def add(self, entry: EntryLayout, parts: Sequence[_Part]) -> None:
        """The next entry."""
        targets = [self._target(part) for part in parts]
        pieces: list[tuple[int, Piece]] = []
        if set(targets) <= {CHANGED} or set(targets) == {SETTLED}:
            target = targets[0] if targets else CHANGED
            shape = entry.shape if entry.dtype in DTYPES else (entry.nbytes,)
            self._new[target].arrays.append((entry.name, entry.container_dtype, shape, entry.nbytes))
            pieces = [(target, self._stored(target, part)) for part in parts]
        else:
            for part, target in zip(parts, targets, strict=True):
                pieces.append((target, self._chunk(entry, part, target)))
        self._entries.append((entry, pieces))

    def _target(self, part: _Part) -> int:
        """The part that a piece goes to; 0: it is referred to."""
        if not part.chain:
            return SETTLED if part.is_slow else CHANGED
        if any(piece.file not in self._kept for piece in part.chain):
            return SETTLED
        return 0 if part.delta is None else DELTAS

    def _chunk(self, entry: EntryLayout, part: _Part, target: int) -> Piece:
        """A piece of an entry whose pieces are in several places."""
        if target in (0, DELTAS):
            self._keep_bases(entry.name, part)
        if target == 0:
            return part.chain[0]
        piece = self._stored(target, part)
        codec = "" if target != DELTAS else f"~{piece.codec}"
        name = f"{entry.name}~[{part.start}:{part.start + part.extent.nbytes}]{codec}"
        self._new[target].arrays.append((name, "U8", (piece.nbytes,), piece.nbytes))
        return piece

    def _stored(self, target: int, part: _Part) -> Piece:
        new, raw_nbytes = self._new[target], part.extent.nbytes
        if target != DELTAS or part.delta is None:
            return Piece(0, new.append(part.extent), raw_nbytes, part.digest, raw_nbytes)
        stored = part.delta.stored
        offset = new.append(stored)
        return Piece(0, offset, len(stored), digest(stored), raw_nbytes, CODEC, part.delta.base, part.digest)

    def _keep_bases(self, name: str, part: _Part) -> None:
        base = part.chain[0].base if part.delta is None else part.delta.base
        for piece in part.chain[1:] if part.delta is None else part.chain:
            assert base is not None
            self._bases.setdefault(base, {}).setdefault(name, {})[part.start] = piece
            base = piece.base

    def draft(self) -> WritePlan:
        """What has been added."""
        new = {
            target: NewFile(
                names.data_name(self._snapshot, self._rank, target),
                data_header(growing.arrays),
                tuple(growing.content),
            )
            for target, growing in self._new.items()
            if growing.nbytes
        }
        referred = [piece for _, pieces in self._entries for target, piece in pieces if target == 0]
        bases = [piece for entries in self._bases.values() for kept in entries.values() for piece in kept.values()]
        used = {piece.file for piece in (*referred, *bases)}
        old = sorted((self._before.files[index] for index in used), key=lambda file: file.name)
        files = (*old, *(one.data for one in new.values()))
        index = {file.name: number for number, file in enumerate(files)}

        def older(piece: Piece) -> Piece:
            return replace(piece, file=index[self._before.files[piece.file].name])

        def placed(target: int, piece: Piece) -> Piece:
            if target == 0:
                return older(piece)
            file = new[target]
            return replace(piece, file=index[file.name], offset=len(file.header) + piece.offset)

        entries = {
            entry.name: Entry(entry.dtype, entry.shape, tuple(placed(*one) for one in pieces), entry.container_dtype)
            for entry, pieces in self._entries
        }
        kept = {
            snapshot: {
                name: {start: older(piece) for start, piece in pieces.items()} for name, pieces in of_snapshot.items()
            }
            for snapshot, of_snapshot in self._bases.items()
        }
        return WritePlan(tuple(new.values()), files, entries, kept, self._before.info.id if used else None)


def _size(one: Extent | bytes) -> int:
    return len(one) if isinstance(one, bytes) else one.nbytes
