"""Records where a loader's index sampler started and which indices it gave, and starts it again in the middle of an
epoch.

`RecordingSampler` stands in for the loader's index sampler (`batch_sampler`, or `sampler` without batching) while an
iterator is built; the iterator keeps it. To get past samples that were trained already it draws and drops their
indices, and loads nothing.

A sampler without `state_dict` is put back by its generators and plain counters. Whether that was all shows in its
other attributes: what they are now is compared with what they were at the snapshot, and a difference is named.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

from torch.utils.data import DataLoader

from ckpt_engine.data import exactness, rng, streams
from ckpt_engine.data.exactness import Exactness, Level, checksum
from ckpt_engine.data.native import is_stateful
from ckpt_engine.errors import MismatchError, StateError
from ckpt_engine.observe.run_times import hook_time

Attributes = dict[str, int]
"""Checksums of containers, tensors and arrays by path."""
_FORGOTTEN_AT_ONCE = 16
_STATES = 3
"""Draws of an epoch around which the state of samplers is looked at."""


def attributes(loader: DataLoader[Any]) -> Attributes:
    """Of the loader's class, and of all samplers that may change by themselves and have no state of their own."""
    of_torch = streams.draws_at_start_only(loader)  # nothing of them changes
    return {
        f"{path}.{name}": one
        for path, holder in streams.holders(loader)
        if holder is loader or not (of_torch or is_stateful(holder))
        for name, value in streams.attributes(holder)
        if value is not getattr(loader, "dataset", None) and (one := checksum(value)) is not None
    }


def changed(loader: DataLoader[Any], baseline: Attributes) -> Attributes:
    """Those that are not as they were before training."""
    return {path: value for path, value in attributes(loader).items() if baseline.get(path) != value}


def compared(loader: DataLoader[Any], state: Mapping[str, Any], *, between_epochs: bool) -> Exactness:
    """How exactly the samplers are as they were: named are attributes that were changed and are others now.

    Args:
        state: of the position, with what `changed` has found, and which of these the samplers make at each start.
        between_epochs: those will be made again.
    """
    saved = {
        path: value
        for path, value in state.get("attributes", {}).items()
        if not (between_epochs and path in state.get("made_at_start", ()))
    }
    now = attributes(loader) if saved else {}
    others = [path.rpartition(".") for path, value in saved.items() if now.get(path) != value]
    if not others:
        return Exactness()
    live = dict(streams.holders(loader))
    names = ", ".join(f"{type(live.get(owner)).__name__}.{name}" for owner, _, name in others)
    why = (
        f"training has changed {names}, which no snapshot has: the order from here on may differ; keep it in a sampler "
        "with state_dict() and load_state_dict()"
    )
    return Exactness().lowered(Level.NOT_RESTORED, why)


@dataclass(slots=True)
class SamplerOrder:
    """What the sampler did in the running epoch."""

    at_iter: streams.Streams | None = None
    """When `iter(sampler)` gave the iterator in use (samplers that permute there)."""
    at_first: streams.Streams | None = None
    """When it was first asked for an index (samplers that are generators permute there)."""
    draws: bool = False
    """It drew from a global stream at a later index too."""
    moves: bool = False
    """What it says of itself (`state_dict`) changes when it is asked for an index: it knows its position."""
    ahead: bool = False
    """The consumer holds batches: they may be fetched again."""
    drawn: rng.RngState | None = None
    """Then, without workers: the streams after the last entry of a sampler with a state."""
    made_at_start: set[str] = field(default_factory=set)
    """Attributes that it makes again whenever it starts, see `adapting`."""
    digest: int | None = 0
    """Checksum of every index in the entries before those that are remembered; None where indices are not integers."""
    base: int = 0
    """Number of the first entry: another number of ranks was dealt those before."""
    given: int = 0
    """Number of the next entry."""
    recent: deque[tuple[int, Any]] = field(default_factory=deque)
    """(number, indices) of those given and not yet forgotten."""
    verified: bool | None = None
    """After a resume: did the replayed indices equal those of the run that was saved? None where unknown."""

    def digest_after(self, count: int) -> int | None:
        """The checksum of the entries before number `count`, or None if it is not remembered or cannot be made."""
        if not self.given - len(self.recent) <= count <= self.given:
            return None
        return reduce(extend_digest, [indices for number, indices in self.recent if number < count], self.digest)

    def outstanding(self, count: int) -> list[Any]:
        """The entries given from number `count` on: dealt to workers, not delivered."""
        return [indices for number, indices in self.recent if number >= count]

    def forget_before(self, count: int) -> None:
        """Drop entries that no state can refer to any more: several at once, as a checksum at each step costs more."""
        if not self.recent or count - self.recent[0][0] < _FORGOTTEN_AT_ONCE:
            return
        while self.recent and self.recent[0][0] < count:
            self.digest = extend_digest(self.digest, self.recent.popleft()[1])


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """How the next iteration of the sampler starts."""

    skip: int
    order: Mapping[str, Any]
    """What the state says of the order (`SamplerOrder`). `outstanding` are entries to give first as recorded, because
    the sampler cannot draw them again. `restarts`: the epoch starts again: its first entry is drawn under the streams
    of then, the others follow from it."""
    holders: Mapping[str, Any]
    """What `streams.restore_holders` puts back: the samplers as they were when the state was taken."""
    dealt: Sequence[Any] | None
    """Entries to give instead of those of the sampler; the streams are left alone."""


class RecordingSampler(streams.StandIn):
    """Gives the indices of `inner` unchanged while recording them in `order`.

    Args:
        loader: whose generators and counters belong to the sampler.
        inner: the loader's own index sampler.
        baseline: `streams.counters(loader)` at attach time.
    """

    def __init__(self, loader: DataLoader[Any], inner: Any, baseline: streams.Counters) -> None:
        self._reference = weakref.ref(loader)
        self.inner, self._baseline, self._calls = inner, baseline, 0
        self._current: _RecordingIterator | None = None
        self.order = SamplerOrder()
        self.plan: ResumePlan | None = None
        _show_state(self)

    def begin(self, order: SamplerOrder, plan: ResumePlan | None) -> None:
        """Call right before an iterator is built or reset: what follows is recorded in `order`."""
        self.order, self.plan = order, plan
        self._calls, self._current = 0, None

    @property
    def asked(self) -> bool:
        """True if the iterator that was built uses this sampler."""
        return self._current is not None

    def prime(self) -> None:
        """Do now what the first `next()` would do: put the streams back and get past what was trained."""
        if self._current is not None:
            self._current.prime()

    def __iter__(self) -> Iterator[Any]:
        self._calls += 1
        plan, order = self.plan, self.order
        loader = deref(self._reference)
        entries = self.inner if plan is None or plan.dealt is None else plan.dealt
        # With workers torch calls iter() twice and drops the first result; the first call must draw what it naturally
        # draws, so that the workers' base seed, drawn between the two, comes out as it did.
        dropped = plan is not None and loader.num_workers > 0 and self._calls == 1
        draws = entries is self.inner and not dropped
        if draws and plan is not None and plan.order["at_iter"] is not None:
            streams.restore(loader, plan.order["at_iter"])
            order.at_iter = plan.order["at_iter"]
        elif draws:
            order.at_iter = streams.capture(loader, self._baseline)
        self._current = _RecordingIterator(self._reference, partial(iter, entries), self._baseline, order, plan)
        return self._current


class _RecordingIterator(streams.Proxy, Iterator[Any]):
    def __init__(
        self,
        reference: weakref.ref[DataLoader[Any]],
        start: Callable[[], Iterator[Any]],
        baseline: streams.Counters,
        order: SamplerOrder,
        plan: ResumePlan | None,
    ) -> None:
        loader = deref(reference)
        self._reference, self._start, self._baseline, self._order = reference, start, baseline, order
        self._plan = plan
        self._attributes = attributes(loader)
        self._states = _STATES if streams.capture_samplers(loader) else 0
        self._keeps_streams = self._states > 0 and loader.num_workers == 0
        self.inner = start()
        _show_state(self)
        self._primed = False
        self._watched = (plan is None or plan.dealt is None) and not streams.draws_at_start_only(loader)
        self._again: deque[Any] = deque()

    def prime(self) -> None:
        if self._primed:
            return
        self._primed = True
        order, plan, loader = self._order, self._plan, deref(self._reference)
        if plan is None or (plan.order["at_first"] is None and plan.dealt is None):
            order.at_first = streams.capture(loader, self._baseline)
            return
        if plan.order["at_first"] is not None:
            streams.restore(loader, plan.order["at_first"])
            order.at_first = plan.order["at_first"]
        order.draws, order.moves = plan.order["draws"], plan.order.get("moves", False)
        self._again.extend(plan.order["outstanding"])
        try:
            hook_time.outside(self._repeat, plan)
        except MismatchError:
            if not order.moves:
                raise
            order.verified = False
        if order.verified is False and order.moves:
            self._take_up(plan)
        if plan.order.get("restarts"):
            self._again.extend(itertools.islice(self.inner, 1))

    def _repeat(self, plan: ResumePlan) -> None:
        """Draw again what was drawn, and drop it."""
        order = self._order
        for done in range(plan.skip):
            self._record(self._draw(f"only {done} of {plan.skip} batches that were already trained"))
            if self._attributes:
                self._started()
            order.forget_before(order.base + done)
        digest = order.digest_after(order.given)
        if plan.order["digest"] is not None and digest is not None:
            order.verified = digest == plan.order["digest"]
            order.digest = plan.order["digest"]
            order.recent.clear()
        for _ in plan.order["outstanding"]:
            self._draw(
                f"fewer batches than the {plan.skip + len(plan.order['outstanding'])} the saved run had dealt out"
            )

    def _started(self) -> None:
        """The first entry was given: what that has changed in the sampler is made again at each start."""
        if self._attributes:
            self._order.made_at_start.update(changed(deref(self._reference), self._attributes))
            self._attributes = {}

    def _take_up(self, plan: ResumePlan) -> None:
        """The sampler goes on by its own state, as it does not give again what it gave."""
        order, loader = self._order, deref(self._reference)
        order.given, order.digest, order.verified = order.base + plan.skip, plan.order["digest"], None
        order.recent.clear()
        streams.restore_holders(loader, plan.holders)
        self.inner = self._start()
        _show_state(self)
        length = exactness.known_length(loader)
        if length is not None:
            self.inner = itertools.islice(self.inner, max(0, length - plan.skip - len(plan.order["outstanding"])))

    @hook_time.counted
    def __next__(self) -> Any:
        if first := not self._primed:
            self.prime()
        order = self._order
        if self._again:
            return self._give(self._again.popleft())
        if first or (order.draws and not self._states) or not self._watched:
            indices = hook_time.outside(next, self.inner)
            if self._attributes:
                self._started()
            return self._give(indices)
        before = rng.probe()
        states = streams.capture_samplers(deref(self._reference)) if self._states else None
        indices = hook_time.outside(next, self.inner)
        order.draws = order.draws or before != rng.probe()
        if states is not None:
            self._states -= 1
            order.moves = order.moves or not streams.same(states, streams.capture_samplers(deref(self._reference)))
        return self._give(indices)

    def _give(self, indices: Any) -> Any:
        if self._keeps_streams and self._order.ahead:
            self._order.drawn = rng.capture()
        return self._record(indices)

    def _draw(self, what: str) -> Any:
        try:
            return next(self.inner)
        except StopIteration:
            raise MismatchError(
                f"the sampler gave {what}: it is not the sampler of the saved run",
                hint="resume with the dataset and sampler of the saved run, or start the epoch again",
            ) from None

    def _record(self, indices: Any) -> Any:
        order = self._order
        kept = indices[:] if isinstance(indices, list) else indices  # a data set may sort it
        order.recent.append((order.given, kept))
        order.given += 1
        return indices


def deref(reference: weakref.ref[DataLoader[Any]]) -> DataLoader[Any]:
    """The loader, or StateError if its owner dropped it."""
    loader = reference()
    if loader is None:
        raise StateError("the data loader of this position no longer exists", hint="keep the loader while it is used")
    return loader


def extend_digest(digest: int | None, indices: Any) -> int | None:
    """CRC-32 over the indices as 64-bit integers; None from the first entry on that is not made of integers."""
    if digest is None:
        return None
    try:
        return zlib.crc32(array("q", indices if isinstance(indices, (list, tuple)) else [indices]), digest)
    except (TypeError, OverflowError):
        return None


def _show_state(proxy: streams.Proxy) -> None:
    """A StatefulDataLoader asks samplers and their iterators for their state where they have these two methods."""
    if is_stateful(proxy.inner):
        vars(proxy).update(state_dict=proxy.inner.state_dict, load_state_dict=proxy.inner.load_state_dict)
