"""One loader that is followed: when its consumer asks for a batch, how many it has had, and where a snapshot may be
taken.

A loader may be a torch `DataLoader`, or a wrapper around one (Accelerate, Lightning Fabric). The consumer iterates the
wrapper; the position is that of the `DataLoader` inside. `obstacle_of` names the boundaries that a resumed script does
not come back to.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ckpt_engine.data import position, private_names
from ckpt_engine.data.exactness import Level, OnChange, Restoration
from ckpt_engine.data.position import LoaderPosition, attach
from ckpt_engine.data.sampling import deref
from ckpt_engine.data.streams import Proxy
from ckpt_engine.loop.followed_loader import FollowedLoader
from ckpt_engine.loop.loader_requests import LoaderRequests, clock
from ckpt_engine.loop.loader_source import LoaderSource
from ckpt_engine.loop.pass_history import PassHistory
from ckpt_engine.loop.pass_progress import PassProgress
from ckpt_engine.loop.phases import BEGUN, ENDED, LEFT, OPEN, RUNNING, UNBEGUN, PassPhase
from ckpt_engine.loop.shape import Ask, Lead
from ckpt_engine.observe.run_times import hook_time
from ckpt_engine.snapshot.ownership import leavers

if TYPE_CHECKING:
    from ckpt_engine.loop.tracker import Tracker

State = dict[str, Any]


class Feed:
    """Follows one loader until `release`.

    Args:
        name: for reports.
        source: the loader.
        listener: hears of passes.
    """

    def __init__(self, name: str, source: LoaderSource, listener: Tracker) -> None:
        self.name = name
        self.delivered = 0
        """Batches of the current or last pass that the consumer was given, those before a resume included."""
        self.phase = UNBEGUN
        """Of the current or last pass."""
        self.progress = PassProgress()
        self.history = PassHistory()
        self.skips = 0
        """Passes from now on that were complete before the snapshot: they have no batches."""
        self.says: list[str] = []
        """Why passes over this loader cannot be repeated."""
        self.requests = LoaderRequests()
        self.lead = Lead()
        self.loader = FollowedLoader(source)
        self.resumed: State | None = None
        """A loaded state, which waits for the consumer's first batch."""
        self._before = (0, self.history, UNBEGUN, 0)
        self._pass: weakref.ref[_Pass] | None = None
        self._listener: Callable[[], Tracker | None] = weakref.ref(listener)
        leavers.add(self)
        self.position: LoaderPosition = attach(source.base, lookahead=source.lookahead)
        if source.outer is source.base:
            self.position.aside = lambda _: self._before_pass()
            self.position.wrap = lambda iterator: self._begin(self.loader.begin(iterator))
        else:
            self.position.wrap = self.loader.begin
            position.swap_in(source.outer, self)

    @property
    def at_end(self) -> bool:
        """Every batch of the pass was given, as far as that is known."""
        dealt = self.position.dealt
        exhausted = (
            self.position.exhausted
            if self.loader.source.share
            else bool(getattr(deref(self.loader.outer), self.loader.source.ended))
        )
        return self.delivered > 0 and (
            exhausted or self.delivered == (self.loader.length if dealt is None else dealt[1])
        )

    @property
    def running(self) -> Any:
        """The pass that the consumer is in; None if there is none."""
        return self._pass() if self.phase in OPEN and self._pass is not None else None

    @property
    def restoration(self) -> Restoration | None:
        """How exactly the position was put back."""
        found = self.position.restoration
        if found is None or not self.loader.source.inexact or found.phase != "within":
            return found
        return replace(found, exactness=found.exactness.lowered(Level.ORDER_ONLY, self.loader.source.inexact))

    @property
    def trained_on(self) -> int:
        """Batches of the current pass that the consumer does not have to ask for again."""
        return max(self.delivered - (self.lead.ahead or 0), 0)

    @property
    def without_step(self) -> int:
        """Batches of the pass that the consumer was given since the last step, or since it resumed."""
        return self.delivered - self.progress.stepped_at

    @property
    def has_older_iterator(self) -> bool:
        """Whether an iterator lives that was made before the loader was followed: no position counts its batches."""
        if self.requests.begun_at or self.loader.outer() is None:
            return False
        loader = self.position.loader
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        iterators = (one for one in gc.get_objects() if issubclass(type(one), _BaseDataLoaderIter))
        return any(private_names.takes_indices_from(one, sampler) for one in iterators)

    def stepped(self) -> None:
        """Weights have changed."""
        taken = self.progress.step(self.delivered)
        if self.history.longest is None or taken > self.history.longest:
            self.history = replace(self.history, longest=taken)

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
        if ahead and self.loader.source.share != 1:
            self.lead.ahead, self.lead.unclear = 0, ahead
        elif ahead:
            self.position.lookahead, self.lead.recorded = self.loader.source.lookahead + ahead, 0
        if self.lead.unclear:
            self.say(
                f"the first step of a pass over {self.name!r} takes {self.lead.unclear} batches more than the next: "
                "a loop that skips or keeps batches does so again after a resume: skip by the count from "
                "run.resumed_batches on"
            )

    def state(self) -> State:
        """Where the consumer is, at a fetch boundary of any feed."""
        if self.resumed is None and self.phase in OPEN and (self.delivered > 0 or self.loader.has_begun):
            state = self._assemble(self._position(), self.trained_on, self.progress.count)
            known = None if self.lead.unclear else self.lead.ahead  # else a resumed run finds out, and says so
            return state | {"open": True, "trained": self.progress.trained, "ahead": known}
        return self.next_pass_state()

    def next_pass_state(self) -> State:
        """Where the consumer will be when it starts its next pass."""
        if self.resumed is not None:
            return self.resumed
        return self._assemble(self.position.next_epoch_state(), 0, self.loader.passes)

    def load(self, state: State, streams: Mapping[str, Any] | None, on_change: OnChange = OnChange.REFUSE) -> None:
        """The next pass continues at `state`; `streams` are installed before the first batch that was not fetched yet.

        Args:
            on_change: what becomes of a pass that is resumed in its middle with a changed loader.

        Raises:
            MismatchError: the loader is not the one that was saved.
        """
        self._before = (self.delivered, self.history, self.phase, self.loader.passes)
        # The position installs them at the first fetch of a batch.
        late = self.loader.source.share == 0 and state["position"]["phase"] == "within"
        self.loader.streams = streams if late else None
        if self.loader.source.dispatched and on_change is OnChange.CONTINUE:
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
        self.resumed = state
        self.delivered, self.phase = int(state["delivered"]), self.phase.to(UNBEGUN)
        self.history = replace(
            self.history,
            epochs=int(state["epochs"]),
            starts_only=bool(state["starts_only"]),
            longest=state.get("longest"),
        )
        if (ahead := state.get("ahead")) is not None:
            self.lead.ahead = self.lead.recorded = ahead
            self.position.lookahead = self.loader.source.lookahead + ahead
        self.loader.passes = state["counter"]

    def begin_after(self, epochs: int, batches: int) -> None:
        """The next pass comes after so many others, and starts after so many of its batches.

        For a run whose position is not recorded. The loader must know its epoch before.
        """
        if batches:
            position = self.position.state_after(batches * self.loader.source.share)
            state = {"position": position, "counter": self.loader.passes, "delivered": batches}
            self.load({**state, "epochs": epochs, "starts_only": False}, None)
        self.history = replace(self.history, epochs=epochs)

    def forget(self) -> None:
        """The next pass starts by itself: what was loaded, and not begun yet, does not count any more."""
        if self.resumed is None:
            return
        self.resumed = self.loader.streams = None
        self.delivered, self.history, phase, self.loader.passes = self._before
        if self.phase is UNBEGUN:
            self.phase = self.phase.to(phase)
        self.position.forget()

    def leave(self) -> None:
        """The loop went on without asking for a batch of the resumed pass, and left it, as the saved one did."""
        if self.resumed is not None and (self.delivered or self.resumed.get("over")):
            self.resumed = None
            self.position.leave()

    def release(self) -> None:
        """Give the loader back as it was."""
        outer = self.loader.outer()
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
        self.loader.has_begun = False
        over = self.resumed is not None and self.resumed.get("over")
        return self._begin(iter(()) if over else make())

    def _before_pass(self) -> Iterator[Any] | None:
        """What a pass that would begin now is instead."""
        if self.running is not None:
            self.requests.has_overlap = True
        self._close()
        if not self.skips:
            return None
        self.skips -= 1
        return iter(())

    def _begin(self, iterator: Iterator[Any]) -> Iterator[Any]:
        resumed = self.resumed
        if resumed is None:
            self.delivered = 0
        within = self.delivered > 0
        self.progress = PassProgress(
            self.loader.passes,
            self.delivered,
            trained=resumed is not None and bool(resumed.get("trained", within)),
            interior=within,  # what resumes within a pass had a boundary there
        )
        self.requests.begun_at = next(clock)
        unknown = self.lead.ahead is None
        self.lead.begin()
        if unknown and self.lead.ahead is not None:
            self.lead_known()
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
        self.phase, self.requests.left_at = self.phase.to(phase), next(clock)
        if self.progress.trained:
            self.history = replace(self.history, epochs=self.history.epochs + 1, starts_only=not self.progress.interior)
        if (listener := self._listener()) is not None:
            listener.over(self)

    def leave_fork(self) -> None:
        """See `Leaver`: a fork may read the data, and trains nothing."""
        self._listener = lambda: None

    def _position(self) -> State:
        """Of the torch loader, after what was given of it."""
        taken = self.trained_on * self.loader.source.share
        if self.loader.source.share > 1 and self.position.exhausted:
            taken = min(taken, self.position.fetched)  # the last batch may be made of fewer
        return self.position.state(taken)

    def _assemble(self, position: State, delivered: int, counter: int) -> State:
        return {
            "position": position,
            "delivered": delivered,
            "counter": counter,
            **asdict(self.history),
            # A pass that is left and not closed yet counts for the next one.
            "epochs": self.history.epochs + (self.phase in OPEN and self.progress.trained and not delivered),
        }

    def _run(self) -> None:
        self.phase = self.phase.to(RUNNING)


class _Pass(Proxy, Iterator[Any]):
    """One pass over a feed, in the place of the loader's own iterator."""

    def __init__(self, feed: Feed, inner: Iterator[Any]) -> None:
        self._feed, self.inner = feed, inner

    @hook_time.counted
    def __next__(self) -> Any:
        feed = self._feed
        current = feed.phase in OPEN and feed._pass is not None and feed._pass() is self
        if current:
            feed.requests.asked_at = next(clock)
            if (listener := feed._listener()) is not None:
                listener.asked(feed)
            feed.resumed = None
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
            feed.lead.recorded += 1
            if feed.lead.ahead is None:
                feed.lead.given(batch)
            if (listener := feed._listener()) is not None:
                listener.given(feed, batch)
            if feed.loader.source.share == 0:
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
        return None if feed.history.starts_only else "start of an epoch"
    return "end of an epoch" if feed.at_end else None


def is_at_end(state: Mapping[str, Any]) -> bool:
    """Whether this state of a feed is after its last batch, although its length was not known."""
    return bool(state["delivered"]) and state["position"]["phase"] != "within"
