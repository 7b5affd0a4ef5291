"""Part records: what some of several ranks have written of one snapshot.

A part record is a manifest of the part alone (docs/format.md, "Several ranks"), stored under `parts/` and written when
its data is durable. It makes nothing exist. A rank that has no part says so in a record without files.

Where nodes have roots of their own the parts of the ranks of one root make a *partial* manifest. It is a part itself:
those of all roots make the whole one.

What ranks of sessions that have ended left: the snapshots that are complete are committed, the others let go.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from ckpt_engine.copy.job import KeySkeleton, Layout, RankConfig
from ckpt_engine.copy.write_snapshot import ParallelMap
from ckpt_engine.errors import CorruptError, FormatError, SnapshotFailedError, SnapshotSkippedError, StorageMissingError
from ckpt_engine.grouping import grouped
from ckpt_engine.observe.number_types import Size
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.store.data_files import lacking
from ckpt_engine.store.json_checks import is_shape, reading, require
from ckpt_engine.store.manifest import RANKS, DataFile, Entry, Manifest, Partial, Piece, RankCount, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import ObjectInfo, Storage, tidy

READS_AT_ONCE = 32


def share_place(url: str, rank: int) -> str:
    """How the place at `url` is called in events where only the share of a rank is meant."""
    return f"{url}, the share of rank {rank}"


class Slices(NamedTuple):
    """What a part has of an array.

    Args:
        whole: shape of the array.
        runs: where the bytes of its pieces belong: (first byte in the array, number of pieces), in order.
    """

    whole: tuple[Size, ...]
    runs: tuple[tuple[Size, Size], ...]


@dataclass(frozen=True, slots=True)
class PartRecord:
    """The part of some of the ranks.

    Args:
        ranks: in order; the first one names the record.
        size: number of all ranks.
        structure: equal for ranks whose parts make one snapshot.
        slices: entries of which this is a part only.
        cancelled: why there is no part; None: there is one.
        place: the ranks whose parts make the manifest that is committed where this lies; empty: all.
    """

    ranks: tuple[Size, ...]
    size: RankCount
    structure: str
    slices: Mapping[str, Slices]
    manifest: Manifest
    cancelled: str | None = None
    place: tuple[Size, ...] = ()

    @property
    def rank(self) -> int:
        """Names its record."""
        return self.ranks[0]


def part_of(manifest: Manifest, layout: Layout, ranks: RankConfig) -> PartRecord:
    """The part that a rank has written; `manifest` is of it alone."""
    slices = {
        one.name: Slices(one.whole, ((one.start, len(manifest.entries[one.name].pieces)),))
        for one in layout.entries
        if one.whole is not None
    }
    if ranks.rank:
        # What is the same on all ranks comes from rank 0.
        manifest = replace(manifest, tree={key: node for key, node in manifest.tree.items() if key == RANKS})
    return PartRecord((ranks.rank,), ranks.size, layout.structure, slices, manifest, place=ranks.place)


def of_manifest(manifest: Manifest) -> PartRecord:
    """The part that a partial manifest is.

    Raises:
        CorruptError: it is none.
    """
    with reading(f"the manifest of {manifest.info.id} is not of some of several ranks"):
        return _part(manifest, manifest.world)


def no_part(snapshot: str, why: str, run: str, ranks: RankConfig) -> PartRecord:
    """Says that a rank has no part in a snapshot."""
    parsed = names.parse_id(snapshot)
    assert parsed is not None
    info = SnapshotInfo(snapshot, parsed.seq, parsed.step, None, "cancelled", time.time(), 0)
    empty = Manifest(info, run, {}, {}, (), {}, {})
    return PartRecord((ranks.rank,), ranks.size, "", {}, empty, cancelled=why, place=ranks.place)


def encode(part: PartRecord) -> bytes:
    """The bytes of a part record: of one rank, or what is committed where several ranks have a root for themselves."""
    if part.manifest.info.partial is not None:
        return manifest_codec.encode(part.manifest)
    world: dict[str, Any] = {"size": part.size, "rank": part.rank, "structure": part.structure}
    world["slices"] = {name: [one.runs[0][0], list(one.whole)] for name, one in part.slices.items()}
    if part.cancelled is not None:
        world["cancelled"] = part.cancelled
    if part.place:
        world["place"] = list(part.place)
    return manifest_codec.encode(replace(part.manifest, world=world))


def put(storage: Storage, part: PartRecord) -> None:
    """Write a part record. Its data MUST be durable already.

    Raises:
        StorageExistsError: this rank has one already.
        StorageError: there may be one nevertheless.
    """
    storage.put(names.part_name(part.manifest.info.id, part.rank), [memoryview(encode(part))])


def read(storage: Storage, snapshot: str, rank: int) -> PartRecord:
    """The part record of a rank.

    Raises:
        StorageMissingError: there is none.
        FormatError: it cannot be used.
    """
    name = names.part_name(snapshot, rank)
    part = decode(storage.get(name), f"{storage.url}/{name}")
    if part.rank != rank or part.manifest.info.id != snapshot:
        raise CorruptError(f"{storage.url}/{name} is of rank {part.rank} and of {part.manifest.info.id}")
    return part


def decode(data: bytes, where: str) -> PartRecord:
    """The inverse of `encode`.

    Args:
        where: they come from, for messages.

    Raises:
        FormatError: it cannot be used.
    """
    manifest = manifest_codec.decode(data, is_part=True)
    if manifest.info.partial is not None:
        return of_manifest(manifest)
    with reading(f"{where} is no part record"):
        world = manifest.world
        slices = {
            entry: (whole, [(start, len(manifest.entries[entry].pieces))])
            for entry, (start, whole) in world["slices"].items()
        }
        return _part(manifest, {**world, "ranks": [world["rank"]], "slices": slices})


def _part(manifest: Manifest, world: Mapping[str, Any]) -> PartRecord:
    """What `world` says of a part, if its ranks are some of those that there are, and its slices those of its entries.

    Raises:
        LookupError, ValueError: they are not.
    """
    part = msgspec.convert({**world, "manifest": manifest}, PartRecord)
    is_ordered = list(part.ranks) == sorted(set(part.ranks)) != []
    require(is_ordered and max(0, *part.ranks, *part.place) < part.size, "bad ranks")
    for name, one in part.slices.items():
        require(is_shape(one.whole), f"bad slice of {name!r:.80}")
        pieces = len(part.manifest.entries[name].pieces)
        require(sum(count for _, count in one.runs) == pieces, f"the slices of {name!r:.80} are not its pieces")
    return part


def read_all(storage: Storage, snapshot: str, ranks: Collection[int]) -> dict[int, PartRecord]:
    """The part records of these ranks, many at once; those that are not there are left out.

    Raises:
        FormatError, StorageError: one cannot be read.
    """

    def attempt(rank: int) -> PartRecord | None:
        try:
            return read(storage, snapshot, rank)
        except StorageMissingError:
            return None

    ordered = sorted(ranks)
    threads = min(READS_AT_ONCE, len(ordered)) if len(ordered) > 1 else 0
    found = ParallelMap(attempt, ordered, threads, "ckpt-parts").result()
    return {part.rank: part for part in found if part is not None}


def there(storage: Storage, snapshot: str | None = None) -> dict[str, set[int]]:
    """The ranks that have a part record, by snapshot; of all snapshots or of one."""
    return by_snapshot(storage.list(names.PARTS if snapshot is None else f"{names.PARTS}{snapshot}-r"))


def by_snapshot(listed: Iterable[ObjectInfo]) -> dict[str, set[int]]:
    """The ranks whose part records are among what was listed, by snapshot."""
    owners = (owner for item in listed if (owner := names.part_owner(item.name)) is not None)
    found = grouped((parsed.id, rank) for parsed, rank in owners)
    return {snapshot: set(ranks) for snapshot, ranks in found.items()}


def remove(storage: Storage, snapshot: str, ranks: Collection[int]) -> None:
    """Remove part records, where that is allowed; what they say is in a manifest, or not needed."""
    tidy(storage, *(names.part_name(snapshot, rank) for rank in ranks))


def merge(parts: Sequence[PartRecord]) -> Manifest:
    """The manifest that these parts are, in any order: of the snapshot, or where nodes have roots of their own of all
    that ranks have written at this one.

    What the snapshot is besides its data (step, epoch, metrics, notes, replicated tree) is what rank 0 says.

    Raises:
        SnapshotSkippedError: a rank has no part in it; says why.
        SnapshotFailedError: the parts do not fit together, names the ranks.
    """
    ordered = sorted(parts, key=lambda part: part.ranks)
    first = ordered[0]
    _require_one_structure(ordered)
    ranks = tuple(sorted(rank for part in ordered for rank in part.ranks))
    everybody = tuple(range(first.size))
    if ranks != (first.place or everybody):
        raise SnapshotFailedError(f"parts of ranks {list(ranks)} of {first.size}")
    files, arrays = _gathered(ordered)
    is_whole = ranks == everybody
    entries: dict[str, Entry] = {}
    slices: dict[str, Slices] = {}
    for name, array in arrays.items():
        entries[name], rest = _joined(name, array, is_whole=is_whole)
        if rest is not None:
            slices[name] = rest
    tree = {key: node for key, node in first.manifest.tree.items() if key != RANKS}
    tree[RANKS] = {key: node for part in ordered for key, node in part.manifest.tree.get(RANKS, {}).items()}
    used = {key: KeySkeleton(node).entries for key, node in tree.items()}
    complete = used if is_whole else {RANKS: used[RANKS]}  # the rest is all that the tree says, not what is here
    if lacking := sorted({name for found in complete.values() for name in found} - entries.keys()):
        raise SnapshotFailedError(f"no rank has written {lacking[0]!r} ({len(lacking)} entries are missing)")
    sizes = {name: entry.nbytes for name, entry in entries.items()}
    info = replace(first.manifest.info, nbytes=sum(sizes.values()), partial=None)
    world: dict[str, Any] = {"size": first.size}
    if is_whole:
        info = replace(info, components={key: sum(sizes[name] for name in found) for key, found in used.items()})
    else:
        world |= {"ranks": list(ranks), "structure": first.structure}
        world["slices"] = {name: [list(one.whole), [list(run) for run in one.runs]] for name, one in slices.items()}
        info = replace(info, partial=Partial(ranks, first.size), components=_components(ordered))
    return replace(first.manifest, info=info, world=world, files=files, entries=entries, tree=tree)


def _require_one_structure(parts: Sequence[PartRecord]) -> None:
    first = parts[0]
    for part in parts:
        if part.cancelled is not None:
            raise SnapshotSkippedError(f"rank {part.rank} has no part in it: {part.cancelled}")
        if (part.size, part.structure, part.place) != (first.size, first.structure, first.place):
            lines = set(first.structure.split("\n")) ^ set(part.structure.split("\n"))
            found = sorted({component for component, blank, _ in (one.rpartition(" ") for one in lines) if blank})
            in_these = f" ({', '.join(found)})" if found else ""
            raise SnapshotFailedError(
                f"the states of ranks {first.rank} and {part.rank} differ in structure{in_these}, "
                "and are not one snapshot",
                hint="what differs between ranks (random streams, positions, metrics) must be a component of its own",
            )


def _components(parts: Sequence[PartRecord]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for part in parts:
        found.update(part.manifest.info.components)
    return dict(found)


@dataclass(slots=True)
class _Array:
    """An array of which parts have pieces: `whole` is its shape, `form` an entry of one of them."""

    whole: tuple[int, ...]
    form: Entry
    runs: list[tuple[int, tuple[Piece, ...]]]
    parts: int = 0


def _gathered(parts: Sequence[PartRecord]) -> tuple[tuple[DataFile, ...], dict[str, _Array]]:
    """The files of all parts, those of rank 0 first, and what they have of each array."""
    listed = [
        (names.data_rank(file.name) or 0, at, file) for part in parts for at, file in enumerate(part.manifest.files)
    ]
    order = sorted(range(len(listed)), key=lambda one: (listed[one][0], one))
    place = {one: index for index, one in enumerate(order)}
    arrays: dict[str, _Array] = {}
    base = 0
    for part in parts:
        for name, entry in part.manifest.entries.items():
            moved = tuple(replace(piece, file=place[piece.file + base]) for piece in entry.pieces)
            mine = part.slices.get(name) or Slices(entry.shape, ((0, len(moved)),))
            array = arrays.setdefault(name, _Array(mine.whole, entry, []))
            if array.whole != mine.whole:
                raise SnapshotFailedError(f"ranks have different shapes of {name!r}: {array.whole} and {mine.whole}")
            array.parts += 1
            at = 0
            for start, pieces in mine.runs:
                array.runs.append((start, moved[at : at + pieces]))
                at += pieces
        base += len(part.manifest.files)
    return tuple(listed[one][2] for one in order), arrays


def _joined(name: str, array: _Array, *, is_whole: bool) -> tuple[Entry, Slices | None]:
    """The entry of an array, and what it has of it if that is not all."""
    runs = sorted(array.runs, key=lambda one: one[0])
    joined: list[tuple[int, int]] = []
    at = 0
    for start, pieces in runs:
        if start < at or (is_whole and start != at):
            raise SnapshotFailedError(f"bytes {at} to {start} of {name!r} are missing, or two ranks have them")
        if joined and start == at:
            joined[-1] = (joined[-1][0], joined[-1][1] + len(pieces))
        else:
            joined.append((start, len(pieces)))
        at = start + sum(piece.raw_nbytes for piece in pieces)
    form, whole = array.form, array.whole
    # An array without bytes has one part without pieces.
    found = tuple(piece for _, pieces in runs for piece in pieces)
    nbytes = sum(piece.raw_nbytes for piece in found)
    if nbytes * math.prod(form.shape) == form.nbytes * math.prod(whole):
        return replace(form, shape=whole, pieces=found), None
    if is_whole:
        raise SnapshotFailedError(f"the bytes of {name!r} from {at} on are missing, or two ranks have them")
    # Rows of several ranks are no array; how many elements they are.
    shape = form.shape if array.parts == 1 else (nbytes * math.prod(form.shape) // form.nbytes,)
    return replace(form, shape=shape, pieces=found), Slices(whole, tuple(joined))


def recover(repository: Repository, in_flight: Container[str]) -> list[tuple[str, bool]]:
    """Commit the snapshots of dead sessions all of whose parts are there; remove the part records of all others.

    Needs the lease. The data of those that are let go is unreferenced from then on.

    Args:
        in_flight: snapshots that are not touched.

    Returns:
        What a writer found of uncommitted snapshots, oldest first, and whether each exists now, or was let go.

    Raises:
        StorageError: some of it may have been done; calling again continues.
    """
    storage = repository.storage
    left = there(storage)
    found: list[tuple[str, bool]] = []
    for snapshot, outcome in complete(repository, {one: ranks for one, ranks in left.items() if one not in in_flight}):
        if outcome is not None:
            found.append((snapshot, outcome))
        remove(storage, snapshot, left[snapshot])
    return found


def complete(repository: Repository, left: Mapping[str, Collection[int]]) -> Iterator[tuple[str, bool | None]]:
    """Commit the snapshots all of whose parts are there, oldest first. Needs the lease.

    Args:
        left: the part records of each.

    Yields:
        Each, and whether it is committed now; None: it was, or no rank has a part in it.
    """
    storage = repository.storage
    existing = {parsed.id for parsed in repository.ids()}
    for snapshot, ranks in sorted(left.items()):
        if snapshot in existing:
            yield snapshot, None
            continue
        try:
            parts = list(read_all(storage, snapshot, ranks).values())
            if all(part.cancelled is not None for part in parts):
                yield snapshot, None
                continue
            manifest = merge(parts)
            require_files(storage, manifest.files)
        except (FormatError, SnapshotSkippedError, SnapshotFailedError, StorageMissingError):
            yield snapshot, False
        else:
            repository.commit(manifest)
            yield snapshot, True


def require_files(storage: Storage, files: Sequence[DataFile]) -> None:
    """Raises `StorageMissingError` unless these data files are there as they were written."""
    if lost := lacking(storage, files):
        raise StorageMissingError(f"{', '.join(lost)} is not there whole")
