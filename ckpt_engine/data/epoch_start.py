"""Starts an epoch of a loader: fresh, or in the middle exactly where a saved one was.

While the loader builds its iterator its sampler, collate function and worker init function are replaced by recording
ones in the loader's `__dict__`, and put back right after.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine.data import exactness, native, rng, sampling, streams
from ckpt_engine.data import exactness as fingerprints
from ckpt_engine.data import private_names as private
from ckpt_engine.data.exactness import Exactness, Level, OnChange
from ckpt_engine.data.iteration import (
    Epoch,
    LoadingDraws,
    Mode,
    Resumption,
    RoleInit,
    ShippingCollate,
    WorkerRoles,
    collate_watched,
)
from ckpt_engine.data.native import is_stateful
from ckpt_engine.data.sample_assignment import DealtEpoch, Recipe, recipe_of
from ckpt_engine.data.sampling import RecordingSampler, ResumePlan, SamplerOrder, deref
from ckpt_engine.errors import MismatchError

Make = Callable[[], Iterator[Any]]
_BEGINS_AGAIN = (
    "resume with the dataset of the saved run; where the model or chance decides what it gives, "
    "data: restart_epoch lets it begin again"
)


class Starter:
    """Builds the iterators of one loader.

    Args:
        loader: the loader; `baseline` keeps the counters of its samplers as they are now.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        # Weak, here and in all that a loader reaches: in a cycle a loader would wait for the garbage collector, and a
        # worker forked meanwhile would try to join its siblings.
        self._reference = weakref.ref(loader)
        self.baseline = {path: now for path, (_, now) in streams.kept_by_dataset(loader, {}).items()}
        self.baseline |= streams.counters(loader)
        self._samples = exactness.samples_of(loader.dataset)
        self._attributes = sampling.attributes(loader)
        self._recorder: RecordingSampler | None = None
        self._rotation = 0
        self._late = False
        self._fingerprint: dict[str, Any] | None = None
        self._recipe: Recipe | None = None

    @property
    def _loader(self) -> DataLoader[Any]:
        return deref(self._reference)

    @property
    def _iterable(self) -> bool:
        return isinstance(self._loader.dataset, IterableDataset)

    def mode(self) -> Mode:
        """The mode of the next epoch."""
        loader = self._loader
        if self.why_replayed is not None:
            return Mode.REPLAY
        if self._iterable:
            if native.has_native_position(loader):
                return Mode.NATIVE
            return Mode.SHIP if loader.num_workers > 0 and is_stateful(loader.dataset) else Mode.REPLAY
        if self._sampler_attribute() not in loader.__dict__:
            return Mode.REPLAY
        return Mode.SHIP if loader.num_workers > 0 else Mode.SKIP

    def why_again(self, state: Mapping[str, Any]) -> str | None:
        """Why what the dataset said of its position in `state` is of no use."""
        drawn = state.get("draws") or any(
            one is not None and one.get("draws") and not one.get("earlier_epoch") for one in state.get("workers", ())
        )
        if drawn and self.mode() in (Mode.NATIVE, Mode.SHIP) and native.repeats_work(self._loader.dataset):
            return "the streamed data set draws from the global random streams"
        return self.why_replayed

    @cached_property
    @rng.untouched()
    def why_replayed(self) -> str | None:
        """Why the state of an iterable dataset is of no use; asked once."""
        return native.why_replayed(self._loader)

    def fingerprint(self, *, again: bool = False) -> dict[str, Any]:
        """The loader's fingerprint, taken once per epoch, or `again`."""
        if self._fingerprint is None or again:
            self._fingerprint = fingerprints.fingerprint(self._loader, self._samples)
        return self._fingerprint

    def attributes(self) -> sampling.Attributes:
        """What has changed in samplers that cannot save themselves."""
        return sampling.changed(self._loader, self._attributes)

    def recipe(self) -> Recipe:
        """How its samplers make an epoch, read once per epoch."""
        if self._recipe is None:
            self._recipe = recipe_of(self._loader)
        return self._recipe

    def alive(self) -> bool:
        """True if the loader keeps its workers for the next epoch."""
        return private.live_iterator(self._loader) is not None

    def fresh(self, make: Make, previous: Epoch | None) -> tuple[Epoch, Iterator[Any]]:
        """A new epoch as the loader starts it by itself; `previous` is the one before it in this process."""
        loader = self._loader
        mode = Mode.NATIVE if native.starts_by_itself(loader) and self.why_replayed is None else self.mode()
        self._fingerprint = self._recipe = None
        native.begin_anew(loader.dataset)
        alive = private.live_iterator(loader)
        if alive is not None and previous is not None and self._rotation and self._iterable:
            return self._restart(make, previous)
        epoch = Epoch(
            mode,
            streams.capture(loader, self.baseline) if alive is None or previous is None else previous.made,
            WorkerRoles([None] * loader.num_workers, reused=alive is not None),
            native_before=native.before(loader) if mode is Mode.NATIVE else None,
            why_replayed=self.why_replayed,
        )
        if alive is not None:
            if previous is not None and previous.order is not None:
                previous.workers.stopped_at(private.finish_dealt(alive), previous.fetched + previous.lost)
            if self._rotation:
                private.rotate_workers(alive, self._rotation)
                self._rotation = 0
            if previous is not None:
                self._take_over(epoch, previous)
        recorder = self._begin_order(epoch, None)
        if alive is not None and recorder is not None and not private.takes_indices_from(alive, recorder):
            private.replace_index_sampler(alive, recorder)
            self._late = True
        if alive is not None and self._late:
            epoch.exactness = epoch.exactness.lowered(
                Level.ORDER_ONLY, "attached after the persistent workers were started: their streams are not recorded"
            )
        watched = epoch.mode is Mode.SHIP and native.repeats_work(loader.dataset)
        with self._instruments(epoch, self._init(epoch, 0) if watched else None):
            iterator = make()
        self._settle_mode(epoch)
        if epoch.mode is Mode.NATIVE and self._iterable and not native.holds_state(native.capture(loader)):
            epoch.mode = Mode.REPLAY
        epoch.watch_end(iterator)
        return epoch, iterator

    def next_epoch(
        self, make: Make, state: Mapping[str, Any], streams_then: Mapping[str, Any] | None
    ) -> tuple[Epoch, Iterator[Any]]:
        """The epoch after the saved one, under `streams_then` if given; the samplers' counters are in place already."""
        loader, saved = self._loader, state.get("native")
        holders = streams.capture_holders(loader)
        previous: Epoch | None = None
        private.discard_iterator(loader)
        native.reset(loader)
        iterator: Iterator[Any] | None = None
        if state.get("alive") and loader.persistent_workers and loader.num_workers > 0 and self._same_workers(state):
            if self._iterable and state["mode"] == Mode.SHIP == self.mode():
                epoch, iterator = self._restart(make, self._saved_epoch(state))
            else:
                # The saved run would go on with its workers: put them where they were, then the loader resets them.
                previous, standing = self.within(make, state)
                if saved is not None and native.is_finished(saved):
                    epoch, iterator = self._following(previous), standing
        elif saved is not None and saved["of"] == "dataset":
            native.restore(loader, saved)
            native.begin_anew(loader.dataset)
        streams.restore_holders(loader, holders)
        if streams_then is not None:
            rng.restore(streams_then)
        return (epoch, iterator) if iterator is not None else self.fresh(make, previous)

    @rng.untouched()
    def within(
        self,
        make: Make,
        state: Mapping[str, Any],
        streams_then: Mapping[str, Any] | None = None,
        on_change: OnChange = OnChange.REFUSE,
    ) -> tuple[Epoch, Iterator[Any]]:
        """The rest of the saved epoch. Leaves the global streams as it found them.

        Args:
            streams_then: are installed before the first batch that the saved run had not fetched.
            on_change: what to do where the dataset now ends before the batches that were trained.

        Raises:
            MismatchError: it ends there, and the user has not chosen.
        """
        loader = self._loader
        batches, same, saved = int(state["batches"]), self._same_workers(state), state["native"]
        self._forget_iterator()
        native.reset(loader)
        epoch = self._saved_epoch(state)
        streams.restore(loader, state["made"])
        streams.restore_epochs(loader, state["counters"], shared=True)
        self._begin_order(epoch, self._plan(epoch, state) if "order" in state else None)
        init: RoleInit | None = None
        if epoch.mode is Mode.SHIP and same:
            first = state["next_role"] if self._iterable else batches + state["lost"]
            epoch.workers.next_role = self._rotation = first % loader.num_workers
            init = self._init(epoch, self._rotation)
        elif epoch.mode is Mode.NATIVE:
            native.restore(loader, saved)
            if batches == 0 and saved["of"] == "dataset":
                native.begin_anew(loader.dataset)
                epoch.native_before = saved
            init = self._init(epoch, 0) if loader.num_workers > 0 else None
        with self._instruments(epoch, init):
            iterator = make()
        self._settle_mode(epoch)
        if epoch.mode is Mode.REPLAY and (ended := self._replay(iterator, state)):
            if on_change is OnChange.REFUSE:
                raise MismatchError(ended, hint=_BEGINS_AGAIN)
            epoch.exactness = epoch.exactness.lowered(
                Level.NOT_RESTORED, f"data: {on_change}: {ended}; it begins again"
            )
            with self._instruments(epoch, init):
                iterator = make()
        elif epoch.order is not None and loader.num_workers == 0:
            assert self._recorder is not None
            if state["order"]["at_first"] is not None or epoch.dealt is not None:
                self._recorder.prime()
            if saved is not None:
                native.restore(loader, saved)
        over = state["ended"] or (state["exhausted"] and not state["held"])
        if over and saved is not None and saved["of"] == "dataset":
            iterator = iter(())  # the dataset's state cannot say that its last batch has been made
        epoch.watch_end(iterator)
        self._settle(epoch, state, streams_then, same=same)
        return epoch, iterator

    def _settle(
        self, epoch: Epoch, state: Mapping[str, Any], streams_then: Mapping[str, Any] | None, *, same: bool
    ) -> None:
        """What holds for the rest of the epoch once the iterator stands where the saved one stood."""
        order = epoch.order
        if epoch.mode is Mode.REPLAY and epoch.why_replayed is not None:
            epoch.exactness = epoch.level(self._loader)
        if order is not None and order.verified is False:
            epoch.exactness = _unverified(order)
        held = list(state["held"])
        holders = {name: state.get(name, {}) for name in ("counters", "generators", "samplers", "kept")}
        epoch.resumption = Resumption(held, streams_then, holders if same and held else None)
        if same and not held:
            streams.restore_holders(self._loader, holders)
        epoch.exactness = epoch.exactness.also(sampling.compared(self._loader, state, between_epochs=False))

    @rng.untouched()
    def _restart(self, make: Make, previous: Epoch) -> tuple[Epoch, Iterator[Any]]:
        """The next epoch with new workers in place of persistent ones. Leaves the global streams as it found them.

        Workers of an iterable dataset that play another role than their number cannot be moved between epochs as
        those of a map-style one are: they name themselves by number when their shard ends.
        """
        self._forget_iterator()
        epoch, counters = self._following(previous), streams.counters(self._loader)
        try:
            streams.restore(self._loader, previous.made)
            with self._instruments(epoch, self._init(epoch, 0)):
                return epoch, make()
        finally:
            streams.restore_epochs(self._loader, counters)

    def _forget_iterator(self) -> None:
        private.discard_iterator(self._loader)
        self._rotation, self._late = 0, False
        self._fingerprint = self._recipe = None

    def _following(self, previous: Epoch) -> Epoch:
        """The epoch after `previous` with the same workers."""
        epoch = Epoch(
            previous.mode,
            previous.made,
            WorkerRoles([None] * self._loader.num_workers, reused=True),
            why_replayed=self.why_replayed,
        )
        self._take_over(epoch, previous)
        return epoch

    def _saved_epoch(self, state: Mapping[str, Any]) -> Epoch:
        """What the state says about its epoch."""
        workers = list(state["workers"]) if self._same_workers(state) else [None] * self._loader.num_workers
        return Epoch(
            self._resume_mode(state),
            state["made"],
            WorkerRoles(workers, state["reused"], set(state["unknown_roles"])),
            draws=LoadingDraws(state["draws"], at_first=state["first_fetch"]),
            lost=state["lost"],
            fetched=int(state["batches"]),
            exhausted=state["exhausted"],
            why_replayed=self.why_again(state),
            dealt=DealtEpoch.of_order(state.get("order", {})),
        )

    def _resume_mode(self, state: Mapping[str, Any]) -> Mode:
        """The mode in which this loader can go on from `state`; fetching again always works."""
        mode, saved = self.mode(), state["native"]
        if self.why_again(state) is not None:
            return Mode.REPLAY
        if state["mode"] == Mode.NATIVE and saved["of"] == "loader" and native.is_torchdatas(self._loader):
            return Mode.NATIVE
        if mode is Mode.NATIVE:
            return mode if saved is not None and saved["of"] == "dataset" else Mode.REPLAY
        if self._iterable:
            return mode if state["mode"] == mode else Mode.REPLAY
        return mode if "order" in state else Mode.REPLAY

    def _init(self, epoch: Epoch, first: int) -> RoleInit:
        loader = self._loader
        return RoleInit(loader.worker_init_fn, first, tuple(epoch.workers.states), loader.batch_size)

    def _plan(self, epoch: Epoch, state: Mapping[str, Any]) -> ResumePlan:
        order, dealing = state["order"], epoch.dealt and epoch.dealt.dealing
        return ResumePlan(
            skip=int(state["batches"]) + int(state["lost"]) - (0 if dealing is None else dealing.first),
            order=order,
            holders={name: state.get(name, {}) for name in ("counters", "generators", "samplers")},
            dealt=None if dealing is None else dealing.rest(dealing.origin.order()),
        )

    def _take_over(self, epoch: Epoch, previous: Epoch) -> None:
        """Carry over what is known about persistent workers into their next epoch."""
        epoch.workers.states = [state and {**state, "earlier_epoch": True} for state in previous.workers.states]
        epoch.workers.unknown = set(previous.workers.unknown)
        order = previous.order
        if order is None and not previous.exhausted:
            epoch.workers.unknown.update(range(self._loader.num_workers))
        elif order is not None and epoch.mode is Mode.SHIP:
            ahead = range(previous.fetched + previous.lost + previous.workers.thrown_away, order.given)
            epoch.workers.unknown.update(number % self._loader.num_workers for number in ahead)

    def _begin_order(self, epoch: Epoch, plan: ResumePlan | None) -> RecordingSampler | None:
        if self._iterable or epoch.mode not in (Mode.SKIP, Mode.SHIP):
            return None
        inner = self._loader.__dict__[self._sampler_attribute()]
        if self._recorder is None or self._recorder.inner is not inner:
            self._recorder = RecordingSampler(self._loader, inner, self.baseline)
        base = 0 if epoch.dealt is None else epoch.dealt.dealing.first
        epoch.order = SamplerOrder(base=base, given=base)
        self._recorder.begin(epoch.order, plan)
        return self._recorder

    @contextmanager
    def _instruments(self, epoch: Epoch, init: RoleInit | None) -> Iterator[None]:
        attributes = self._loader.__dict__
        replaced: dict[str, Any] = {}
        if epoch.order is not None:
            replaced[self._sampler_attribute()] = self._recorder
        if self._loader.num_workers > 0 and (epoch.mode is Mode.NATIVE or Mode.SHIP in (epoch.mode, self.mode())):
            replaced["collate_fn"] = ShippingCollate(
                self._loader.collate_fn, self._loader.batch_size, self._loader.dataset
            )
        elif epoch.mode is Mode.NATIVE and native.repeats_work(self._loader.dataset):
            replaced["collate_fn"] = partial(collate_watched, self._loader.collate_fn, epoch.draws.loaded)
            epoch.draws.is_watched = True
        if init is not None:
            replaced["worker_init_fn"] = init
        original = {name: attributes[name] for name in replaced}
        attributes.update(replaced)
        try:
            yield
        finally:
            attributes.update(original)

    def _settle_mode(self, epoch: Epoch) -> None:
        """Fall back to replay where the built iterator turns out not to ask the loader's sampler."""
        if epoch.order is not None and self._recorder is not None and not self._recorder.asked:
            epoch.mode, epoch.order = Mode.REPLAY, None
        if epoch.dealt is not None and epoch.order is None:
            raise MismatchError(
                f"a {type(self._loader).__name__} does not ask its sampler: no other number of ranks can resume it",
                hint="resume with the number of ranks that has begun the epoch",
            )

    def _replay(self, iterator: Iterator[Any], state: Mapping[str, Any]) -> str:
        """Fetch the trained batches again; where it ended before them, or ""."""
        batches = int(state["batches"])
        if self._loader.num_workers == 0 and state["first_fetch"] is not None:
            rng.restore(state["first_fetch"])
        for done in range(batches):
            try:
                next(iterator)
            except StopIteration:
                return f"the dataset ended after {done} of {batches} batches that were already trained"
        return ""

    def _same_workers(self, state: Mapping[str, Any]) -> bool:
        return len(state.get("workers", ())) == self._loader.num_workers

    def _sampler_attribute(self) -> str:
        return "sampler" if self._loader.batch_sampler is None else "batch_sampler"


def _unverified(order: SamplerOrder) -> Exactness:
    if order.draws:
        return Exactness().lowered(
            Level.ORDER_ONLY,
            "the sampler draws from the global random streams at every index, so its past order cannot be verified; "
            "exact if later draws do not depend on earlier ones",
        )
    return Exactness().lowered(
        Level.NOT_RESTORED, "the sampler gave other indices than in the saved run: it is not reproducible"
    )
