"""Plans what an encoded copy writes, what it refers to, and what it may store as differences: pure but for listings.

Of older snapshots at the target the newest one is built on. A piece that has not changed is referred to, with whatever
it was encoded against; one that has changed may be stored as the difference. Chains of differences are bounded in
number and in bytes, so that reading back never takes much more than reading the state itself: where a bound is reached
the piece is written in full, and the chain begins anew.

Reads what differences are made against: from where the snapshot comes from, which is near, or from the target.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ckpt_engine.copy.adam_groups import AdamGroup, find
from ckpt_engine.errors import CkptError, CorruptError, StorageMissingError
from ckpt_engine.store import container, names
from ckpt_engine.store.decode import Decoder, chain_of, decoder_of, needed_for
from ckpt_engine.store.manifest import Manifest, Piece
from ckpt_engine.store.repository import Repository

PART_BYTES = 128 << 20
"""Decoded bytes of a data file, at most. Two of them are in memory at once: one is sent, one encoded."""
ALIVE = 0.5
"""A file of which a smaller share is needed is not referred to: what is unchanged in it is written once more."""
SMALL_BYTES, MOST_SMALL = 16 << 10, 16
"""Smaller files are hardly more than a header: they are referred to whatever share of them is needed, but not many."""
MOST_BASES = 4
"""Bases behind each other."""
MOST_BYTES = 1.5
"""What a piece and all its bases may have together, as a share of its decoded bytes: a restore reads all of it."""
ROWS = "rows"
_ROW_BYTES, _MORE_BYTES = 160, 260
"""Beside its name, a piece takes at most so much in a header, and so much more in a manifest once it is encoded."""

Key = tuple[str, int]
"""An entry, and a byte of it at which a piece begins."""
Needed = Mapping[tuple[str | None, str], Piece]
"""As `needed_for` tells them: pieces of the older snapshot and of its bases."""


@dataclass(frozen=True, slots=True)
class Over:
    """What the older snapshot has where a piece may be stored as a difference.

    Args:
        base: the snapshot whose piece it is.
        chain: the piece there and its bases.
        needed: all that decoding it takes.
        alone: whether the bounds allow a difference of this piece by itself.
        rows: whether only one of few rows: it is made against the end of a chain that may not get longer.
    """

    base: str
    chain: tuple[Piece, ...]
    needed: Needed
    alone: bool = True
    rows: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """A piece to be written, which begins at byte `start` of its entry."""

    name: str
    start: int
    piece: Piece
    over: Over | None = None

    @property
    def key(self) -> Key:
        """Where it is."""
        return self.name, self.start


@dataclass(frozen=True, slots=True)
class Job:
    """What is encoded at once: one piece, or those of the first moment, the second one and the weights at one place."""

    work: tuple[Work, ...]
    adam: AdamGroup | None = None

    @property
    def raw_nbytes(self) -> int:
        """Decoded bytes."""
        return sum(one.piece.raw_nbytes for one in self.work)


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """What a copy refers to, and what it writes.

    Args:
        before: the older snapshot at the target that keeps alive what is referred to.
        old: pieces of `before` that are referred to, each with all that decoding it takes.
        parts: what each data file has, in order.
    """

    before: Manifest | None
    old: Mapping[Key, Needed]
    parts: tuple[tuple[Job, ...], ...]

    def most_bytes(self, manifest: bytes) -> int:
        """At most so many bytes are written: if nothing can be encoded, with headers and manifest.

        Args:
            manifest: that of the source, as it is stored.
        """
        work = [one for part in self.parts for job in part for one in job.work]
        headers = (
            sum(2 * len(one.name.encode()) + _ROW_BYTES for one in work) + 2 * len(self.parts) * container.ALIGN_BYTES
        )
        groups = sum(
            3 * len(one.name.encode()) + 9 for part in self.parts for job in part if job.adam for one in job.work
        )
        bases = {
            (*key, start, piece.offset): piece
            for needed, start in (
                *((one.over.needed, one.start) for one in work if one.over is not None),
                *((needed, start) for (_, start), needed in self.old.items()),
            )
            for key, piece in needed.items()
        }
        names = sum(
            len(name.encode()) + sum(3 + len(one.encode()) for one in piece.group) + 2 * _MORE_BYTES
            for (_, name, _, _), piece in bases.items()
        )
        return (
            sum(one.piece.raw_nbytes for one in work)
            + headers
            + len(manifest)
            + _MORE_BYTES * len(work)
            + 3 * groups
            + names
        )


def plan(manifest: Manifest, target: Repository, differences: bool = False) -> EncodingPlan:
    """How `manifest` is stored at `target`, where the newest older snapshot may have some of it.

    Args:
        differences: whether what has changed may be stored as differences to what is there.

    Raises:
        StorageError: from the target.
    """
    before = _before(manifest, target)
    work = [
        Work(name, start, piece) for name, entry in manifest.entries.items() for start, piece in placed(entry.pieces)
    ]
    if before is None:
        return EncodingPlan(None, {}, _parts([Job((one,)) for one in work]))
    same, changed = _compared(work, manifest, before)
    sizes = {item.name: item.nbytes for item in target.storage.list(names.DATA)}
    whole = {index for index, file in enumerate(before.files) if sizes.get(file.name) == file.nbytes}
    groups: list[tuple[AdamGroup, int]] = []
    overs: dict[Key, Over] = {}
    if differences:
        groups = _adam_groups(manifest, before, changed)
        grouped = {(name, start) for group, start in groups for name in group.entries}
        for key, needed in changed.items():
            over = _over(key, before, needed, key in grouped)
            if over is not None:
                overs[key] = over
    kept = _alive({**same, **{key: over.needed for key, over in overs.items()}}, before, whole)
    old = {key: needed for key, needed in same.items() if key in kept}
    # What stays, or changes in few rows, is apart from what changes everywhere: its files are referred to for long.
    slow = {key for key, needed in changed.items() if needed[None, key[0]].codec == ROWS} | set(same)
    fresh = [replace(one, over=overs[one.key] if one.key in kept else None) for one in work if one.key not in old]
    settled = [Job((one,)) for one in fresh if one.key in slow]
    quick = _jobs([one for one in fresh if one.key not in slow], groups)
    return EncodingPlan(before, old, (*_parts(settled), *_parts(quick)))


def placed(pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
    """The pieces of an entry, each with the byte of it at which it begins."""
    return zip(accumulate((piece.raw_nbytes for piece in pieces), initial=0), pieces, strict=False)


def _before(manifest: Manifest, target: Repository) -> Manifest | None:
    """The newest older snapshot there; None: there is none, or it is damaged."""
    older = [parsed for parsed in target.ids() if parsed.seq < manifest.info.seq]
    try:
        return target.read(older[-1].id) if older else None
    except (CorruptError, StorageMissingError):
        return None


def _compared(
    work: Sequence[Work], manifest: Manifest, before: Manifest
) -> tuple[dict[Key, Needed], dict[Key, Needed]]:
    """What the older snapshot has at the places of pieces that have the same bytes there, and at those of others."""
    there = {
        (name, start): piece
        for name, old in before.entries.items()
        if (entry := manifest.entries.get(name)) and (old.dtype, old.shape) == (entry.dtype, entry.shape)
        for start, piece in placed(old.pieces)
    }
    same: dict[Key, Needed] = {}
    changed: dict[Key, Needed] = {}
    for one in work:
        old_piece, content = there.get(one.key), one.piece.content_digest
        if old_piece is None or old_piece.content_digest is None or old_piece.raw_nbytes != one.piece.raw_nbytes:
            continue
        try:
            needed = needed_for(before, one.name, one.start, old_piece)
            chain_of(before, one.name, one.start, old_piece)
        except CorruptError:
            continue  # it is found by those who read it
        (same if old_piece.content_digest == content else changed)[one.key] = needed
    for name, start in list(same):
        # Pieces that were encoded together are referred to together.
        group = there[name, start].group
        if any((member, start) not in same for member in group):
            changed[name, start] = same.pop((name, start))
    return same, changed


def _alive(wanted: Mapping[Key, Needed], before: Manifest, whole: set[int]) -> set[Key]:
    """The places at which everything that is needed lies in files that are worth keeping."""
    kept = {key: set(needed.values()) for key, needed in wanted.items()}
    while True:
        needed: Counter[int] = Counter()
        for piece in {piece for pieces in kept.values() for piece in pieces}:
            needed[piece.file] += piece.nbytes
        sizes = {index: before.files[index].nbytes for index in whole & set(needed)}
        small = sorted((index for index, nbytes in sizes.items() if nbytes <= SMALL_BYTES), key=needed.__getitem__)
        alive = {
            *small[-MOST_SMALL:],
            *(i for i, nbytes in sizes.items() if nbytes > SMALL_BYTES and needed[i] >= ALIVE * (nbytes - SMALL_BYTES)),
        }
        left = {key: pieces for key, pieces in kept.items() if all(piece.file in alive for piece in pieces)}
        if len(left) == len(kept):
            return set(left)
        kept = left


def _over(key: Key, before: Manifest, needed: Needed, grouped: bool) -> Over | None:
    """What a piece may be stored as a difference to; None: it is written in full."""
    name, start = key
    chain = tuple(chain_of(before, name, start, needed[None, name]))
    alone = _in_bounds([chain])
    if not grouped and chain[0].group:
        return None  # all of the group are written in full, so that the next ones may be predicted again
    if alone or grouped:
        return Over(before.info.id, chain, needed, alone)
    if chain[0].codec != ROWS:
        return None
    base = str(chain[-2].base)
    return Over(base, chain[-1:], {(base, name): chain[-1]}, rows=True)


def _in_bounds(chains: Sequence[Sequence[Piece]]) -> bool:
    """Whether differences to these, encoded together, would be within the bounds if they are like the last ones."""
    stored_bytes = sum(sum(piece.nbytes for piece in chain) for chain in chains)
    stored_bytes += sum(chain[0].nbytes for chain in chains if len(chain) > 1)
    raw_bytes = sum(chain[0].raw_nbytes for chain in chains)
    return max(map(len, chains)) <= MOST_BASES and stored_bytes <= MOST_BYTES * raw_bytes


def _adam_groups(manifest: Manifest, before: Manifest, changed: Mapping[Key, Needed]) -> list[tuple[AdamGroup, int]]:
    """Places at which the moments and the weights may be encoded together; none twice."""
    shapes = {name: (entry.dtype, entry.shape) for name, entry in manifest.entries.items()}
    found: list[tuple[AdamGroup, int]] = []
    taken: set[str] = set()
    for group in find(manifest.tree, before.tree, shapes, {name for name, _ in changed}):
        if len({*group.entries} - taken) < len(group.entries):
            continue
        taken |= {*group.entries}
        for start, piece in placed(manifest.entries[group.first].pieces):
            olds = [changed[name, start][None, name] for name in group.entries if (name, start) in changed]
            if len(olds) < len(group.entries) or {old.raw_nbytes for old in olds} != {piece.raw_nbytes}:
                continue
            chains = [chain_of(before, name, start, old) for name, old in zip(group.entries, olds, strict=True)]
            if _in_bounds(chains):
                found.append((group, start))
    return found


def _jobs(work: Sequence[Work], groups: Sequence[tuple[AdamGroup, int]]) -> list[Job]:
    """Those of Adam's groups in the place of the first moment."""
    there = {one.key: one for one in work if one.over is not None}
    joined: dict[Key, Job] = {}
    for group, start in groups:
        members = [there[name, start] for name in group.entries if (name, start) in there]
        if len(members) == len(group.entries):
            joined[members[0].key] = Job(tuple(members), group)
    taken = {member.key for job in joined.values() for member in job.work} - set(joined)
    return [joined.get(one.key, Job((one,))) for one in work if one.key not in taken]


def _parts(jobs: Sequence[Job]) -> tuple[tuple[Job, ...], ...]:
    """Cut into data files."""
    found: list[list[Job]] = []
    room = 0
    for job in jobs:
        room -= job.raw_nbytes
        if room < 0:
            found.append([])
            room = PART_BYTES - job.raw_nbytes
        found[-1].append(job)
    return tuple(map(tuple, found))


MOST_MANIFESTS = MOST_BASES + 2
"""Snapshots at the source that are looked through for older bytes: a chain ends in one of them."""

_Place = tuple[str, int, str]
"""An entry, a byte of it, and the digest of the decoded bytes that begin there."""


class Bases:
    """The bytes of pieces that a target has. Thread safe. Trouble with reading them costs the difference, no more.

    Args:
        manifest: of the snapshot that is copied.
        source: where it comes from, and where older ones may be; None: nothing else is there.
        before: the snapshot at the target that is built on.
        target: where that is.
    """

    def __init__(self, manifest: Manifest, source: Repository | None, before: Manifest | None, target: Repository):
        self._manifest = manifest
        self._source = source
        self._lock = threading.Lock()
        self._left: list[str] | None = None
        self._found: dict[_Place, tuple[Decoder, Piece]] = {}
        near = before is not None and target.storage.capabilities.cheap_reads
        self._there = decoder_of(target.storage, before) if near and before is not None else None

    def read(self, name: str, start: int, over: Over, out: memoryview) -> bool:
        """Fill `out` with the bytes at the head of a chain; whether that worked."""
        piece = over.chain[0]
        wanted = piece.content_digest
        if wanted is None:
            return False
        found = self._near((name, start, wanted))
        there = (self._there, piece) if self._there is not None else None
        for decoder, one in filter(None, (found, there)):
            try:
                decoder.read(name, start, one, out)  # which compares it with the digest
            except CkptError:
                continue  # the other place may have it; else the piece is written in full
            return True
        return False

    def _near(self, place: _Place) -> tuple[Decoder, Piece] | None:
        with self._lock:
            while place not in self._found and self._look_further():
                pass
            return self._found.get(place)

    def _look_further(self) -> bool:
        """Take in one more manifest of the source; False if there are no more."""
        if self._source is None:
            return False
        try:
            if self._left is None:
                older = [parsed.id for parsed in self._source.ids() if parsed.seq < self._manifest.info.seq]
                self._left = older[-MOST_MANIFESTS:]
                self._take(self._manifest)
                return True
            if not self._left:
                return False
            self._take(self._source.read(self._left.pop()))
        except CkptError:
            return self._left is not None and bool(self._left)
        return True

    def _take(self, manifest: Manifest) -> None:
        assert self._source is not None
        decoder = decoder_of(self._source.storage, manifest)
        for name, entry in manifest.entries.items():
            self._add(decoder, name, placed(entry.pieces))
        for entries in manifest.bases.values():
            for name, pieces in entries.items():
                # Of those that were encoded together a decoder would have to know whose they are.
                self._add(decoder, name, [(start, piece) for start, piece in pieces.items() if not piece.group])

    def _add(self, decoder: Decoder, name: str, pieces: Iterable[tuple[int, Piece]]) -> None:
        for start, piece in pieces:
            if piece.content_digest is not None:
                self._found.setdefault((name, start, piece.content_digest), (decoder, piece))
