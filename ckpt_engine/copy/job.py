"""The values that cross between trainer and writer.

Everything here is JSON-able, by `to_json` or by `asdict`, except the arena itself, which crosses as file descriptors.
`job_from_json` and `msgspec.convert` make the values of it again.

What rarely changes is said when it does, for all jobs from there on. A *layout* describes the bytes of an arena slot:
it already is the data file, header included. A *skeleton* is the JSON tree of one top-level key of the state, in which
every `{"$": "v", "i": n}` stands for `values[n]` of the job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from ckpt_engine import errors
from ckpt_engine.errors import WriterError
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.manifest import PACKED, UNNAMED, Line


class EntryLayout(NamedTuple):
    """Where one array lies in the data file. A row without names on the wire: there may be 10,000 of them.

    Args:
        name: its name in the container, and in the manifest.
        dtype: torch dtype name without `torch.`.
        shape: logical shape.
        container_dtype: dtype code in the container header.
        offset: absolute byte offset in the file (header included).
        nbytes: bytes of the array; its elements are C-contiguous, little endian.
        whole: shape of the array of which this is a slice; None: it is the array.
        start: byte in that array where the slice begins.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    container_dtype: str
    offset: int
    nbytes: int
    whole: tuple[int, ...] | None = None
    start: int = 0


class TrainedGroup(NamedTuple):
    """A parameter group of an optimizer: the entries that a snapshot has of it.

    Args:
        name: for people.
        weights, moments: its trainable parameters, and what the optimizer knows of their elements; empty where the
            snapshot does not have all of them.
        counters: its step counters on a device, which the trainer does not wait for.
    """

    name: str
    weights: tuple[str, ...]
    moments: tuple[str, ...]
    counters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What an arena slot holds: a whole data file of `nbytes` bytes, of which the first `header_nbytes` are its header.

    The header bytes MUST be in the slot before a job of this layout.

    Args:
        structure: what all ranks must have in common to make one snapshot; "" for one rank.
        groups: what optimizers train, of all ranks.
    """

    header_nbytes: int
    nbytes: int
    entries: tuple[EntryLayout, ...]
    structure: str = ""
    groups: tuple[TrainedGroup, ...] = ()


class GroupMark(NamedTuple):
    """How a parameter group of an optimizer is at one instant. What differs at two instants has changed between them.

    Args:
        trains: its learning rate is above 0; False: it is 0 and no scheduler raises it; None: neither is known.
        used: changes where a step has used it.
        moved: changes where a step has changed its moments.
    """

    trains: bool | None
    used: int
    moved: int


@dataclass(frozen=True, slots=True)
class PersistJob:
    """One staged snapshot to make durable. The slot MUST NOT change until its `JobDone` has arrived (see there).

    Args:
        job: unique number within one trainer process.
        slot: arena slot holding the bytes.
        values: per top-level key, what its skeleton's placeholders stand for (JSON nodes).
        created: wall-clock seconds since the epoch.
        instant_monotonic: `time.monotonic()` at the snapshot instant; that clock is the machine's, not the process's.
        parent: id of the snapshot this run resumed from.
        notes: free JSON for adapters.
        software: versions by name.
        snapshot: the id that all ranks have given it; None: the writer gives one.
        rank: of the trainer.
        common: where nodes have roots of their own: the newest snapshot that all of them are known to have.
        lacked: newer ones that some node is known to lack for good, as far as earlier jobs have not said so.
        line: of history, that of the trainer: retention is about the snapshots of this line.
        damaged: data files that are known not to have the bytes that were written, at some place.
        pace: of the trainer's cadence, as `Cadence.pace`; empty: nothing is decided.
        marks: of `Layout.groups`, in their order.
    """

    job: int
    slot: int
    values: Mapping[str, list[Any]]
    step: int
    epoch: int | None
    reason: str
    metrics: Mapping[str, float]
    created: float
    instant_monotonic: float
    parent: str | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    snapshot: str | None = None
    rank: int = 0
    common: str | None = None
    lacked: tuple[str, ...] = ()
    line: Line = UNNAMED
    damaged: tuple[str, ...] = ()
    pace: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[GroupMark, ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An error of this project's tree as a value, so that it can cross to the trainer and be raised there."""

    code: str
    message: str
    hint: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorRecord:
        """The record of `error`; what is not of this project's tree becomes a `WriterError` naming its type."""
        if isinstance(error, errors.CkptError):
            return cls(error.code, error.message, error.hint)
        return cls(errors.WriterError.code, f"{type(error).__name__}: {error}")

    def exception(self) -> errors.CkptError:
        """An exception of the same class with the same text."""
        return errors.BY_CODE.get(self.code, WriterError)(*self.message.split("\n"), hint=self.hint)


@dataclass(frozen=True, slots=True)
class JobDone:
    """The outcome of one job; its slot is free again, unless `slot_held`.

    Args:
        snapshot_id: the id of the snapshot, which is durable (`error` is None), else None.
        error: why it is not durable.
        slot_held: a call that hangs may still read the slot: it MUST NOT change until a `SlotFreed` names it.
        lost: the writer died with the job, and no event says so; another one can still take it.
    """

    job: int
    snapshot_id: str | None
    error: ErrorRecord | None = None
    slot_held: bool = False
    lost: bool = False

    @property
    def ok(self) -> bool:
        """Whether the snapshot is durable."""
        return self.error is None


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """The call that kept an arena slot after its `JobDone` has ended."""

    slot: int


@dataclass(frozen=True, slots=True)
class Mirrored:
    """The partners of all ranks have their shares of a snapshot."""

    snapshot: str


@dataclass(frozen=True, slots=True)
class History:
    """What was at the nearest tier when its lease was taken.

    Args:
        snapshots: how many there were.
        newest: id of the newest one.
        step, seq: of that.
        created, attempt: of that, as of `SnapshotInfo` and `Line`; both None: its manifest cannot be read.
    """

    snapshots: int
    newest: str
    step: int
    seq: int
    created: float | None = None
    attempt: str | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """What a writer reports once it has the lease.

    Args:
        first_seq: the lowest number that a snapshot may get.
        history: what earlier writers have left at the nearest tier; None: nothing, or this rank does not write there.
        port: where the writers of other machines reach this one; 0: nowhere.
    """

    first_seq: int
    history: History | None
    port: int = 0


@dataclass(frozen=True, slots=True)
class TierConfig:
    """A further tier: a place that snapshots are copied to.

    Args:
        url: its root.
        storage_options: passed to the storage as they are.
        keep: its retention, as of `WriterConfig`.
        every_seconds, every_n_steps: the least distance of its snapshots; both None: as the trainer's cadence wants.
        bandwidth_bytes_per_second: None: no limit.
        fatal: its failures stop training instead of being reported.
        codec: how it stores what it gets: a codec's name, or `auto`.
        parity: how its data files get parity, as `add_parity.parts_of`; None: they get none.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    keep: Mapping[str, Any] = field(default_factory=dict)
    every_seconds: float | None = None
    every_n_steps: int | None = None
    bandwidth_bytes_per_second: float | None = None
    fatal: bool = False
    codec: str = "raw"
    parity: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Which of several ranks a writer works for. Rank 0 is the coordinator: it holds the lease and commits. A process
    alone is the coordinator of itself.

    Where nodes have roots of their own the ranks that see one root are a *place*: there its lowest rank, the leader,
    is what rank 0 is otherwise.

    Args:
        rank, size: of `size` ranks.
        session: unique text that the ranks have agreed on; empty: there is one process.
        first_seq: snapshots of this session with lower numbers are settled; None: there are none yet.
        wait_seconds: how long the coordinator waits for the part of a rank that makes no progress.
        node: name of the rank's machine.
        mirrors: the writer keeps its newest shares at writers of other machines too.
        mirror_bytes_per_second: at most so fast; None: as fast as the link takes it.
        place: the ranks of this one's place, in order; empty: all ranks see one root.
        places: of all ranks, in the order of their leaders; empty: as `place`.
        record: of the run, as other places have it: what a root without snapshots takes. Empty: there is no other one.
        address: where other machines reach this one, and the writer listens for them; empty: nowhere.
    """

    rank: int
    size: int
    session: str
    first_seq: int | None
    wait_seconds: float
    node: str = ""
    mirrors: bool = False
    mirror_bytes_per_second: float | None = None
    place: tuple[int, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    record: str = ""
    address: str = ""

    @property
    def several(self) -> bool:
        """Whether other ranks write each snapshot too."""
        return bool(self.session)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that see the root of this one, in order."""
        return self.place or tuple(range(self.size))

    @property
    def leads(self) -> bool:
        """Whether this writer holds the lease of its root and commits there."""
        return self.rank == self.members[0]


ALONE = RankConfig(0, 1, "", None, 0.0)


@dataclass(frozen=True, slots=True)
class WriterConfig:
    """What a writer needs to know before its first job.

    Args:
        url: root of the run (a path or `file://`).
        storage_options: passed to the storage as they are.
        keep: retention as plain JSON, `{"last": n, "every_n_steps": n, "best": {"monitor": m, "mode": "min", "k": k}}`;
            each key optional, empty keeps everything.
        lease_wait_seconds: how long `start` waits for another holder of the run's lease.
        holder: who asks for the lease; None: this process.
        drain_seconds: how long a writer whose trainer is gone may take to finish its jobs.
        end_wait_seconds: how long a trainer that ends waits for what further tiers still want.
        tiers: further tiers, nearest first.
        fatal: a snapshot that `url` does not take fails, even if a further tier would.
        memory: the writer is a tier too: it keeps the newest job that it received, makes it durable if the trainer is
            gone, and serves it from memory.
        linger_seconds: how long it keeps serving that once it is durable.
        ranks: who writes the run together.
        codec: how snapshots are stored at `url`: a codec's name, or `delta`.
        parity: as of `TierConfig`.
        on: a command or a webhook by event, `timeout` in seconds, and the `folder` in which commands run; see `hooks`.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    keep: Mapping[str, Any] = field(default_factory=dict)
    lease_wait_seconds: float = 0.0
    holder: LeaseHolder | None = None
    drain_seconds: float = 600.0
    end_wait_seconds: float = 600.0
    tiers: tuple[TierConfig, ...] = ()
    fatal: bool = False
    memory: bool = False
    linger_seconds: float = 0.0
    ranks: RankConfig = ALONE
    codec: str = "raw"
    parity: tuple[int, int] | None = None
    on: Mapping[str, Any] = field(default_factory=dict, repr=False)


def to_json(value: Layout | PersistJob) -> dict[str, Any]:
    """The fields of `value` as JSON. Shallow: mappings are not copied."""
    fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return {
        name: dict(one) if isinstance(one, Mapping) else dataclasses.asdict(one) if isinstance(one, Line) else one
        for name, one in fields.items()
    }


def job_from_json(data: Mapping[str, Any]) -> PersistJob:
    """The job of `to_json`. Types are not checked: what a caller has let through fails its job, not the writer."""
    return PersistJob(
        **{
            **data,
            "lacked": tuple(data["lacked"]),
            "damaged": tuple(data["damaged"]),
            "line": msgspec.convert(data["line"], Line),
            "marks": tuple(GroupMark(*one) for one in data["marks"]),
        }
    )


class KeySkeleton:
    """The typed JSON tree of one top-level key, in which `{"$": "v", "i": n}` stands for value n.

    `entries` names the arrays the tree refers to (`{"$": ..., "entry": name}`), without repetition.

    Raises:
        WriterError: a placeholder without a whole number.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._changing: set[int] = set()
        self._values = 0
        entries: dict[str, None] = {}
        self._study(tree, entries)
        self.entries = tuple(entries)

    def _study(self, node: Any, entries: dict[str, None]) -> bool:
        """Collect entries; whether `node` contains a placeholder. Parts that do not are shared, never copied."""
        if isinstance(node, dict):
            kind = node.get("$")
            if kind == "v":
                index = node.get("i")
                if not isinstance(index, int) or index < 0:
                    raise WriterError(f"a placeholder of a skeleton has no value number: {node}")
                self._values = max(self._values, index + 1)
                self._changing.add(id(node))
                return True
            if kind is not None and isinstance(node.get("entry"), str):
                entries[node["entry"]] = None
                if kind == PACKED:
                    entries.update(dict.fromkeys(node["entries"]))
            children = list(node.values())
        elif isinstance(node, list):
            children = node
        else:
            return False
        changing = True in [self._study(child, entries) for child in children]
        if changing:
            self._changing.add(id(node))
        return changing

    def fill(self, values: Sequence[Any]) -> Any:
        """The tree with `values` in place of its placeholders. Values are inserted as they are.

        Raises:
            WriterError: fewer or more values than placeholders.
        """
        if len(values) != self._values:
            raise WriterError(f"a skeleton with {self._values} placeholders was given {len(values)} values")
        return self._fill(self._tree, values)

    def _fill(self, node: Any, values: Sequence[Any]) -> Any:
        if id(node) not in self._changing:
            return node
        if isinstance(node, list):
            return [self._fill(child, values) for child in node]
        if node.get("$") == "v":
            return values[node["i"]]
        return {key: self._fill(child, values) for key, child in node.items()}
