"""Where one DataLoader is: `attach` follows it, `state` says it, with the samples that workers have been given and
training has not had; `load_state` puts a new process there.

The loader's class becomes a subclass that overrides `__iter__` only, so an existing loader reports its iterations
without other changes. Pickles and copies of it are of the original class: spawned workers, launchers and
`copy.deepcopy` never see the subclass. A loaded state stays `Pending` until a batch is fetched, because trainers may
ask for an iterator several times before.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NoReturn, Protocol, cast

from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine.data import exactness as fingerprint
from ckpt_engine.data import sampling, streams
from ckpt_engine.data.changed_loader import fit_to, require_same_split, resplit
from ckpt_engine.data.epoch_start import Starter
from ckpt_engine.data.exactness import Difference, Effect, Exactness, Level, OnChange, Restoration
from ckpt_engine.data.iteration import Epoch, Fetch, FollowedIterator, Mode, no_order, nothing_recorded
from ckpt_engine.data.rng import RngState
from ckpt_engine.data.sample_assignment import DealtEpoch
from ckpt_engine.data.sampling import deref
from ckpt_engine.errors import MismatchError, NewerFormatError, StateError

_VERSION = 2
State = dict[str, Any]
_ATTRIBUTE = "_ckpt_engine_position"
_ORIGINAL = "_ckpt_engine_original"
"""Attribute of a class that takes the place of a loader's: that class."""
_set_class = object.__dict__["__class__"].__set__  # works where a class hides `__class__` behind a read-only property


class Pending:
    """What the next iterators of a loader start from until one of them is asked for a batch.

    Args:
        state: the loaded state.
        phase: "within" or "fresh": what it resumes into.
        rng: global streams to install at the last moment, or None.
    """

    def __init__(self, state: Mapping[str, Any], phase: str, rng: Mapping[str, Any] | None) -> None:
        self.state, self.phase = dict(state), phase
        self.rng = None if rng is None else dict(rng)
        self.begun = False
        self._before: streams.Streams = {}
        self._after: streams.Counters = {}

    @property
    def batches(self) -> int:
        """Batches of the running epoch that are behind us."""
        return 0 if self.phase == "fresh" else int(self.state["batches"])

    @property
    def dealt(self) -> DealtEpoch | None:
        """See `LoaderPosition.dealt`."""
        return DealtEpoch.of_order(self.state.get("order", {})) if self.phase == "within" else None

    def install(self, loader: DataLoader[Any]) -> Exactness:
        """At load time: samplers of a fresh epoch get their counters now, so that a later `set_epoch` still counts.

        Returns:
            How exactly samplers that change with training are as they were.
        """
        if self.phase != "fresh":
            return Exactness()
        streams.restore_holders(loader, self.state)
        return sampling.compared(loader, self.state, between_epochs=True)

    def before_iterator(self, loader: DataLoader[Any]) -> None:
        """Take back what building an earlier iterator moved in the samplers, but nothing that the user set since."""
        if self.begun and self.phase == "fresh":
            now, before = streams.counters(loader), self._before["counters"]
            moved = {path: value for path, value in before.items() if now.get(path) == self._after.get(path)}
            streams.restore_holders(loader, {**self._before, "counters": moved})
        self._before = streams.capture_holders(loader)

    def after_iterator(self, loader: DataLoader[Any]) -> None:
        """Remember what building the iterator made of the samplers."""
        self._after = streams.counters(loader)
        self.begun = True


def attach(loader: DataLoader[Any], *, lookahead: int = 0) -> LoaderPosition:
    """Follow `loader` from its next `iter()` on and return its position; idempotent.

    The loader stays the same object with the same type name, its run is unchanged bit for bit, and it gains no
    `state_dict` (checkpoints of others must not depend on us). Only the thread that iterates may call the position.

    Args:
        loader: a torch `DataLoader` or subclass. Wrappers (Accelerate's `DataLoaderShard`): their `base_dataloader`.
        lookahead: how many batches the consumer may hold that are fetched but not trained at a fetch boundary:
            0 for a plain loop and Lightning with known length, 1 for Accelerate and Lightning with unknown length.
            Attaching again keeps the larger value.
    """
    followed = followed_by(loader)
    if isinstance(followed, LoaderPosition):
        followed.lookahead = max(followed.lookahead, lookahead)
        return followed
    return LoaderPosition(loader, lookahead=lookahead)


class LoaderPosition:
    """The position of one loader; made by `attach`.

    A resumed process makes the same loader, attaches, calls `load_state`, restores the global random streams
    (`rng.restore`, or pass them as `rng=`) and goes on with `iter(loader)`. Everything redone on the way (building the
    iterator, getting past trained samples, fetching batches again) leaves the global streams as it found them.
    """

    def __init__(self, loader: DataLoader[Any], *, lookahead: int = 0) -> None:
        self._reference = weakref.ref(loader)
        self.lookahead = lookahead
        self.wrap: Callable[[Iterator[Any]], Iterator[Any]] | None = None
        """Called with each new iterator of the loader; the consumer gets what it returns."""
        self.aside: Callable[[Callable[[], Iterator[Any]]], Iterator[Any] | None] | None = None
        """Called with what makes an iterator when a pass begins; what it returns is given to the consumer instead of a
        pass whose position this is."""
        self._starter = Starter(loader)
        self._epoch: Epoch | None = None
        self._pending: Pending | None = None
        self._restoration: Restoration | None = None
        self._on_change = OnChange.REFUSE
        swap_in(loader, self)

    def __repr__(self) -> str:
        return f"LoaderPosition({self.mode}, fetched={self.fetched}, lookahead={self.lookahead})"

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader; a position does not keep it alive.

        Raises:
            StateError: its owner dropped it.
        """
        return deref(self._reference)

    @property
    def dropped(self) -> bool:
        """The loader is gone."""
        return self._reference() is None

    @property
    def mode(self) -> Mode:
        """How this loader's position is recorded."""
        return self._epoch.mode if self._epoch is not None else self._starter.mode()

    @property
    def fetched(self) -> int:
        """Batches fetched in the current epoch, those before a resume included."""
        if self._pending is not None:
            return self._pending.batches
        return self._epoch.fetched if self._epoch is not None else 0

    @property
    def exhausted(self) -> bool:
        """True if the current epoch's iterator has ended: the next `iter()` starts a new epoch."""
        return self._pending is None and self._epoch is not None and self._epoch.exhausted

    @property
    def dealt(self) -> DealtEpoch | None:
        """The current or loaded epoch, if another number of ranks has begun it."""
        if self._pending is not None:
            return self._pending.dealt
        return None if self._epoch is None else self._epoch.dealt

    @property
    def place(self) -> int | None:
        """Which part of the samples this loader has, from 0; None where its samplers do not tell."""
        return cast("int | None", self._starter.recipe().get("rank"))

    @property
    def exactness(self) -> Exactness:
        """How exactly a resume from a state taken now would repeat this run."""
        return self._epoch.level(self.loader) if self._epoch is not None else Exactness()

    @property
    def restoration(self) -> Restoration | None:
        """What the last `load_state` achieved, final once the first batch is fetched; None if there was none."""
        found, epoch = self._restoration, self._epoch
        if found is None or epoch is None or (self._pending is not None and not self._pending.begun):
            return found
        return replace(found, exactness=found.exactness.also(epoch.exactness))

    def state(self, consumed: int | None = None, *, asked_again: bool = False) -> State:
        """The position at a fetch boundary: right before the trainer asks for its next batch.

        Args:
            asked_again: the consumer keeps an iterator that has ended and asks it again, as a combination of loaders
                does: such an end has the phase "ended".
            consumed: batches of this epoch that were trained completely; default: all fetched ones but `lookahead`.
                0 after the end of an epoch means the epoch to come.

        Returns:
            A tree that a snapshot stores without pickle and that never changes afterwards. `state["phase"]` says what
            follows: "within" the epoch, "ended" (every batch was trained, the iterator has not been asked again) or
            "fresh" (the next `iter()` starts an epoch).

        Raises:
            StateError: `consumed` is further back than `lookahead` remembers, or more than was fetched.
        """
        if self._pending is not None:
            return self._pending.state
        epoch = self._epoch
        if epoch is None:
            return self._assemble(None, None, 0, "fresh")
        if consumed is None:
            consumed = epoch.fetched if epoch.exhausted else max(epoch.fetched - self.lookahead, 0)
        elif consumed == 0 and epoch.exhausted:
            consumed = epoch.fetched  # of the epoch to come, whose iterator the consumer has not built yet
        if consumed > epoch.fetched or (consumed < epoch.fetched and consumed not in epoch.ring):
            raise StateError(
                f"{epoch.fetched} batches were fetched and the position of batch {consumed} is not remembered",
                hint="attach(loader, lookahead=n) with n the number of batches the trainer holds",
            )
        if epoch.exhausted and consumed == epoch.fetched:
            phase = "ended" if asked_again else "fresh"
        elif consumed == (epoch.dealt.total if epoch.dealt else self._starter.fingerprint()["batches"]) or (
            consumed == epoch.fetched and epoch.ended()
        ):
            phase = "ended"
        else:
            phase = "within"
        fetch = epoch.ring[consumed] if consumed < epoch.fetched else epoch.next_fetch(self.loader)
        return self._assemble(epoch, fetch, consumed, phase)

    def next_epoch_state(self) -> State:
        """The position of a trainer that is done with this epoch even if the loader is not (`limit_train_batches`).

        The next `iter()` after loading it starts a new epoch, as it would have done here.
        """
        return {**self.state(self.fetched), "phase": "fresh"}

    def state_after(self, batches: int) -> State:
        """The position in an epoch that begins now, after so many batches, where none was recorded.

        The batches are drawn and dropped when the epoch begins; of iterable datasets they are fetched and dropped. What
        decides the order of this epoch (`set_epoch`) must be set before.
        """
        loader, mode = self.loader, self._starter.mode()
        now = streams.capture(loader, self._starter.baseline)
        ordered = mode in (Mode.SKIP, Mode.SHIP) and not isinstance(loader.dataset, IterableDataset)
        state = self._assemble(None, None, batches, "within") | {
            "mode": str(mode if ordered else Mode.REPLAY),
            "generators": {},
            "counters": {},
            **nothing_recorded(loader.num_workers),
            "made": now,
        }
        if ordered:
            state["order"] = {**no_order(), "at_iter": now, "at_first": now}
        return state

    def load_state(
        self,
        state: Mapping[str, Any],
        *,
        rng: Mapping[str, Any] | None = None,
        at_end: Literal["next_epoch", "finish_epoch"] = "next_epoch",
        on_change: OnChange = OnChange.REFUSE,
        restart: bool = False,
    ) -> Restoration:
        """Continue at `state` from the next `iter(loader)` on; it holds until the first batch is fetched.

        Args:
            state: from `state()` or `next_epoch_state()` of the same loader in another process.
            rng: `rng.capture()` of the snapshot instant, installed at the last moment: before the first batch that the
                saved run had not fetched, or before a fresh epoch's iterator is built. With several loaders give it to
                the one that is asked first. Without it the caller restores the streams itself, after `iter()` at
                the latest (before `iter()` for a fresh epoch).
            at_end: what a state of phase "ended" resumes into. "next_epoch": a fresh epoch, for trainers that count
                batches and never ask for one more. "finish_epoch": an iterator that ends at once, for loops
                that run until the iterator ends.
            on_change: what to do in the middle of an epoch if the loader is not the one that was saved; between
                epochs it is taken as it is, unless it is as long as before and has other samples.
            restart: the epoch starts again in any case.

        Raises:
            MismatchError: the loader is not the one that was saved; names every field that differs.
            NewerFormatError: the state was written by a later version.
        """
        if state["version"] > _VERSION:
            raise NewerFormatError(f"loader position of version {state['version']}, this is version {_VERSION}")
        differences = self._compared(state)
        behind_the_end = "fresh" if at_end == "next_epoch" else "within"
        phase = behind_the_end if state["phase"] == "ended" else state["phase"]
        exactness = _saved_exactness(state, differences)
        changed = [d for d in differences if d.effect in (Effect.REFUSED, Effect.OTHER_SAMPLES)]
        restarts = False
        if changed or restart:
            policy = OnChange.RESTART_EPOCH if restart else on_change
            saved = {**state, "phase": phase}
            state, phase, fitted, restarts = fit_to(saved, changed, policy, self._starter.recipe(), self.loader)
            exactness = fitted.also(exactness)
        self._pending, self._on_change = Pending(state, phase, rng), on_change
        exactness = exactness.also(self._pending.install(self.loader))
        batches = 0 if phase == "fresh" else state["batches"]
        why = self._starter.why_again(state) if batches else None
        again = "" if why is None else f"{batches} batches are loaded again and dropped, as {why}"
        self._restoration = Restoration(exactness, differences, state["mode"], state["phase"], batches, restarts, again)
        return self._restoration

    def _compared(self, state: Mapping[str, Any]) -> tuple[fingerprint.Difference, ...]:
        """How the loader differs, with what its samplers count in the state: their length may follow from that."""
        saved, samplers = state["counters"], streams.holders(self.loader)
        now = streams.counters(self.loader)
        now |= {f"{path}.epoch": one.epoch for path, one in samplers if hasattr(one, "epoch")}
        known = [path for path in saved if path in now]
        streams.restore_counters(self.loader, {path: saved[path] for path in known})
        try:
            return fingerprint.compare(state["fingerprint"], self._starter.fingerprint(again=True))
        finally:
            streams.restore_counters(self.loader, {path: now[path] for path in known})

    def for_another_number(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int, rng: RngState, common: RngState
    ) -> State:
        """The state for `load_state` with which `size` ranks go on where others were; see `changed_loader.resplit`.

        Args:
            states: of this loader on each of the saved ranks, in order.
            rank, size: which of how many ranks this is.
            rng: streams of this rank, from which those of its workers are made.
            common: streams that are the same for all ranks.

        Raises:
            ResumeError: the rest of the epoch cannot be divided again; says why.
        """
        fresh = self._assemble(None, None, 0, "fresh")
        require_same_split(fingerprint.compare(states[0]["fingerprint"], fresh["fingerprint"]))
        return resplit(self.loader, fresh, states, rank, size, rng, common)

    def forget(self) -> None:
        """What was loaded and not begun yet does not count any more: the next epoch starts by itself."""
        self._pending = self._restoration = None

    def leave(self) -> None:
        """The epoch that was loaded is over although nothing asked for a batch: the next `iter()` starts the one after
        it, as `next_epoch_state` says."""
        if self._pending is not None:
            self._pending = Pending({**self._pending.state, "phase": "fresh"}, "fresh", None)
            self._pending.install(self.loader)

    def detach(self) -> None:
        """Give the loader its original class back; iterators already running go on."""
        loader = self._reference()
        if loader is not None and followed_by(loader) is self:
            swap_back(loader)

    # -- Iterations
    def begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Called in place of the loader's `__iter__`."""
        if self.aside is not None and (instead := self.aside(make)) is not None:
            return instead
        pending, loader = self._pending, self.loader
        if pending is None:
            epoch, iterator = self._starter.fresh(make, self._epoch)
        else:
            pending.before_iterator(loader)
            if pending.phase == "within":
                try:
                    epoch, iterator = self._starter.within(make, pending.state, pending.rng, self._on_change)
                except MismatchError as err:
                    return map(_raise, [err])  # when a batch is asked for: the teardown of Lightning hides it here
            else:
                epoch, iterator = self._starter.next_epoch(make, pending.state, pending.rng)
            pending.after_iterator(loader)
        self._epoch = epoch
        followed = FollowedIterator(self.loader, iterator, epoch, self._on_fetch)
        return followed if self.wrap is None else self.wrap(followed)

    def _on_fetch(self, epoch: Epoch) -> int:
        if self._pending is not None and epoch is self._epoch and self._pending.begun:
            self._pending = None
        return self.lookahead

    def _assemble(self, epoch: Epoch | None, fetch: Fetch | None, batches: int, phase: str) -> State:
        exactness, among = self.exactness, streams.holders(self.loader)
        state: State = {
            "version": _VERSION,
            "phase": phase,
            "batches": batches,
            "mode": str(self.mode),
            "fingerprint": self._starter.fingerprint(),
            "recipe": self._starter.recipe(),
            "exactness": {"level": str(exactness.level), "reasons": list(exactness.reasons)},
            "generators": streams.capture_generators(self.loader, among),
            "counters": streams.changed_counters(self.loader, self._starter.baseline, among),
            "samplers": streams.capture_samplers(self.loader, among),
            "kept": streams.kept_by_dataset(self.loader, self._starter.baseline),
            "attributes": self._starter.attributes(),
        }
        if epoch is None or fetch is None:
            return state
        order = epoch.order
        state |= {
            "lost": epoch.lost,
            "held": [epoch.ring[n].rng for n in range(batches, epoch.fetched)],
            "workers": list(fetch.workers),
            "next_role": fetch.next_role,
            "native": fetch.native,
            "made": epoch.made,
            "reused": epoch.workers.reused,
            "alive": self._starter.alive(),
            "first_fetch": epoch.draws.at_first,
            "draws": epoch.draws.seen,
            "ended": fetch.ended,
            "exhausted": epoch.exhausted,
            "unknown_roles": sorted(epoch.workers.unknown),
        }
        if order is not None:
            given = batches + epoch.lost
            state["made_at_start"] = sorted(order.made_at_start)
            # Without workers, only a batch that is kept was asked for already.
            again = state["samplers"] or (order.draws and self.loader.num_workers)
            state["order"] = {
                "at_iter": order.at_iter,
                "at_first": order.at_first,
                "digest": order.digest_after(given),
                "draws": order.draws,
                "outstanding": order.outstanding(given) if again else [],
                "moves": order.moves,
            }
        if order is not None and epoch.dealt is not None:
            state["order"]["dealt"] = epoch.dealt.to_state()
        return state


def _raise(error: MismatchError) -> NoReturn:
    raise error


def _saved_exactness(state: Mapping[str, Any], differences: tuple[Difference, ...]) -> Exactness:
    saved = state["exactness"]
    found = Exactness(Level(saved["level"]), tuple(saved["reasons"]))
    for difference in differences:
        if difference.effect is Effect.AUGMENTATION:
            found = found.lowered(Level.ORDER_ONLY, str(difference))
    return found


class Iterations(Protocol):
    """Takes part in the iterations of a loader."""

    def begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The iterator to use; `make` is the loader's own `__iter__`."""


def swap_in(loader: DataLoader[Any], iterations: Iterations) -> None:
    """From now on `iter(loader)` returns `iterations.begin(the original iter)`."""
    original: type = type(loader)
    loader.__dict__[_ATTRIBUTE] = iterations
    _set_class(loader, _subclass_of(original))


def swap_back(loader: DataLoader[Any]) -> None:
    """Undo `swap_in`; does nothing to a loader that is not swapped."""
    if loader.__dict__.pop(_ATTRIBUTE, None) is not None:
        _set_class(loader, vars(type(loader)).get(_ORIGINAL, type(loader)))


def followed_by(loader: DataLoader[Any]) -> Iterations | None:
    """Who follows this loader, or None."""
    return loader.__dict__.get(_ATTRIBUTE)


@cache
def _subclass_of(original: type) -> type:
    base: Any = original

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        iterations: Iterations | None = self.__dict__.get(_ATTRIBUTE)
        if iterations is None:
            return base.__iter__(self)  # type: ignore[no-any-return]
        return iterations.begin(lambda: base.__iter__(self))

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        return _without_position(base.__reduce_ex__(self, protocol), original)

    subclass: type = type(original)(
        original.__name__,
        (original,),
        {
            "__iter__": __iter__,
            "__reduce_ex__": __reduce_ex__,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            _ORIGINAL: original,
        },
    )
    return subclass


def _without_position(reduced: Any, original: type) -> Any:
    """The result of `__reduce_ex__` as the original class would have given it."""
    if not isinstance(reduced, tuple):
        return reduced
    function, arguments, *rest = reduced
    arguments = tuple(original if a is _subclass_of(original) else a for a in arguments)
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        function = original.__new__  # pickle insists that `__newobj__` is given the class of the very object
    if rest and isinstance(rest[0], dict):
        rest[0] = {k: v for k, v in rest[0].items() if k != _ATTRIBUTE}
    return (function, arguments, *rest)
