"""One running epoch of a loader: the iterator that counts what training has had of it, or fetches batches again after a
resume.

`ShippingCollate` and `RoleInit` stand in for the loader's `collate_fn` and `worker_init_fn` while an iterator is
built. Both travel to the workers (by fork or pickle), so they hold nothing but the user's functions and plain bytes.
Workers send their random streams along with each batch.

An iterator deals its first batch to the worker at position 0. A resumed epoch continues where the uninterrupted run
would have asked worker `first`: the worker at position w therefore plays the *role* `(w + first) % n`, with that
worker's id, seed, streams and dataset state.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ckpt_engine.data import native, rng, streams
from ckpt_engine.data import private_names as private
from ckpt_engine.data.exactness import Exactness, Level, checksum, length_of
from ckpt_engine.data.native import is_stateful
from ckpt_engine.data.private_names import assume_worker_role
from ckpt_engine.data.sample_assignment import DealtEpoch
from ckpt_engine.data.sampling import SamplerOrder
from ckpt_engine.observe.run_times import hook_time

WorkerState = dict[str, Any]
"""One worker right after a batch: `{"rng": host streams}`, for a dataset with `state_dict` also `"dataset"` and, once
its shard gave a short batch, `"ended"`; `"draws"` if loading drew at random where that matters; `"earlier_epoch"` if
that batch belonged to one; `"objects"`: numbers and generators of dataset and collate function that it has moved, by
path what they were in the trainer and are now; `"changes"`: what else it changes."""

_begun: tuple[object, ...] | None = None
"""In a worker: its random streams before its first sample."""
_objects: Mapping[str, Any] = {}
"""In a worker: what its collate function has to go on with."""
_LOOKS = 4
_KEPT = "in persistent workers: what they keep between epochs is unknown"


class Shipped(NamedTuple):
    """A batch and its worker right after making it.

    A named tuple, because torch's pin-memory thread looks into those; bytes, because a tensor would cost a file
    descriptor per batch.
    """

    batch: Any
    role: int
    state: WorkerState


class ShippingCollate:
    """The user's `collate_fn`, its result wrapped in `Shipped` when run in a worker.

    Args:
        collate: the user's function.
        batch_size: of the loader; None without batching.
        dataset: of the loader.
    """

    def __init__(self, collate: Callable[[Any], Any], batch_size: int | None, dataset: Any) -> None:
        self.collate, self.batch_size = collate, batch_size
        self._before = self._kept(dataset)
        self._checked: dict[str, tuple[int | None, int | None]] = {}
        self._changes: set[str] = set()
        self._calls = 0
        self._left: tuple[object, ...] | None = None
        """In a worker: its random streams after the batch before."""
        self._draws = False

    def __call__(self, samples: Any) -> Any:
        came = rng.probe()
        info = get_worker_info()
        if info is not None and self._calls == 0:
            streams.put_back(_objects, collate_fn=self.collate)
        self._calls += 1
        batch = self.collate(samples)
        if info is None:
            return batch
        dataset: Any = info.dataset
        state: WorkerState = {"rng": rng.capture_host(), **self._moved(dataset)}
        if native.is_stateful(dataset):
            # A copy: the queue pickles in a thread of its own while the dataset already makes the next batch.
            state |= {"dataset" if key == "state" else key: one for key, one in native.dataset_state(dataset).items()}
            if isinstance(dataset, IterableDataset):
                if self.batch_size is not None:
                    state["ended"] = len(samples) < self.batch_size
                if native.repeats_work(dataset):
                    self._draws = self._draws or came != (self._left or _begun)
                    state["draws"] = self._draws
                    self._left = rng.probe()
        return Shipped(batch, info.id, state)

    def _kept(self, dataset: Any) -> dict[str, Any]:
        own = {} if native.is_stateful(dataset) else streams.kept_by(dataset=dataset)
        return own | streams.kept_by(collate_fn=self.collate)

    def _moved(self, dataset: Any) -> WorkerState:
        """What the worker has changed in its own copies; tensors and containers are compared at its first batches."""
        before, now = self._before, self._kept(dataset)
        moved = {
            path: [before.get(path), one] for path, one in now.items() if path not in before or one != before[path]
        }
        if self._calls <= _LOOKS:
            roots = {"collate_fn": self.collate} | ({} if native.is_stateful(dataset) else {"dataset": dataset})
            for path, _, _, value in streams.fields_of(**roots):
                look = (length_of(value), checksum(value))
                then = self._checked.setdefault(path, look)
                if look != then and look[0] == then[0]:  # what grows is a cache or a record
                    self._changes.add(path)
        return ({"objects": moved} if moved else {}) | ({"changes": sorted(self._changes)} if self._changes else {})


def collate_watched(collate: Callable[[Any], Any], loaded: Callable[[], None], samples: Any) -> Any:
    """What the user's `collate_fn` makes of samples, in the process of the trainer.

    Args:
        loaded: called before it: the samples of a batch are there.
    """
    loaded()
    return collate(samples)


@dataclass(frozen=True)
class RoleInit:
    """The user's `worker_init_fn`, run as the right role and followed by that role's recorded state.

    Args:
        init: the user's function, or None.
        first: the role whose turn it is.
        states: the state of each role after its last delivered batch; roles without one start as torch starts them.
        batch_size: of the loader; None without batching.
    """

    init: Callable[[int], None] | None
    first: int
    states: tuple[Mapping[str, Any] | None, ...]
    batch_size: int | None

    def __call__(self, worker: int) -> None:
        global _begun
        self._begin(worker)
        _begun = rng.probe()

    def _begin(self, worker: int) -> None:
        global _objects
        role = (worker + self.first) % len(self.states)
        if role != worker:
            assume_worker_role(role)
        if self.init is not None:
            self.init(role)
        state = self.states[role]
        if state is None:
            return
        info = get_worker_info()
        assert info is not None
        dataset: Any = info.dataset
        _objects = state.get("objects", {})
        streams.put_back(_objects, dataset=dataset)
        if "dataset" in state:
            native.load(dataset, {"state": state["dataset"], "live": state.get("live")})
        rng.restore(state["rng"])
        if not isinstance(dataset, IterableDataset) or "dataset" not in state:
            return
        if not state.get("earlier_epoch"):
            native.continue_once(dataset, ended=state.get("ended", False))
            return
        if not state.get("ended") and not native.keeps_nothing(dataset):
            # The shard ended after that batch, in a fetch of which nothing was delivered: do what it did.
            for _ in itertools.islice(dataset, self.batch_size or 1):
                pass
        native.begin_anew(dataset)


def no_order() -> dict[str, Any]:
    """What a state says of the order of an epoch that was not followed."""
    return {"at_iter": None, "at_first": None, "digest": None, "draws": False, "outstanding": [], "moves": False}


def nothing_recorded(num_workers: int) -> dict[str, Any]:
    """What a state says of an iterator that was not followed, but for what it was made with."""
    return {
        "lost": 0,
        "held": [],
        "workers": [None] * num_workers,
        "next_role": 0,
        "native": None,
        "reused": False,
        "alive": False,
        "first_fetch": None,
        "draws": False,
        "ended": False,
        "exhausted": False,
        "unknown_roles": [],
    }


class Mode(StrEnum):
    """How a loader's position is recorded and put back."""

    SKIP = "skip"
    """No workers: draw the indices of trained batches again and drop them."""
    SHIP = "ship"
    """Workers: as skip, and each worker's streams ride on its batches."""
    REPLAY = "replay"
    """Fetch the trained batches again and drop them."""
    NATIVE = "native"
    """The loader or its dataset saves its own position."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """What was true right before one batch was fetched."""

    rng: rng.RngState | None
    workers: tuple[WorkerState | None, ...]
    native: dict[str, Any] | None
    next_role: int
    ended: bool


@dataclass(slots=True)
class WorkerRoles:
    """Where the workers of one iteration are."""

    states: list[WorkerState | None]
    """Each role after its last delivered batch."""
    reused: bool = False
    """The workers are those of an earlier epoch."""
    unknown: set[int] = field(default_factory=set)
    """Persistent workers that were ahead when the previous epoch was left early and have delivered nothing since."""
    thrown_away: int = 0
    """Batches that workers had made when the epoch was left early."""
    next_role: int = 0
    """Whose turn it is to deliver."""

    def delivered(self, batch: Shipped) -> None:
        """The loop gets this batch."""
        self.states[batch.role] = batch.state
        if self.unknown:
            self.unknown.discard(batch.role)
        self.next_role = (batch.role + 1) % len(self.states)

    def stopped_at(self, batches: Iterable[Any], asked: int) -> None:
        """Take from batches that the loop will not see where the workers that made them are now.

        Args:
            asked: batches that were asked for before those.
        """
        for batch in batches:
            if isinstance(batch, Shipped):
                self.states[batch.role] = batch.state
                self.unknown.discard(batch.role)
            else:
                self.unknown.add((asked + self.thrown_away) % len(self.states))
            self.thrown_away += 1


@dataclass(slots=True)
class LoadingDraws:
    """Watches whether loading an iterable dataset draws from the global streams of this process."""

    seen: bool = False
    """It drew from them."""
    is_watched: bool = False
    """`loaded` is called."""
    before: tuple[object, ...] | None = None
    """The streams when the batch was asked for that is being loaded."""
    at_first: rng.RngState | None = None
    """The streams right before the first batch, where a replay needs them."""

    def loaded(self) -> None:
        """The samples of a batch are there."""
        if self.before is not None:
            self.seen = self.seen or self.before != rng.probe()


@dataclass(slots=True)
class Resumption:
    """What a resumed epoch does before it fetches a batch that the saved run had not fetched."""

    held: list[rng.RngState]
    """Streams under which the batches that were fetched ahead at the snapshot are fetched again, in order."""
    streams: Mapping[str, Any] | None
    holders: Mapping[str, Any] | None
    """Installed before the first new fetch: fetching a batch again moves generators, counters and samplers."""

    def install(self, loader: DataLoader[Any]) -> None:
        """The first new fetch comes now."""
        if self.holders is not None:
            streams.restore_holders(loader, self.holders)
        if self.streams is not None:
            rng.restore(self.streams)


@dataclass(slots=True)
class Epoch:
    """Everything recorded about one iteration over the loader."""

    mode: Mode
    made: streams.Streams
    """Right before the iterator in use was built (for persistent workers: in an earlier epoch)."""
    workers: WorkerRoles
    native_before: dict[str, Any] | None = None
    """Of a dataset with a state, before its iterator was built: until it is asked for a sample, a generator's body has
    not begun, and the state is that of the pass before."""
    why_replayed: str | None = None
    """Of an iterable dataset whose state is of no use."""
    order: SamplerOrder | None = None
    dealt: DealtEpoch | None = None
    """Of an epoch that another number of ranks has begun."""
    draws: LoadingDraws = field(default_factory=LoadingDraws)
    fetched: int = 0
    lost: int = 0
    """Fetches that raised: the sampler moved on, no batch was delivered."""
    exhausted: bool = False
    ring: dict[int, Fetch] = field(default_factory=dict)
    resumption: Resumption | None = None
    """Until the first batch is fetched that the saved run had not fetched."""
    exactness: Exactness = field(default_factory=Exactness)

    iterator: weakref.ref[Iterator[Any]] | None = None

    def watch_end(self, iterator: Iterator[Any]) -> None:
        """Name the iterator whose end `ended` reports."""
        self.iterator = weakref.ref(iterator) if hasattr(iterator, "__weakref__") else None

    def ended(self) -> bool:
        """True if the iterator knows already that it has no further batch (an iterable's last batch was short)."""
        iterator = None if self.iterator is None else self.iterator()
        return iterator is not None and private.knows_its_end(iterator)

    def next_fetch(self, loader: DataLoader[Any], streams_now: rng.RngState | None = None) -> Fetch:
        """The record of the fetch that would come now; it needs the streams only if the batch may be fetched again."""
        state = None
        if self.mode is Mode.NATIVE:
            state = (None if self.fetched else self.native_before) or native.capture(loader)
        elif loader.num_workers == 0 and is_stateful(loader.dataset) and self.order is not None:
            state = native.capture_dataset(loader)
        return Fetch(streams_now, tuple(self.workers.states), state, self.workers.next_role, self.ended())

    def level(self, loader: DataLoader[Any]) -> Exactness:
        """How exactly a resume from here repeats this run."""
        found = self.exactness
        if loader.num_workers > 0 and not getattr(loader, "in_order", True):
            found = found.lowered(Level.NOT_RESTORED, "in_order=False: workers deliver in no fixed order")
        if self.workers.unknown:
            found = found.lowered(
                Level.ORDER_ONLY if self.order is not None else Level.NOT_RESTORED,
                f"persistent workers {sorted(self.workers.unknown)} were ahead when the last epoch was left early and "
                "have delivered no batch since",
            )
        if self.lost:
            found = found.lowered(Level.ORDER_ONLY, f"{self.lost} batch(es) of this epoch raised while being fetched")
        if changes := {path for state in self.workers.states if state is not None for path in state.get("changes", ())}:
            found = found.lowered(
                Level.ORDER_ONLY,
                f"loader workers change {', '.join(sorted(changes))} in their own copies, which no snapshot has: give "
                "the dataset state_dict() and load_state_dict()",
            )
        if self.mode is Mode.REPLAY:
            found = self._level_of_replay(found, loader)
        return found

    def _level_of_replay(self, found: Exactness, loader: DataLoader[Any]) -> Exactness:
        why, reused = self.why_replayed, loader.num_workers > 0 and self.workers.reused
        if reused and native.keeps_nothing(loader.dataset):
            found = found.lowered(Level.ORDER_ONLY, f"{why}: batches are loaded again, by workers with other streams")
        elif reused:
            what = f"an IterableDataset without state_dict {_KEPT}" if why is None else f"{why}: {_KEPT}"
            found = found.lowered(Level.NOT_RESTORED, what)
        if self.draws.seen and why is not None:
            found = found.lowered(
                Level.ORDER_ONLY,
                f"{why}: batches are loaded again, which draws from the global random streams: what is drawn per "
                "sample may differ",
            )
        elif self.draws.seen:
            found = found.lowered(
                Level.ORDER_ONLY,
                "the IterableDataset draws from the global random streams: an order that depends on such draws (a "
                "shuffle buffer) is not repeated; give the dataset state_dict() and load_state_dict()",
            )
        return found


class FollowedIterator(streams.Proxy, private.BaseIterator):
    """The loader's iterator with its bookkeeping; where torch's own is left out of a copy, this one is too."""

    def __init__(
        self,
        loader: DataLoader[Any],
        inner: Iterator[Any],
        epoch: Epoch,
        on_fetch: Callable[[Epoch], int],
    ) -> None:
        self._loader, self.inner, self._epoch, self._on_fetch = loader, inner, epoch, on_fetch

    @hook_time.counted
    def __next__(self) -> Any:
        epoch = self._epoch
        lookahead = self._on_fetch(epoch)
        if (resumption := epoch.resumption) is not None:
            if resumption.held:
                return self._fetch_again(resumption, lookahead)
            resumption.install(self._loader)
            epoch.resumption = None
        return self._fetch(lookahead)

    def _fetch_again(self, resumption: Resumption, lookahead: int) -> Any:
        """Fetch a batch that the saved run had fetched already. Its draws are in the past.

        They leave no trace, unless streams are installed behind it: what its consumer draws until then follows from it.
        """
        with rng.untouched() if resumption.streams is None else nullcontext():
            rng.restore(resumption.held.pop(0))
            return self._fetch(lookahead)

    def _fetch(self, lookahead: int) -> Any:
        epoch, loader = self._epoch, self._loader
        number, draws = epoch.fetched, epoch.draws
        if lookahead:
            epoch.ring[number] = epoch.next_fetch(loader, rng.capture())
            epoch.ring.pop(number - lookahead - 1, None)
            if epoch.order is not None:
                epoch.order.ahead = True
        is_replayed = epoch.mode is Mode.REPLAY and loader.num_workers == 0
        if is_replayed and number == 0:
            draws.at_first = rng.capture()
        if (is_replayed or draws.is_watched) and not draws.seen:
            draws.before = rng.probe()
        try:
            batch = hook_time.outside(next, self.inner)
        except StopIteration:
            epoch.exhausted = True
            raise
        except Exception as err:
            if not private.is_dead_worker(err):  # else no batch was made, and none will be
                epoch.lost += 1
            raise
        if is_replayed and not draws.seen:
            draws.seen = draws.before != rng.probe()
        if isinstance(batch, Shipped):
            if epoch.mode is not Mode.REPLAY:
                epoch.workers.delivered(batch)
            batch = batch.batch
        epoch.fetched = number + 1
        if epoch.order is not None:
            epoch.order.forget_before(number - lookahead)
            if lookahead and epoch.order.drawn is not None:
                # Fetched again it is given its indices, so that its sampler draws nothing.
                epoch.ring[number] = replace(epoch.ring[number], rng=epoch.order.drawn)
        return batch
