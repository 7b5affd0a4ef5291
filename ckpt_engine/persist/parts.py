"""Part records: what each of several ranks has written of one snapshot, and the manifest that they make together.

A part record is a manifest of the part alone (docs/format.md, "Several ranks"), stored under `parts/` and written when
its data is durable. It makes nothing exist. A rank that has no part says so in a record without files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ckpt_engine.errors import CorruptError, FormatError, SnapshotFailedError, SnapshotSkippedError, StorageMissingError
from ckpt_engine.persist.job import Layout, RankConfig
from ckpt_engine.persist.skeleton import Skeleton
from ckpt_engine.store import layout as names
from ckpt_engine.store import manifest_codec, presence
from ckpt_engine.store.manifest import RANKS, DataFile, Entry, Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage

READS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part.

    Args:
        structure: equal for ranks whose parts make one snapshot.
        slices: entries of which this is a part only: name → (first byte in the array, shape of the array).
        cancelled: why there is no part; None: there is one.
    """

    rank: int
    size: int
    structure: str
    slices: Mapping[str, tuple[int, tuple[int, ...]]]
    manifest: Manifest
    cancelled: str | None = None


def part_of(manifest: Manifest, layout: Layout, ranks: RankConfig) -> Part:
    """The part that a rank has written; `manifest` is of it alone."""
    slices = {one.name: (one.start, one.whole) for one in layout.entries if one.whole is not None}
    if ranks.rank:
        # What is the same on all ranks is told by rank 0.
        manifest = replace(manifest, tree={key: node for key, node in manifest.tree.items() if key == RANKS})
    return Part(ranks.rank, ranks.size, layout.structure, slices, manifest)


def no_part(snapshot: str, why: str, run: str, ranks: RankConfig) -> Part:
    """Says that a rank has no part in a snapshot."""
    parsed = names.parse_id(snapshot)
    assert parsed is not None
    info = SnapshotInfo(snapshot, parsed.seq, parsed.step, None, "cancelled", time.time(), 0)
    empty = Manifest(info, run, {}, {}, (), {}, {})
    return Part(ranks.rank, ranks.size, "", {}, empty, cancelled=why)


def encode(part: Part) -> bytes:
    """The bytes of a part record."""
    world: dict[str, Any] = {"size": part.size, "rank": part.rank, "structure": part.structure}
    world["slices"] = {name: [start, list(whole)] for name, (start, whole) in part.slices.items()}
    if part.cancelled is not None:
        world["cancelled"] = part.cancelled
    return manifest_codec.encode(replace(part.manifest, world=world))


def put(storage: Storage, part: Part) -> None:
    """Write a part record. Its data MUST be durable already.

    Raises:
        StorageExistsError: this rank has one already.
        StorageError: there may be one nevertheless.
    """
    storage.put(names.part_name(part.manifest.info.id, part.rank), [memoryview(encode(part))])


def read(storage: Storage, snapshot: str, rank: int) -> Part:
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


def decode(data: bytes, where: str) -> Part:
    """The inverse of `encode`.

    Args:
        where: they come from, for messages.

    Raises:
        FormatError: it cannot be used.
    """
    manifest = manifest_codec.decode(data)
    world = manifest.world
    try:
        slices = {entry: (int(start), tuple(whole)) for entry, (start, whole) in world["slices"].items()}
        return Part(world["rank"], world["size"], world["structure"], slices, manifest, world.get("cancelled"))
    except (KeyError, TypeError, ValueError) as err:
        raise CorruptError(f"{where} is no part record: {err}") from err


def read_all(storage: Storage, snapshot: str, ranks: Collection[int]) -> dict[int, Part]:
    """The part records of these ranks, many at once; those that are not there are left out.

    Raises:
        FormatError, StorageError: one cannot be read.
    """

    def attempt(rank: int) -> Part | None:
        try:
            return read(storage, snapshot, rank)
        except StorageMissingError:
            return None

    ordered = sorted(ranks)
    if len(ordered) < 2:
        found = [attempt(rank) for rank in ordered]
    else:
        with ThreadPoolExecutor(min(READS_AT_ONCE, len(ordered)), thread_name_prefix="ckpt-parts") as pool:
            found = list(pool.map(attempt, ordered))
    return {part.rank: part for part in found if part is not None}


def there(storage: Storage, snapshot: str | None = None) -> dict[str, set[int]]:
    """The ranks that have a part record, by snapshot; of all snapshots or of one."""
    found: dict[str, set[int]] = {}
    for item in storage.list(names.PARTS if snapshot is None else f"{names.PARTS}{snapshot}-r"):
        owner = names.part_owner(item.name)
        if owner is not None:
            found.setdefault(owner[0].id, set()).add(owner[1])
    return found


def remove(storage: Storage, snapshot: str, ranks: Collection[int]) -> None:
    """Remove part records; what they say is in a manifest, or nobody needs it."""
    storage.delete(*(names.part_name(snapshot, rank) for rank in ranks))


def merge(parts: Sequence[Part]) -> Manifest:
    """The manifest of the snapshot that these parts are, in any order.

    What the snapshot is besides its data (step, epoch, metrics, notes, replicated tree) is what rank 0 says.

    Raises:
        SnapshotSkippedError: a rank has no part in it; says why.
        SnapshotFailedError: the parts do not fit together, names the ranks.
    """
    ordered = sorted(parts, key=lambda part: part.rank)
    first = ordered[0]
    _require_one_structure(ordered)
    if [part.rank for part in ordered] != list(range(first.size)):
        raise SnapshotFailedError(f"parts of ranks {[part.rank for part in ordered]} of {first.size}")
    files: list[DataFile] = []
    entries: dict[str, list[tuple[int, Entry]]] = {}
    wholes: dict[str, tuple[int, ...]] = {}
    for part in ordered:
        base = len(files)
        files += part.manifest.files
        for name, entry in part.manifest.entries.items():
            start, whole = part.slices.get(name, (0, entry.shape))
            moved = replace(entry, pieces=tuple(replace(piece, file=piece.file + base) for piece in entry.pieces))
            entries.setdefault(name, []).append((start, moved))
            if wholes.setdefault(name, whole) != whole:
                raise SnapshotFailedError(f"ranks have different shapes of {name!r}: {wholes[name]} and {whole}")
    joined = {name: _joined(name, wholes[name], slices) for name, slices in entries.items()}
    tree = {key: node for key, node in first.manifest.tree.items() if key != RANKS}
    tree[RANKS] = {key: node for part in ordered for key, node in part.manifest.tree.get(RANKS, {}).items()}
    sizes = {name: sum(piece.raw_nbytes for piece in entry.pieces) for name, entry in joined.items()}
    used = {key: Skeleton(node).entries for key, node in tree.items()}
    if lacking := sorted({name for found in used.values() for name in found} - joined.keys()):
        raise SnapshotFailedError(f"no rank has written {lacking[0]!r} ({len(lacking)} entries are missing)")
    info = replace(
        first.manifest.info,
        nbytes=sum(sizes.values()),
        components={key: sum(sizes[name] for name in found) for key, found in used.items()},
    )
    return replace(first.manifest, info=info, world={"size": first.size}, files=tuple(files), entries=joined, tree=tree)


def _require_one_structure(parts: Sequence[Part]) -> None:
    for part in parts:
        if part.cancelled is not None:
            raise SnapshotSkippedError(f"rank {part.rank} has no part in it: {part.cancelled}")
        if (part.size, part.structure) != (parts[0].size, parts[0].structure):
            raise SnapshotFailedError(
                f"the states of ranks {parts[0].rank} and {part.rank} differ in structure, and are not one snapshot",
                hint="what differs between ranks (random streams, positions, metrics) must be a component of its own",
            )


def _joined(name: str, whole: tuple[int, ...], slices: Sequence[tuple[int, Entry]]) -> Entry:
    ordered = sorted(slices, key=lambda one: one[0])
    at = 0
    for start, entry in ordered:
        if start != at:
            raise SnapshotFailedError(f"bytes {at} to {start} of {name!r} are missing, or two ranks have them")
        at += sum(piece.raw_nbytes for piece in entry.pieces)
    first = ordered[0][1]
    first_bytes = sum(piece.raw_nbytes for piece in first.pieces)
    if at * math.prod(first.shape) != first_bytes * math.prod(whole):
        raise SnapshotFailedError(f"the bytes of {name!r} from {at} on are missing, or two ranks have them")
    # An array without bytes has one part without pieces.
    pieces = tuple(piece for _, entry in ordered for piece in entry.pieces)
    return replace(first, shape=whole, pieces=pieces)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a writer found of snapshots that nobody had committed: those that exist now, and those that were let go."""

    completed: tuple[str, ...]
    discarded: tuple[str, ...]


def recover(repository: Repository, in_flight: Container[str]) -> Recovered:
    """Commit the snapshots of dead sessions all of whose parts are there; remove the part records of all others.

    Needs the lease. The data of those that are let go is unreferenced from then on.

    Args:
        in_flight: snapshots that are not touched.

    Raises:
        StorageError: some of it may have been done; calling again continues.
    """
    storage = repository.storage
    existing = {parsed.id for parsed in repository.ids()}
    completed, discarded = [], []
    for snapshot, ranks in sorted(there(storage).items()):
        if snapshot in in_flight:
            continue
        if snapshot not in existing:
            try:
                manifest = merge(list(read_all(storage, snapshot, ranks).values()))
                require_files(storage, manifest.files)
            except (FormatError, SnapshotSkippedError, SnapshotFailedError, StorageMissingError):
                discarded.append(snapshot)
            else:
                repository.commit(manifest)
                completed.append(snapshot)
        remove(storage, snapshot, ranks)
    return Recovered(tuple(completed), tuple(discarded))


def require_files(storage: Storage, files: Sequence[DataFile]) -> None:
    """Raises `StorageMissingError` unless these data files are there as they were written."""
    if lost := presence.lacking(storage, files):
        raise StorageMissingError(f"{', '.join(lost)} is not there whole")
