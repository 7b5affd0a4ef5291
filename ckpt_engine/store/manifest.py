"""The manifest, the commit record of one snapshot, as values (`manifest_codec` has it as bytes).

A snapshot exists if and only if its manifest does. The bytes are one JSON document,

    {"digest":"xxh3-128:<32 hex>","manifest":<body>}\\n

where the digest covers exactly the bytes of <body>. The body starts with `format`, `version` and `info`, so that a
listing can be made from the first few KiB of each manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import Annotated, Any

from msgspec import Meta

from ckpt_engine.errors import PartialError
from ckpt_engine.observe.number_types import MOST, Seconds, Size

FORMAT = "ckpt-engine"
RANKS = "ranks"
"""The key of a tree under which each of several ranks has what is its own, by its number as text."""
OWN_KEY = "ckpt_engine"
"""The top-level key of what runs add to the state, each rank its own: place in the data, random streams, means."""
VERSION = 1
"""Of the run's record and of the catalog, and of manifests that use nothing else."""
STORED_VERSION = 2
"""Of manifests with pieces that are encoded, or lie in several places."""
PARTIAL_VERSION = 3
"""Of manifests of some of the ranks, see `Partial`."""
PACKED_VERSION = 4
"""Of manifests with a component whose structure is in an entry, see `tree`."""
PACKED = "packed"
"""The kind of the node of such a component."""
ALIAS_VERSION = 5
"""Of manifests with a piece that is an alias: readers of earlier ones give two tensors the same memory."""
MANIFEST_VERSION = ALIAS_VERSION
"""The newest that manifests are written in and read."""
SLIMMED = "slimmed"
"""The key in its notes: `{"from": <id>, "without": [<component>, ...]}`."""
RAW = "raw"
"""The codec of bytes as they are."""
RankCount = Annotated[int, Meta(ge=1, le=1 << 24)]
Step = Annotated[int, Meta(ge=0)]
Metric = bool | Annotated[int, Meta(ge=-MOST, le=MOST)] | float
"""Snapshots are written with floats; readers take what else is a number."""
by_age: Callable[[SnapshotInfo], tuple[int, str]] = attrgetter("seq", "id")
"""Sorts snapshots from old to new."""
_raw_nbytes: Callable[[Piece], int] = attrgetter("raw_nbytes")


@dataclass(frozen=True, slots=True)
class Partial:
    """Whose shares of a snapshot are here, where nodes have roots of their own: `ranks`, in order, of `size` ranks."""

    ranks: tuple[Size, ...]
    size: RankCount

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        if len(self.ranks) > 2 and last - first == len(self.ranks) - 1:
            shown = f"ranks {first} to {last}"
        else:
            shown = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return f"{shown} of {self.size:,}"


@dataclass(frozen=True, slots=True)
class Line:
    """Of which line of history a snapshot is: the attempt that took it, and the earlier ones that this one continues.

    Args:
        attempt: one process's life, as random text; "": not known. Snapshots of earlier versions are one attempt.
        before: earlier attempts, the latest first, each with the highest `seq` of it that belongs to this line.
    """

    attempt: str = ""
    before: tuple[tuple[str, Size], ...] = ()

    def has(self, info: SnapshotInfo) -> bool:
        """Whether a snapshot belongs to it."""
        attempt = info.line.attempt
        return attempt == self.attempt or any(one == attempt and info.seq <= last for one, last in self.before)


UNNAMED = Line()


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """What a listing shows of a snapshot.

    Args:
        id: unique name, `{seq:08d}-s{step:010d}-{8 hex}`; sorts by age.
        seq: monotone number within the run; "newest" means highest `seq`.
        step: optimizer/trainer step, as given to `save`.
        epoch: epoch number or None.
        reason: why it was taken: interval, every_n_steps, every_seconds, at_steps, validation, end, signal, manual, ...
        created: wall-clock seconds since the epoch (display only, never used for ordering).
        nbytes: logical bytes of all tensors.
        metrics: numbers the user may rank by.
        parent: id of the snapshot this run resumed from, if any.
        components: logical bytes by top-level key of the state.
        partial: whose shares these are, where it is not a whole snapshot but a node's part of one; None: it is whole.
        line: its line of history; only what is of one line replaces each other.

    Examples:
        >>> for info in ckpt.snapshots():
        ...     print(info.id, info.step, info.metrics.get("val_loss"))
    """

    id: str
    seq: int
    step: Step
    epoch: int | None
    reason: str
    created: Seconds
    nbytes: Size
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    parent: str | None = None
    components: Mapping[str, Size] = field(default_factory=dict, repr=False)
    partial: Partial | None = None
    line: Line = UNNAMED


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of consecutive bytes of one entry, stored in one file.

    Pieces of an entry are in order and cover it without gaps. `digest` is of the stored bytes. `codec` says how the
    stored bytes are encoded ("raw": as they are); `base` names the snapshot a delta was made against, else None.

    Args:
        file: index into `Manifest.files`.
        offset: absolute byte offset in that file.
        nbytes: stored bytes.
        raw_nbytes: decoded bytes (equal to `nbytes` for "raw").
        raw_digest: of the decoded bytes; None for "raw".
        group: of a codec that encodes several arrays at once: the entries whose pieces at the same place belong
            together, in the order of the codec's roles; else empty.
        alias: it was stored as a piece of another entry, at another place, or for an earlier snapshot than the one
            that its entry was written for last: names in data files do not say where it is.
    """

    file: Size
    offset: Size
    nbytes: Size
    digest: str
    raw_nbytes: Size
    codec: str = RAW
    base: str | None = None
    raw_digest: str | None = None
    group: tuple[str, ...] = ()
    alias: bool = False

    @property
    def content_digest(self) -> str | None:
        """The digest of the decoded bytes; None: not known."""
        return self.digest if self.codec == RAW else self.raw_digest


@dataclass(frozen=True)
class Entry:
    """One stored array: a name in a safetensors container plus what safetensors cannot say.

    Args:
        dtype: torch dtype name without `torch.` ("float32", "complex128", "uint8", ...).
        shape: logical shape.
        pieces: where its bytes are (C-contiguous order, little endian).
        container_dtype: dtype code used in the container ("F32", or "U8" where safetensors has none).
    """

    dtype: str
    shape: tuple[Size, ...]
    pieces: tuple[Piece, ...]
    container_dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return sum(map(_raw_nbytes, self.pieces))

    def placed(self) -> Iterable[tuple[int, Piece]]:
        """Its pieces, each with the byte of the array at which it begins."""
        starts = accumulate(map(_raw_nbytes, self.pieces), initial=0) if len(self.pieces) > 1 else (0,)
        return zip(starts, self.pieces)  # noqa: B905 - the last start is the end

    @property
    def is_plain(self) -> bool:
        """Whether its bytes lie in one file as they are, back to back, under its name."""
        end: int | None = None
        for piece in self.pieces:
            if (
                piece.codec != RAW
                or piece.alias
                or piece.file != self.pieces[0].file
                or end not in (None, piece.offset)
            ):
                return False
            end = piece.offset + piece.nbytes
        return True

    @cached_property
    def piece_at(self) -> Mapping[int, Piece]:
        """Its pieces by that byte."""
        return dict(self.placed())


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file named by a manifest: path relative to the run's root and its exact size."""

    name: str
    nbytes: Size


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything needed to rebuild one snapshot.

    Args:
        tree: the typed JSON skeleton of the state (see docs/format.md, "Tree"); leaves refer to `entries` by name.
        world: `{"size": W}`; more keys in part records, and where it is partial (see `writer.part_records`).
        software: versions of python, torch, ckpt-engine, trainer...
        notes: free JSON for adapters (never needed for rebuilding the tree).
        bases: by the id of a snapshot that some `Piece.base` names and by entry, its pieces that are needed, each by
            the byte of the entry at which it begins. They lie in `files` of this manifest: nothing else is needed,
            whatever became of that snapshot.
    """

    info: SnapshotInfo
    run: str
    world: Mapping[str, Any]
    software: Mapping[str, str]
    files: tuple[DataFile, ...]
    entries: Mapping[str, Entry]
    tree: Mapping[str, Any]
    notes: Mapping[str, Any] = field(default_factory=dict)
    bases: Mapping[str, Mapping[str, Mapping[Size, Piece]]] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return int(self.world.get("size", 1))

    @property
    def own_trees(self) -> dict[int, Mapping[str, Any]]:
        """The components of its own that each rank had, by rank; empty if it was one process."""
        return {} if self.world_size == 1 else {int(rank): tree for rank, tree in self.tree.get(RANKS, {}).items()}

    def as_rank(self, rank: int) -> Manifest:
        """The manifest with the components of its own that `rank` had, instead of those of all ranks.

        Where there were fewer ranks it is those of `rank` modulo their number.
        """
        if self.world_size == 1:
            return self
        shared = {key: node for key, node in self.tree.items() if key != RANKS}
        return replace(self, tree={**shared, **self.own_trees.get(rank % self.world_size, {})})

    @property
    def lacks(self) -> tuple[str, ...]:
        """The components that slimming took from it, see `copy.transfer`."""
        note = self.notes.get(SLIMMED)
        return tuple(note["without"]) if isinstance(note, Mapping) else ()


def require_whole(info: SnapshotInfo, url: str) -> None:
    """Raises `PartialError` if it is not whole; says where all of it is to be had."""
    if info.partial is not None:
        raise PartialError(
            f"{url} has the shares of {info.partial} only",
            hint="`ckpt cp` the folders of all nodes to one place and use that, or a tier that all nodes share",
        )
