"""Counts the steps of a tracked loop turn by turn, from one boundary to the next."""

from __future__ import annotations

from ckpt_engine.loop.feed import Feed
from ckpt_engine.loop.shape import At


class Turns:
    """Counts the steps of a loop, in which several optimizers may step in one turn.

    Args:
        step: at which training begins.

    Attributes:
        step: optimizer steps so far.
        asked_feeds: the loaders that were asked for a batch since the last boundary.
        due_feeds: those of them after whose batches weights have changed.
        is_announced: the loop has said itself that a step is complete.
    """

    def __init__(self, step: int) -> None:
        self.step = self._reached = step
        self.asked_feeds: set[Feed] = set()
        self.due_feeds: set[Feed] = set()
        self.is_announced = False
        self._counted = False
        """The step of this turn is part of `step`."""
        self._first: At = ()
        """Where the loop asked for the first batch of its turn."""

    @property
    def has_stepped(self) -> bool:
        """Whether there was a step since the last boundary."""
        return self.step != self._reached

    def note_request(self, feed: Feed, training: Feed | None) -> None:
        """A batch is asked for: where the loop did so first, another turn begins."""
        self._first = self._first or feed.requests.place
        self._counted = self._counted and feed is not training and feed.requests.place != self._first

    def count_step(self) -> None:
        """An optimizer has made a step."""
        self.step += not self._counted
        self._counted = True
        for feed in self.asked_feeds:
            feed.stepped()
        self.due_feeds |= self.asked_feeds

    def end_boundary(self, feed: Feed | None, around: Feed | None) -> None:
        """The boundary is over, where `feed` is asked for a batch.

        Args:
            around: the loop over this loader continues with what was asked for before it.
        """
        self._counted = False
        self._first = () if feed is None else feed.requests.place
        self._reached = self.step
        self.asked_feeds = set() if around is None else {around}
        self.due_feeds = set(self.asked_feeds)
