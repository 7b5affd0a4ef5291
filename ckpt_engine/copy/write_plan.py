"""Plans what a snapshot writes at a place, given the snapshots that are there.

The plan builds on the newest of the older snapshots there. A piece that has not changed is referred to, with whatever
it was encoded against; one that has changed may be stored as the difference. Chains of differences are bounded in
number and in bytes, so that reading back never takes much more than reading the state itself. A file stays as long as
one byte of it is needed; so what lies unchanged in files that are hardly needed is written once more, apart from what
changes, and referred to from then on.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

from ckpt_engine.copy.adam_groups import AdamGroup, find
from ckpt_engine.copy.sharing_bounds import SharingBounds, are_in_bounds, replaced
from ckpt_engine.errors import CkptError, CorruptError, FormatError, StorageMissingError
from ckpt_engine.observe.events import Notice
from ckpt_engine.store import container, names
from ckpt_engine.store.container import digest
from ckpt_engine.store.data_files import lacking
from ckpt_engine.store.decode import Decoder, ReadInto, chain_of, decoder_of, needed_for, stored_pieces
from ckpt_engine.store.manifest import RAW, Entry, Manifest, Piece
from ckpt_engine.store.repository import Repository

HEADER_BYTES = 16 << 10
"""Smaller files are hardly more than a header."""
MOST_SPACE = 2.5
"""Bytes that older files may have, of those of the state."""
ROWS = "rows"
REACH = 2
"""Snapshots whose pieces are referred to: the newest older ones."""
_ROW_BYTES, _MORE_BYTES = 160, 260
"""Beside its name, a piece takes at most so much in a header, and so much more in a manifest once it is encoded."""
Key = tuple[str, int]
"""An entry, and a byte of it at which a piece begins."""
Needed = Mapping[tuple[str | None, str], Piece]
"""As of `needed_for`: pieces of the older snapshot and of its bases."""
_PieceOf = tuple[str, int, str]
"""An entry, a byte of it, and the digest of the decoded bytes that begin there."""


PLAIN = SharingBounds(1 << 20, 0.05, None, True, 40, 1.75, 0.3, 128)
"""Where bytes are stored as they are: writing a megabyte takes a millisecond, and another file and its sync as long."""
ENCODED = SharingBounds(0, 0.0, 128 << 20, False, 4, 1.5, None, 16)
"""Where bytes are dear."""


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """What the older snapshot has where a piece may be stored as a difference.

    Args:
        base: the snapshot whose piece it is.
        chain: the piece there and its bases.
        needed: all that decoding it takes.
        alone: whether the bounds allow a difference of this piece alone.
        rows: whether only one of few rows: it is made against the end of a chain that may not get longer.
    """

    base: str
    chain: tuple[Piece, ...]
    needed: Needed
    alone: bool = True
    rows: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """A piece to be written, which begins at byte `start` of its entry.

    Args:
        settled: it has not changed, or in few rows until now: it is stored apart from what changes everywhere.
    """

    name: str
    start: int
    piece: Piece
    over: DeltaBase | None = None
    settled: bool = False

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
class WritePlan:
    """What a snapshot refers to at a place, and what it writes there.

    Args:
        bounds: by which it was made.
        keepers: the older snapshots there that keep alive what is referred to, the newest first.
        before: the newest of them, an empty one if there is none; after its own files it has those of the others.
        old: pieces of `before` and of others that are referred to, each with all that decoding it takes.
        parts: what is encoded together, in order.
        pays: whether that spares enough.
    """

    bounds: SharingBounds
    keepers: tuple[str, ...]
    before: Manifest
    old: Mapping[Key, Needed]
    parts: tuple[tuple[Job, ...], ...]
    pays: bool = True

    def most_bytes(self, manifest: bytes) -> int:
        """At most so many bytes are written: if nothing can be encoded, with headers and manifest.

        Args:
            manifest: that of the source, as it is stored.
        """
        jobs = [job for part in self.parts for job in part]
        work = [one for job in jobs for one in job.work]
        refers = [*(one.over.needed for one in work if one.over is not None), *self.old.values()]
        texts = sum(2 * len(one.name.encode()) + _ROW_BYTES + _MORE_BYTES for one in work)
        texts += sum(9 * (len(one.name.encode()) + 3) for job in jobs if job.adam for one in job.work)
        texts += sum(
            sum(len(one.encode()) + 3 for one in (name, *piece.group)) + 2 * _MORE_BYTES
            for needed in refers
            for (_, name), piece in needed.items()
        )
        headers = 2 * len(self.parts) * container.ALIGN_BYTES
        return sum(job.raw_nbytes for job in jobs) + headers + len(manifest) + texts


def plan(manifest: Manifest, target: Repository, differences: bool = False, read: ReadInto | None = None) -> WritePlan:
    """How `manifest` is stored encoded at `target`, where the newest older snapshot may have some of it.

    Args:
        differences: whether what has changed may be stored as differences to what is there.
        read: see `decide_sound`.

    Raises:
        StorageError: from the target.
    """
    older = list(older_than(manifest.info.seq, target))
    there = {item.name: item.nbytes for item in target.storage.list(names.DATA)} if older else {}
    usable = {file.name for one in older for file in one.files if there.get(file.name) == file.nbytes}
    return decide_sound(manifest, older, usable - target.damage.files, lambda _: differences, ENCODED, read)


def older_than(seq: float, repository: Repository, most: int = REACH) -> Iterator[Manifest]:
    """The newest older snapshots in a repository that can be read, the newest first. Raises `StorageError`."""
    for parsed in [parsed for parsed in repository.ids() if parsed.seq < seq][: -most - 1 : -1]:
        with suppress(FormatError, StorageMissingError):
            yield {one.info.id: one for one in repository.recent}.get(parsed.id) or repository.read(parsed.id)


def decide_sound(
    manifest: Manifest,
    older: Sequence[Manifest],
    usable: set[str],
    differs: Callable[[str], bool],
    bounds: SharingBounds,
    read: ReadInto | None,
) -> WritePlan:
    """As `decide`; a data file is not referred to if one of its pieces that is read back does not match its digest.

    Each snapshot has another piece read back, by its number, so that damage is found before all snapshots depend on it.

    Args:
        read: `Storage.get_into` of the place of `older`; None: nothing is read back.

    Raises:
        StorageError: from `read`.
    """
    while True:
        planned = decide(manifest, older, usable, differs, bounds)
        work = (one.over for part in planned.parts for job in part for one in job.work)
        refers = [*planned.old.values(), *(over.needed for over in work if over is not None)]
        pieces = {(piece.file, piece.offset): piece for needed in refers for piece in needed.values()}
        if read is None or not pieces:
            return planned
        piece = pieces[sorted(pieces)[manifest.info.seq % len(pieces)]]
        name = planned.before.files[piece.file].name
        if is_sound(read, name, piece):
            return planned
        usable = usable - {name}


def is_sound(read: ReadInto, name: str, piece: Piece) -> bool:
    """Whether a data file has the bytes of a piece; reads them. Raises `StorageError` if that cannot be found out."""
    found = bytearray(piece.nbytes)
    try:
        read(name, piece.offset, memoryview(found))
    except (StorageMissingError, FormatError):
        return False
    return digest(found) == piece.digest


def read_back(target: Repository, tier: str, manifest: Manifest, read: ReadInto) -> Notice | None:
    """Read one piece again, chosen by chance; what to report if its file lacks the bytes: later snapshots leave it out.

    Args:
        tier: how the place is called.
        read: `Storage.get_into` of the place.

    Raises:
        StorageError: from `read`.
    """
    pieces = stored_pieces(manifest)
    entry, piece = secrets.choice(pieces) if pieces else ("", None)  # which draws from no stream of the user
    if piece is None or is_sound(read, manifest.files[piece.file].name, piece):
        return None
    info, file = manifest.info, manifest.files[piece.file].name
    target.damage.files.add(file)
    if not lacking(target.storage, [manifest.files[piece.file]]):  # else a note might make a folder that is gone again
        target.damage.note(info.id, {file})
    return Notice(
        "ERROR",
        f"step {info.step}: snapshot {info.id} is damaged at {tier}: [{CorruptError.code}] {file} does not have the "
        f"bytes that were written for {entry!r} ({piece.nbytes} at byte {piece.offset}); later snapshots do not refer "
        f"to this file → see whether the disk fails; `ckpt verify {tier}` finds all damage",
    )


def decide(
    manifest: Manifest,
    older: Sequence[Manifest],
    usable: Container[str],
    differs: Callable[[str], bool],
    bounds: SharingBounds,
) -> WritePlan:
    """How `manifest` is stored where `older` are. Pure, as far as `differs` is.

    Args:
        older: what is referred to: pieces of these snapshots, the newest first; differences are to the newest.
        usable: the data files of `older` that may be referred to.
        differs: whether changed pieces of an entry may be stored as differences; asked once per entry with any.
    """
    pieces = {(name, start): piece for name, entry in manifest.entries.items() for start, piece in entry.placed()}
    before = replace(
        older[0] if older else replace(manifest, entries={}, tree={}, bases={}),
        files=tuple(dict.fromkeys(chain.from_iterable(map(attrgetter("files"), older)))),
    )
    same, changed = compared(manifest, pieces, before)
    same |= _elsewhere(manifest, pieces, same, older, before)
    differing = set(filter(differs, dict.fromkeys(name for name, _ in changed)))
    wanted = {key: needed for key, needed in changed.items() if key[0] in differing and key not in same}
    groups = _adam_groups(manifest, before, wanted, bounds) if wanted and not bounds.rows_only else []
    overs = _overs(before, wanted, {(name, start) for group, start in groups for name in group.entries}, bounds)
    sizes = {key: piece.raw_nbytes for key, piece in pieces.items()}
    # What is written in full is written once.
    full = {
        piece.content_digest or key: sizes[key] for key, piece in pieces.items() if key not in same and key not in overs
    }
    spared = sum(sizes.values()) - sum(full.values())
    spared -= sum(over.chain[0].nbytes if over.chain[1:] else 0 for over in overs.values())
    # What stays, or changes in few rows, is apart from what changes everywhere: its files are referred to for long.
    slow = {key for key, needed in changed.items() if needed[None, key[0]].codec == ROWS} | set(same)
    room_bytes = sum(nbytes for key, nbytes in sizes.items() if key not in slow and key not in overs)
    refers: dict[Key, Needed] = {**same, **{key: over.needed for key, over in overs.items()}}
    kept = _kept(refers, sizes, before, usable, room_bytes, bounds)
    if bounds.rows_only:
        slow |= set(overs) - kept
    fresh = [
        Work(*key, piece, overs.get(key) if key in kept else None, key in slow)
        for key, piece in pieces.items()
        if key not in same or key not in kept
    ]
    settled = _jobs([one for one in fresh if one.settled], ())
    quick = _jobs([one for one in fresh if not one.settled], groups)
    together = [settled + quick] if bounds.part_bytes is None else [settled, quick]
    parts = tuple(part for jobs in together for part in _parts(jobs, bounds))
    pays = spared >= max(bounds.least_bytes, bounds.least_share * sum(sizes.values()))
    old = {key: one for key, one in same.items() if key in kept}
    return WritePlan(bounds, tuple(map(attrgetter("info.id"), older)), before, old, parts, pays)


def plan_alone(manifest: Manifest) -> WritePlan:
    """How `manifest` is stored encoded where it is to refer to nothing."""
    return decide(manifest, (), (), lambda _: False, ENCODED)


def compared(
    manifest: Manifest, pieces: Container[Key], before: Manifest
) -> tuple[dict[Key, Needed], dict[Key, Needed]]:
    """What an older snapshot has at the places of pieces that have the same bytes there, and at those of others."""
    same: dict[Key, Needed] = {}
    changed: dict[Key, Needed] = {}
    for name, entry in manifest.entries.items():
        for start, piece, found in paired(entry, before.entries.get(name)):
            if (name, start) not in pieces:
                continue
            needed: Needed = {(None, name): found}
            if found.base is not None or found.group:
                try:
                    needed = needed_for(before, name, start, found)
                    chain_of(before, name, start, found)
                except CorruptError:
                    continue  # it is found by those who read it
            (same if found.content_digest == piece.content_digest else changed)[name, start] = needed
    grouped = [(key, group) for key, needed in same.items() if (group := needed[None, key[0]].group)]
    for (name, start), group in grouped:
        # Pieces that were encoded together are referred to together.
        if any((member, start) not in same for member in group):
            changed[name, start] = same.pop((name, start))
    return same, changed


def paired(entry: Entry, old: Entry | None) -> list[tuple[int, Piece, Piece]]:
    """The pieces of an entry that an older snapshot has too: the byte where each begins, itself, and the older one."""
    if old is None or old.dtype != entry.dtype or old.shape != entry.shape:
        return []
    there = dict(old.placed())
    return [
        (start, piece, found)
        for start, piece in entry.placed()
        if (found := there.get(start)) is not None
        and found.content_digest is not None
        and found.raw_nbytes == piece.raw_nbytes
    ]


def contents_of(manifest: Manifest) -> dict[str, Piece]:
    """Its pieces by `Piece.content_digest`, which is not called for each of thousands."""
    return {
        content: piece
        for entry in manifest.entries.values()
        for piece in entry.pieces
        if (content := piece.digest if piece.codec == RAW else piece.raw_digest) is not None
    }


def _elsewhere(
    manifest: Manifest, pieces: Mapping[Key, Piece], same: Container[Key], older: Sequence[Manifest], before: Manifest
) -> dict[Key, Needed]:
    """What older snapshots have of other pieces: at other places if it decodes alone, or at theirs before the newest.

    Bases and groups are found by names.
    """
    names = list(map(attrgetter("name"), before.files))
    found: dict[Key, Needed] = {}
    for one in older:
        known = contents_of(one)
        hits = {
            key: there
            for key, piece in pieces.items()
            if key not in same and key not in found and (there := known.get(piece.content_digest or "")) is not None
        }
        here = compared(manifest, hits, one)[0] if hits and one is not older[0] else {}
        for key, there in hits.items():
            alone: Needed = {(None, key[0]): there} if there.base is None and not there.group else {}
            needed = here.get(key, alone).items()
            moved = {
                at: replace(piece, file=names.index(one.files[piece.file].name), alias=True) for at, piece in needed
            }
            found |= {key: moved} if moved else {}
    return found


def _kept(
    wanted: Mapping[Key, Needed],
    sizes: Mapping[Key, int],
    before: Manifest,
    usable: Container[str],
    room_bytes: int,
    bounds: SharingBounds,
) -> set[Key]:
    """The places at which everything that is needed lies in files that are worth keeping.

    To leave a file means to write in full what needs it. That is done if it frees at least as many bytes, and is no
    more than what changes (`room_bytes`): of a table of which few rows do, half a file is many times that. Such files
    are kept as long as all of them take no more than a few times the bytes of the state.
    """
    stored = {(piece.file, piece.offset): piece.nbytes for pieces in wanted.values() for piece in pieces.values()}
    needed: Counter[int] = Counter()
    for (file, _), nbytes in stored.items():
        needed[file] += nbytes
    lies_in = {key: {piece.file for piece in pieces.values()} for key, pieces in wanted.items()}
    costs: Counter[int] = Counter()
    for key, files in lies_in.items():
        for file in files:
            costs[file] += sizes[key]
    file_bytes = {file: before.files[file].nbytes for file in needed if before.files[file].name in usable}
    freed = {file: max(1, nbytes - HEADER_BYTES - needed[file]) for file, nbytes in file_bytes.items()}
    small = sorted((file for file, nbytes in file_bytes.items() if nbytes <= HEADER_BYTES), key=needed.__getitem__)
    kept = set(file_bytes) - set(small[: -bounds.most_small])
    over_bytes = sum(file_bytes[file] for file in kept) - int(MOST_SPACE * sum(sizes.values()))
    for file in sorted(kept, key=lambda file: (costs[file] / freed[file], file)):
        if over_bytes > 0 or costs[file] <= min(room_bytes, freed[file]):
            kept.remove(file)
            room_bytes -= costs[file]
            over_bytes -= file_bytes[file]
    return {key for key, files in lies_in.items() if files <= kept}


def _overs(
    before: Manifest, changed: Mapping[Key, Needed], grouped: Container[Key], bounds: SharingBounds
) -> dict[Key, DeltaBase]:
    """What each piece may be stored as a difference to; those that are written in full are left out."""
    counts: dict[str, dict[int, int]] = {}
    found = {}
    for (name, start), needed in changed.items():
        if name not in counts:
            chains = {
                at: [one.nbytes for one in chain_of(before, name, at, piece)]
                for at, piece in before.entries[name].placed()
            }
            counts[name] = replaced(chains, bounds)
        chain = tuple(chain_of(before, name, start, needed[None, name]))
        over = _over(name, before, chain, needed, counts[name].get(start, 0), (name, start) in grouped, bounds)
        if over is not None:
            found[name, start] = over
    return found


def _over(
    name: str,
    before: Manifest,
    chain: tuple[Piece, ...],
    needed: Needed,
    count: int,
    grouped: bool,
    bounds: SharingBounds,
) -> DeltaBase | None:
    """What a piece may be stored as a difference to; None: it is written in full.

    Args:
        count: so many differences at the front of the chain are to be replaced.
    """
    if not grouped and chain[0].group:
        return None  # all of the group are written in full, so that the next ones may be predicted again
    alone = not count and are_in_bounds([chain], bounds)
    if alone or grouped:
        return DeltaBase(before.info.id, chain, needed, alone)
    count = count or len(chain) - 1
    left = chain[count:]
    if chain[0].codec != ROWS or not left or any(one.group for one in left):
        return None
    levels = [str(one.base) for one in chain[count - 1 : -1]]
    return DeltaBase(levels[0], left, {(level, name): one for level, one in zip(levels, left, strict=True)}, rows=True)


def _adam_groups(
    manifest: Manifest, before: Manifest, changed: Mapping[Key, Needed], bounds: SharingBounds
) -> list[tuple[AdamGroup, int]]:
    """Places at which the moments and the weights may be encoded together; none twice."""
    shapes = {name: (entry.dtype, entry.shape) for name, entry in manifest.entries.items()}
    found: list[tuple[AdamGroup, int]] = []
    taken: set[str] = set()
    for group in find(manifest.tree, before.tree, shapes, {name for name, _ in changed}):
        if len({*group.entries} - taken) < len(group.entries):
            continue
        taken |= {*group.entries}
        for start, piece in manifest.entries[group.first].placed():
            olds = [changed[name, start][None, name] for name in group.entries if (name, start) in changed]
            if len(olds) < len(group.entries) or {old.raw_nbytes for old in olds} != {piece.raw_nbytes}:
                continue
            chains = [chain_of(before, name, start, old) for name, old in zip(group.entries, olds, strict=True)]
            if are_in_bounds(chains, bounds):
                found.append((group, start))
    return found


def _jobs(work: Sequence[Work], groups: Sequence[tuple[AdamGroup, int]]) -> list[Job]:
    """Those of Adam's groups in the place of the first moment."""
    if not groups:
        return list(map(Job, zip(work)))
    there = {one.key: one for one in work if one.over is not None}
    joined: dict[Key, Job] = {}
    for group, start in groups:
        members = [there[name, start] for name in group.entries if (name, start) in there]
        if len(members) == len(group.entries):
            joined[members[0].key] = Job(tuple(members), group)
    taken = {member.key for job in joined.values() for member in job.work} - set(joined)
    return [joined.get(one.key, Job((one,))) for one in work if one.key not in taken]


def _parts(jobs: Sequence[Job], bounds: SharingBounds) -> tuple[tuple[Job, ...], ...]:
    """Cut into what is encoded together."""
    if bounds.part_bytes is None:
        return (tuple(jobs),)
    found: list[list[Job]] = []
    room = 0
    for job in jobs:
        room -= job.raw_nbytes
        if room < 0:
            found.append([])
            room = bounds.part_bytes - job.raw_nbytes
        found[-1].append(job)
    return tuple(map(tuple, found))


class Bases:
    """The bytes of pieces that a target has. Thread safe. Trouble with reading them costs the difference, no more.

    Args:
        manifest: of the snapshot that is copied.
        source: where it comes from, and where older ones may be; None: nothing else is there.
        there: reads the older snapshot at the target, where that is cheap.
    """

    def __init__(self, manifest: Manifest, source: Repository | None, there: Decoder | None) -> None:
        self._manifest = manifest
        self._source = source
        self._lock = threading.Lock()
        self._further = self._in_source()
        self._found: dict[_PieceOf, tuple[Decoder, Piece]] = {}
        self._there = there

    def read(self, name: str, start: int, over: DeltaBase, out: memoryview) -> bool:
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

    def _near(self, place: _PieceOf) -> tuple[Decoder, Piece] | None:
        with self._lock:
            while place not in self._found and (one := next(self._further, None)) is not None:
                self._found.setdefault(*one)
            return self._found.get(place)

    def _in_source(self) -> Iterator[tuple[_PieceOf, tuple[Decoder, Piece]]]:
        """What the source has, newest first, as far as it can be read; a chain ends in one of its snapshots."""
        if self._source is None:
            return
        with suppress(CkptError):
            older = older_than(self._manifest.info.seq, self._source, ENCODED.most_bases + 2)
            for manifest in chain((self._manifest,), older):
                decoder = decoder_of(self._source.storage.get_into, manifest)
                there = [(name, *placed) for name, entry in manifest.entries.items() for placed in entry.placed()]
                # Of those that were encoded together a decoder would have to know whose they are.
                there += [
                    (name, start, piece)
                    for entries in manifest.bases.values()
                    for name, pieces in entries.items()
                    for start, piece in pieces.items()
                    if not piece.group
                ]
                for name, start, piece in there:
                    if piece.content_digest is not None:
                        yield (name, start, piece.content_digest), (decoder, piece)
