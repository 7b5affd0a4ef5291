"""The passes of a script over its loaders: how they lie within each other, and whether a resumed one repeats them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from ckpt_engine.loop.feed import Feed
from ckpt_engine.loop.loader_requests import clock
from ckpt_engine.loop.loop_start import LoopStart
from ckpt_engine.loop.phases import BEGUN, ENDED, OPEN
from ckpt_engine.loop.shape import (
    Around,
    Ask,
    Count,
    code_now,
    differences,
    is_before,
    is_in_body,
    is_same,
    later,
    place_of,
)
from ckpt_engine.loop.untracked import UntrackedOptimizers

_OR_CARRY = ", or keep it in track(…, carry=Carry(…))"
_NO_EPOCHS = "run.epoch counts passes over tracked loaders"
_MOST_LOOKS = 64
_MANY_STEPS = 50


_OTHER_THREAD = (
    "no snapshot is taken: another thread than the one that trains asks for the batches of %r, and weights change "
    "meanwhile; DataLoader(num_workers=…, prefetch_factor=…) reads ahead exactly"
)


class Loops:
    """Watches how the loaders of one tracker are asked. Training thread only.

    Args:
        feeds: the loaders, all of them.
        log: of the adapter.
        optimizers: those that are tracked.

    Attributes:
        untracked: other optimizers that make steps.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        log: logging.Logger,
        optimizers: Collection[torch.optim.Optimizer],
        objects: Iterable[Any] = (),
    ) -> None:
        self._feeds = feeds
        self.untracked = UntrackedOptimizers(optimizers, objects)
        self._log = log
        self._home = code_now()
        self.start = LoopStart(self._home)
        self._saved: Mapping[str, Any] = {}
        self._stepped_at = 0
        self.resumed: Feed | None = None
        """Whose pass the snapshot was taken in, until a step was made."""
        self._done: tuple[int, ...] = (0,)
        """Batches of the epoch, and steps, that the saved run had trained."""
        self._around: dict[str, tuple[Sequence[Count], int, bool]] = {}
        self._logged: set[str] = set()
        self.counted: Mapping[str, int] = {}
        """What a resumed loop that announces its steps had counted."""
        self._begun_on = self._stepped_on = get_ident()

    # ---- while the loop runs

    def asked(self, feed: Feed) -> list[str]:
        """A batch is asked for; why the iterators around this loader do not go on where they were."""
        ask = feed.requests.note(self._home, begins=feed.phase is BEGUN)
        if feed.lead.ahead is None and feed.delivered < _MOST_LOOKS:
            feed.lead.asked(feed.requests.place)
            if ask is not None:
                feed.lead.starts(ask)
        if ask is None or not ask.of_user:
            return []
        saved = self._saved.get("around", {}).get(feed.name) if feed.resumed is not None and feed.delivered else None
        first = feed.name not in self._around and ask.is_in_generator()
        around = Around(feed.running, ask, everywhere=first or saved is not None)
        if around.keeps:
            feed.say(
                f"itertools.{around.keeps} around {feed.name!r} ({ask.line()}) keeps batches, or that the loader has "
                "ended: call iter() and next() instead, and iter() again at StopIteration"
            )
        if saved is not None:
            around.advance(saved)
        counts: Sequence[Count] = around.counts()
        if not counts and saved is None and not first and ask.is_in_generator():
            counts = self._around[feed.name][0]  # those around it go on, and are young no more
        self._around[feed.name] = (counts, feed.delivered, ask.keeps(feed.running))
        return [] if saved is None else differences(feed.name, saved, counts, feed.delivered, ask)

    def stepped(self) -> None:
        """An optimizer has made a step."""
        if not self.start.over:
            self.start.over = True
            self._look_for_older_iterators()
        self.resumed, self._stepped_on, self._stepped_at = None, get_ident(), next(clock)

    def over(self, feed: Feed) -> None:
        """A pass has ended, or was left."""
        counts, given, kept = self._around.get(feed.name, ([], 0, False))
        self._around[feed.name] = (later(counts, feed.delivered - given), 0, kept)
        others = [one for one in self._feeds if one is not feed and one.progress.trained]
        shared = feed.phase is ENDED and any(
            one.phase in OPEN and one.requests.place == feed.requests.place for one in others
        )
        left = not any(one.phase in OPEN or one.requests.begun_at > feed.requests.begun_at for one in others)
        feed.history = replace(feed.history, alone=feed.progress.trained and (left or shared))
        if not self._saved:
            feed.leave()  # the loop trains again: a `zip` ended by another loader, for one

    def boundary(self, feed: Feed | None, due: Collection[Feed]) -> tuple[Feed | None, str | None]:
        """A step is complete: the loader whose loop this one is in the body of, and why no snapshot may be taken."""
        if self.untracked.stepped:
            self.untracked.look(self._home, self._log)
        for one in due:
            if one.lead.ahead is None and one.phase in OPEN:
                one.look_ahead(Ask(self._home))
        if feed is None:
            return None, None
        if feed.requests.thread not in (self._begun_on, self._stepped_on):
            if feed.name not in self._logged:
                self._logged.add(feed.name)
                self._log.warning(_OTHER_THREAD, feed.name)
            return None, "batches are asked for on another thread than the one that trains"
        if len(self._feeds) > 1 and (outer := self._outer(feed)) is not None:
            return outer, f"in the body of the loop over {outer.name!r}"
        for one in self._feeds:
            if one.lead.ahead == 0 or one.phase not in OPEN:
                continue
            if not one.lead.is_recorded or (one.lead.ahead is None and one in due):
                return None, "how far the loop reads ahead is not recorded yet"
        for one in self._feeds:
            if one is not feed and one.phase in OPEN and one.requests.asked_at > self._stepped_at:
                before, inside = is_before(one.requests.place, feed.requests.place)
                if before and not inside:
                    return None, f"{one.name!r} was asked first"
        return None, None

    def _look_for_older_iterators(self) -> None:
        for feed in self._feeds:
            if feed.has_older_iterator:
                feed.say(
                    f"an iterator of {feed.name!r} was made before track(), and no snapshot has its position: "
                    f"make it after track(), as in batches = iter({feed.name})"
                )

    def _outer(self, feed: Feed) -> Feed | None:
        found = [
            one
            for one in self._feeds
            if one is not feed and one.phase in OPEN and is_in_body(one.requests.place, feed.requests.place)
        ]
        return min(found, key=lambda one: one.requests.asked_at, default=None)

    # ---- for a snapshot

    def positions(self) -> dict[str, Any]:
        """Where each loader is. A pass that nothing can ask any more is over."""
        ask = Ask(self._home)
        return {
            one.name: one.next_pass_state() if one.phase in OPEN and self._is_left(one, ask) else one.state()
            for one in self._feeds
        }

    def _is_left(self, feed: Feed, ask: Ask) -> bool:
        newest = max(self._feeds, key=lambda one: one.requests.asked_at)
        return feed is not newest and (
            feed.requests.has_overlap or any(one is feed.running for one in ask.local_values()[1])
        )

    def state(self, feed: Feed | None) -> dict[str, Any]:
        """What a resumed process compares itself with."""
        ask = Ask(self._home)
        return {
            "place": [] if feed is None else place_of(feed.requests.place),
            "numbers": ask.numbers(),
            "made": ask.made_before(),
            "start": self.start.seen,
            "around": {one.name: self._counts(one, ask) for one in self._feeds if one.phase in OPEN},
            "says": [
                *(problem for one in self._feeds for problem in (*one.says, *self._again(one, feed))),
                *filter(None, self.untracked.problems.values()),
            ],
        }

    def _counts(self, feed: Feed, ask: Ask) -> list[list[Any]]:
        """Of the iterators around a loader. Of one that the loop keeps they come and go: only young ones are known."""
        counts, given, kept = self._around.get(feed.name, ([], 0, False))
        if not kept:
            return list(map(list, later(counts, feed.trained_on - given)))
        now = Around(feed.running, ask, everywhere=False).counts() if ask.may_wrap() else []
        return list(map(list, now)) or [[kind, None, sign] for kind, _, sign in counts]

    def _again(self, one: Feed, feed: Feed | None) -> list[str]:
        """A batch that a loop has asked for before it began the loop over `feed`; its pass may have been left since."""
        if feed is None or one is feed or not one.requests.came_before(feed.requests):
            return []
        if one.phase not in OPEN and (one.phase is ENDED or isinstance(one.position.loader.sampler, SequentialSampler)):
            return []
        if not all(is_before(one.requests.place, feed.requests.place)):
            return []
        return [
            f"the batch of {one.name!r} that is asked for before the loop over {feed.name!r} is another one: keep it "
            "in track(…, carry=Carry(batch=None))"
        ]

    # ---- after a resume

    def expect(self, own: Mapping[str, Any], training: Feed) -> None:
        """The loop goes on from this snapshot. Passes that were complete in its epoch are not repeated."""
        self._saved, self._done = own.get("loop", {}), (own["batch"], own["step"])
        if not self._saved:
            return
        for one in self._feeds:
            saved = own["feeds"].get(one.name, {})
            if one is not training and saved.get("alone") and not saved.get("open"):
                one.skips = max(one.history.epochs - training.history.epochs, 0)

    def counts_again(self) -> str | None:
        """What a loop that announces its steps counts from its beginning again, at the first step after a resume."""
        saved, self.counted = self.counted, {}
        now = (ask := Ask(self._home)).numbers() if saved else {}
        if any(saved.get(name, value) < value for name, value in now.items()):
            return None  # an inner loop may have begun again
        less = (_was(name, saved[name], value, ask) for name, value in now.items() if value < saved.get(name, value))
        return next((f"{one} run.global_step ({_NO_EPOCHS}){_OR_CARRY}" for one in less), None)

    def skips_again(self, *, ended: bool = False) -> str | None:
        """What is wrong where a loop leaves out batches after the resume, as one had to do before; once. Cheap.

        A loop that accumulates gradients, or leaves out some batches for what they are, has taken as many before a
        step in the saved run: more are left out by a count. After few steps one may still be the first of its kind, and
        only two, or as many as were trained on before, show it.

        Args:
            ended: the resumed pass is over without a step; else the first one begins.
        """
        feed = self.resumed
        if feed is None or (longest := feed.history.longest) is None or (taken := feed.without_step) <= longest:
            return None
        least, most = (taken, None) if ended else (taken - longest, taken - 1)
        as_before = any(least <= one <= (most or one) for one in self._done)
        if not as_before and taken < longest + 2 and max(self._done) < _MANY_STEPS:
            return None
        self.resumed = None
        return (
            f"it takes {taken} batches of {feed.name!r} before its first step after the resume, and never took more "
            f"than {longest} before: the loader continues where it was, so leave out what skips batches, "
            "as `if step < resume_step: continue` does"
        )

    def problems_at(self, feed: Feed) -> list[str] | None:
        """What differs from the saved loop, once this loader is asked from where it was when the snapshot was taken.

        Args:
            feed: that is asked.

        Returns:
            None: it is asked from another place, or what differs was reported.
        """
        if not self._saved or not is_same(self._saved["place"], place_of(feed.requests.place)):
            return None
        for one in self._feeds:
            one.skips = 0
        self.resumed = feed
        saved, self._saved = self._saved, {}
        ask, found = Ask(self._home), list(saved["says"])
        for name, now in ask.numbers().items():
            before = saved["numbers"].get(name, now)
            if before != now:
                starts = "run.epoch, run.global_step or run.resumed_batches"
                found.append(f"{_was(name, before, now, ask)} {starts}{_OR_CARRY}")
        saved_as = saved.get("made", {})
        for name, made in ask.made_before().items():
            if saved_as.get(name, made) != made:
                function, _, variable = name.rpartition(".")
                found.append(
                    f"{variable} is another one in {function} ({ask.line()}) than in the saved run: the loop makes it "
                    "before it asks for the batch, and again after a resume: make it when the batch is there"
                )
        return found


def _was(name: str, before: int, now: int, ask: Ask) -> str:
    function, _, variable = name.rpartition(".")
    return f"{variable} was {before} in {function} ({ask.line()}) and is {now}: start it from"
