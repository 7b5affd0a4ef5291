"""One loader that is followed: when its consumer asks for a batch, how many it has had, and where a snapshot may be
taken.

A loader may be a torch `DataLoader`, or a wrapper around one (Accelerate, Lightning Fabric). The consumer iterates the
wrapper; the position is that of the `DataLoader` inside. `obstacle_of` names the boundaries that a resumed script does
not come back to.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ckpt_engine.data import exactness, native, position, private_names, rng
from ckpt_engine.data.exactness import Level, OnChange, Restoration
from ckpt_engine.data.position import LoaderPosition, attach
from ckpt_engine.data.sampling import deref
from ckpt_engine.data.streams import Proxy
from ckpt_engine.loop.phases import BEGUN, ENDED, LEFT, OPEN, RUNNING, UNBEGUN, PassPhase
from ckpt_engine.loop.shape import Ask, At, Lead
from ckpt_engine.observe.run_times import hook_time
from ckpt_engine.snapshot.ownership import leavers

if TYPE_CHECKING:
    from ckpt_engine.loop.tracker import Tracker

State = dict[str, Any]
clock = itertools.count(1)


@dataclass(frozen=True, slots=True)
class LoaderSource:
    """A loader as the consumer sees it and the torch loader inside.

    Args:
        outer: what the consumer iterates.
        base: where batches come from; `outer` itself, if it is a torch loader.
        lookahead: batches that `outer` has fetched when it gives one, beyond that one.
        counter: attribute of `outer` that counts its passes, or "".
        share: batches of `base` that make one of `outer`; 0: `base` is never asked, as another rank has the batches.
        ended: attribute of `outer` that is true once it has given its last batch; asked where `share` is 0.
        dispatched: one process fetches the batches of all.
        inexact: why a resume within an epoch is less exact than the position of `base`, or "".
    """

    outer: Any
    base: DataLoader[Any]
    lookahead: int = 0
    counter: str = ""
    share: int = 1
    ended: str = ""
    dispatched: bool = False
    inexact: str = ""

    length_of = staticmethod(exactness.length_of)

    def reset(self) -> None:
        """Forget the iterators that `outer` has made of a loader that keeps its own position: none was recorded."""
        native.reset(self.base)

    @property
    def dealt(self) -> int | None:
        """How many batches this rank has of an epoch that another number of ranks has begun; None: none has."""
        return (attach(self.base).dealt or (None, None))[1]


class Feed:
    """Follows one loader until `release`.

    Args:
        name: for reports.
        source: the loader.
        listener: hears of passes.
    """

    def __init__(self, name: str, source: LoaderSource, listener: Tracker) -> None:
        self.name, self.kind = name, type(source.outer).__name__
        self.delivered = 0
        """Batches of the current or last pass that the consumer was given, those before a resume included."""
        self.epochs = 0
        """Passes that are over and in which weights changed."""
        self.phase = UNBEGUN
        """Of the current or last pass."""
        self.trained = False
        """Weights changed during the current or last pass."""
        self.longest: int | None = 0
        """Most batches of one pass that the consumer was given before a step; None: not known."""
        self._stepped_at = 0
        self.interior = False
        """A snapshot could have been taken in the middle of it."""
        self.starts_only = False
        """In the last pass in which weights changed, none could: epochs are too short."""
        self.alone = False
        """It changed weights in its last pass, and no other pass that did was running when that ended."""
        self.skips = 0
        """Passes from now on that were complete before the snapshot: they have no batches."""
        self.restarts = False
        """A pass began while the one before could still be asked."""
        self.says: list[str] = []
        """Why passes over this loader cannot be repeated."""
        self.asked_from: At = ()
        """Functions and instructions that have asked for the last batch, innermost first."""
        self.way: list[Any] = []
        """The same with our own, as they are in turn."""
        self.asked_on = 0
        """The thread of that."""
        self.asked_at = self.begun_at = self.left_at = 0
        """When a batch was last asked for, the last pass began, and the one before it was over; in order."""
        self.lead = Lead()
        self.source = replace(source, outer=None, base=cast("Any", None))
        """The source without its loaders: see `_outer`."""
        self._recorded = 0
        self._count_at_begin, self._base_begun = 0, False
        self._resumed: State | None = None
        self._streams: Mapping[str, Any] | None = None
        """Where no batch of the torch loader is fetched: what is to be installed once its iterator is there."""
        self._before = (0, 0, False, UNBEGUN, 0)
        self._pass: weakref.ref[_Pass] | None = None
        # Weak, as all that a loader reaches: a loader in a cycle would wait for the garbage collector, and a worker
        # forked meanwhile would try to join its siblings.
        self._outer = weakref.ref(source.outer)
        self._listener: Callable[[], Tracker | None] = weakref.ref(listener)
        leavers.add(self)
        self.position: LoaderPosition = attach(source.base, lookahead=source.lookahead)
        self._length = exactness.known_length(source.base) if source.share == 1 else None
        if source.outer is source.base:
            self.position.aside = lambda _: self._before_pass()
            self.position.wrap = lambda iterator: self._begin(self._base_begin(iterator))
        else:
            self.position.wrap = self._base_begin
            position.swap_in(source.outer, self)

    @property
    def at_end(self) -> bool:
        """Every batch of the pass was given, as far as that is known."""
        dealt = self.position.dealt
        asked = self.source.share > 0
        exhausted = self.position.exhausted if asked else bool(getattr(deref(self._outer), self.source.ended))
        return self.delivered > 0 and (exhausted or self.delivered == (self._length if dealt is None else dealt[1]))

    @property
    def running(self) -> Any:
        """The pass that the consumer is in; None if there is none."""
        return self._pass() if self.phase in OPEN and self._pass is not None else None

    @property
    def resuming(self) -> bool:
        """A loaded state waits for the consumer's first batch."""
        return self._resumed is not None

    @property
    def restoration(self) -> Restoration | None:
        """How exactly the position was put back."""
        found = self.position.restoration
        if found is None or not self.source.inexact or found.phase != "within":
            return found
        return replace(found, exactness=found.exactness.lowered(Level.ORDER_ONLY, self.source.inexact))

    @property
    def trained_on(self) -> int:
        """Batches of the current pass that the consumer does not have to ask for again."""
        return max(self.delivered - (self.lead.ahead or 0), 0)

    @property
    def remembers(self) -> bool:
        """Whether the position of the first batch that is to be asked for again was recorded."""
        return self._recorded >= (self.lead.ahead or 0)

    @property
    def without_step(self) -> int:
        """Batches of the pass that the consumer was given since the last step, or since it resumed."""
        return self.delivered - self._stepped_at

    @property
    def has_older_iterator(self) -> bool:
        """Whether an iterator lives that was made before the loader was followed: no position counts its batches."""
        if self.begun_at or self._outer() is None:
            return False
        loader = self.position.loader
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        iterators = (one for one in gc.get_objects() if issubclass(type(one), _BaseDataLoaderIter))
        return any(private_names.takes_indices_from(one, sampler) for one in iterators)

    def stepped(self) -> None:
        """Weights have changed."""
        self.trained = True
        taken, self._stepped_at = self.delivered - self._stepped_at, self.delivered
        if self.longest is None or taken > self.longest:
            self.longest = taken

    def say(self, problem: str) -> None:
        """Passes over this loader cannot be repeated."""
        if problem not in self.says:
            self.says.append(problem)
            if (listener := self._listener()) is not None:
                listener.report_inexact(problem)

    def look_ahead(self, ask: Ask) -> None:
        """A step is complete, and it is not known yet how far the loop reads ahead."""
        self.lead.boundary(ask)
        if self.lead.ahead is not None:
            self.lead_known()

    def lead_known(self) -> None:
        """It is known how far the loop reads ahead: the positions of that many batches are recorded from now on."""
        ahead = self.lead.ahead or 0
        if ahead and self.source.share != 1:
            self.lead.ahead, self.lead.unclear = 0, ahead
        elif ahead:
            self.position.lookahead, self._recorded = self.source.lookahead + ahead, 0
        if self.lead.unclear:
            self.say(
                f"the first step of a pass over {self.name!r} takes {self.lead.unclear} batches more than the next: "
                "a loop that skips or keeps batches does so again after a resume: skip by the count from "
                "run.resumed_batches on"
            )

    def state(self) -> State:
        """Where the consumer is, at a fetch boundary of any feed."""
        if self._resumed is None and self.phase in OPEN and (self.delivered > 0 or self._base_begun):
            state = self._assemble(self._position(), self.trained_on, self._count_at_begin)
            known = None if self.lead.unclear else self.lead.ahead  # else a resumed run finds out, and says so
            return state | {"open": True, "trained": self.trained, "ahead": known}
        return self.next_pass_state()

    def next_pass_state(self) -> State:
        """Where the consumer will be when it starts its next pass."""
        if self._resumed is not None:
            return self._resumed
        return self._assemble(self.position.next_epoch_state(), 0, self._count())

    def load(self, state: State, streams: Mapping[str, Any] | None, on_change: OnChange = OnChange.REFUSE) -> None:
        """The next pass continues at `state`; `streams` are installed before the first batch that was not fetched yet.

        Args:
            on_change: what becomes of a pass that is resumed in its middle with a changed loader.

        Raises:
            MismatchError: the loader is not the one that was saved.
        """
        self._before = (self.delivered, self.epochs, self.starts_only, self.phase, self._count())
        # The position installs them at the first fetch of a batch.
        late = self.source.share == 0 and state["position"]["phase"] == "within"
        self._streams = streams if late else None
        if self.source.dispatched and on_change is OnChange.CONTINUE:
            on_change = OnChange.REFUSE  # one process fetches for all: no rank has samples of its own to divide
        # An iterator that is running is asked until it ends, also by who counts batches.
        at_end: Any = "finish_epoch" if state.get("open") else "next_epoch"
        found = self.position.load_state(
            state["position"], rng=None if late else streams, at_end=at_end, on_change=on_change
        )
        if found.restarted:
            state = {**state, "position": self.position.state(), "delivered": 0}
        elif state.get("open") and state["delivered"] and state["position"]["phase"] == "fresh":
            # A wrapper has found the end ahead of its consumer, who still asks that pass once more, for nothing.
            state = {**state, "over": True, "delivered": 0, "counter": state["counter"] + 1}
        self._resumed = state
        self.delivered, self.epochs = int(state["delivered"]), int(state["epochs"])
        self.starts_only, self.phase = bool(state["starts_only"]), self.phase.to(UNBEGUN)
        self.longest = state.get("longest")
        if (ahead := state.get("ahead")) is not None:
            self.lead.ahead, self._recorded = ahead, ahead
            self.position.lookahead = self.source.lookahead + ahead
        if self.source.counter:
            setattr(deref(self._outer), self.source.counter, state["counter"])

    def begin_after(self, epochs: int, batches: int) -> None:
        """The next pass comes after so many others, and starts after so many of its batches.

        For a run whose position is not recorded. The loader must know its epoch before.
        """
        if batches:
            position = self.position.state_after(batches * self.source.share)
            state = {"position": position, "counter": self._count(), "delivered": batches}
            self.load({**state, "epochs": epochs, "starts_only": False}, None)
        self.epochs = epochs

    def forget(self) -> None:
        """The next pass starts by itself: what was loaded, and not begun yet, does not count any more."""
        if self._resumed is None:
            return
        self._resumed = self._streams = None
        self.delivered, self.epochs, self.starts_only, phase, count = self._before
        if self.phase is UNBEGUN:
            self.phase = self.phase.to(phase)
        if self.source.counter:
            setattr(deref(self._outer), self.source.counter, count)
        self.position.forget()

    def leave(self) -> None:
        """The loop went on without asking for a batch of the resumed pass, and left it, as the saved one did."""
        if self._resumed is not None and (self.delivered or self._resumed.get("over")):
            self._resumed = None
            self.position.leave()

    def release(self) -> None:
        """Give the loader back as it was."""
        outer = self._outer()
        if outer is None:
            return
        self.position.wrap = self.position.aside = None
        self.position.detach()
        if position.followed_by(outer) is self:
            position.swap_back(outer)

    # -- position.Iterations, for wrappers
    def begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Called in place of the wrapper's `__iter__`."""
        instead = self._before_pass()
        if instead is not None:
            return instead
        self._base_begun = False
        over = self._resumed is not None and self._resumed.get("over")
        return self._begin(iter(()) if over else make())

    def _before_pass(self) -> Iterator[Any] | None:
        """What a pass that would begin now is instead."""
        if self.running is not None:
            self.restarts = True
        self._close()
        if not self.skips:
            return None
        self.skips -= 1
        return iter(())

    def _base_begin(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self._base_begun = True
        if self._streams is not None:
            rng.restore(self._streams)
            self._streams = None
        return iterator

    def _begin(self, iterator: Iterator[Any]) -> Iterator[Any]:
        resumed = self._resumed
        if resumed is None:
            self.delivered = 0
        self.trained = resumed is not None and bool(resumed.get("trained", self.delivered > 0))
        self.begun_at, self._stepped_at = next(clock), self.delivered
        unknown = self.lead.ahead is None
        self.lead.begin()
        if unknown and self.lead.ahead is not None:
            self.lead_known()
        self.interior = self.delivered > 0  # what resumes within a pass had a boundary there
        self._count_at_begin = self._count()
        self.phase = self.phase.to(BEGUN)
        running = _Pass(self, iterator)
        self._pass = weakref.ref(running, self._dropped)
        return running

    def _dropped(self, reference: weakref.ref[_Pass]) -> None:
        if reference is self._pass:
            self._close()

    def _close(self, phase: PassPhase = LEFT) -> None:
        if self.phase not in OPEN:
            return
        self.phase, self.left_at = self.phase.to(phase), next(clock)
        if self.trained:
            self.epochs += 1
            self.starts_only = not self.interior
        if (listener := self._listener()) is not None:
            listener.over(self)

    def leave_fork(self) -> None:
        """See `Leaver`: a fork may read the data, and trains nothing."""
        self._listener = lambda: None

    def _position(self) -> State:
        """Of the torch loader, after what was given of it."""
        taken = self.trained_on * self.source.share
        if self.source.share > 1 and self.position.exhausted:
            taken = min(taken, self.position.fetched)  # the last batch may be made of fewer
        return self.position.state(taken)

    def _assemble(self, position: State, delivered: int, counter: int) -> State:
        return {
            "position": position,
            "delivered": delivered,
            "counter": counter,
            # A pass that is left and not closed yet counts for the next one.
            "epochs": self.epochs + (self.phase in OPEN and self.trained and not delivered),
            "starts_only": self.starts_only,
            "alone": self.alone,
            "longest": self.longest,
        }

    def _count(self) -> int:
        return int(getattr(deref(self._outer), self.source.counter)) if self.source.counter else 0

    def _run(self) -> None:
        self.phase = self.phase.to(RUNNING)


class _Pass(Proxy):
    """One pass over a feed, in the place of the loader's own iterator."""

    def __init__(self, feed: Feed, inner: Iterator[Any]) -> None:
        self._feed, self.inner = feed, inner

    def __iter__(self) -> _Pass:
        return self

    @hook_time.counted
    def __next__(self) -> Any:
        feed = self._feed
        current = feed.phase in OPEN and feed._pass is not None and feed._pass() is self
        if current:
            feed.asked_at = next(clock)
            if (listener := feed._listener()) is not None:
                listener.asked(feed)
            feed._resumed = None
            if feed.phase is BEGUN:
                feed._run()
        try:
            batch = hook_time.outside(next, self.inner)
        except StopIteration:
            if current:
                feed._close(ENDED)
            raise
        except Exception as err:
            if current and (listener := feed._listener()) is not None:
                listener.failed(feed, err)
            raise
        if current:
            feed.delivered += 1
            feed._recorded += 1
            if feed.lead.ahead is None:
                feed.lead.given(batch)
            if (listener := feed._listener()) is not None:
                listener.given(feed, batch)
            if feed.source.share == 0:
                feed.position.forget()  # a loaded position holds until a batch is fetched
        elif feed.phase in OPEN:
            feed.say(f"two passes over {feed.name!r} run at the same time: make a second DataLoader and track both")
        return batch


def obstacle_of(feed: Feed | None, *, accumulating: bool) -> str | None:
    """Why no snapshot is taken when `feed` is asked for a batch, or None where one may be.

    At the end of an epoch what the script does between epochs is still to come, and at the start of a pass none
    knows whether it will train: both wait for the next batch, unless epochs are too short for that.
    """
    if accumulating:
        return "accumulating"
    if feed is None:
        return None
    if feed.delivered == 0:
        return None if feed.starts_only else "start of an epoch"
    return "end of an epoch" if feed.at_end else None


def is_at_end(state: Mapping[str, Any]) -> bool:
    """Whether this state of a feed is after its last batch, although its length was not known."""
    return bool(state["delivered"]) and state["position"]["phase"] != "within"
