"""The requests of a loop for the batches of one loader."""

from __future__ import annotations

import itertools
import time
from threading import get_ident

from ckpt_engine.loop.shape import Ask, At, Home, is_here, way_here

clock = itertools.count(1)


class LoaderRequests:
    """The requests for the batches of one loader: the last one, and its passes as far as their order matters.

    Attributes:
        place: functions and instructions that have asked for the last batch, innermost first.
        thread: that has.
        asked_at, begun_at, left_at: when a batch was last asked for, the last pass began, and the one before it was
            over; in order.
        has_overlap: a pass began while the one before could still be asked.
    """

    def __init__(self) -> None:
        self.place: At = ()
        self._way: At = ()
        """The same with our own functions."""
        self.thread = 0
        self.asked_at = self.begun_at = self.left_at = 0
        self._first_seconds = 0.0
        self.has_overlap = False

    def note(self, home: Home, *, begins: bool) -> Ask | None:
        """A batch is asked for; from where, if that begins a pass.

        Args:
            home: of the loop.
        """
        self.thread = get_ident()
        if begins or not is_here(self._way):
            self._way, ask = way_here(home), Ask(home)
            self.place = ask.at
            if begins:
                self._first_seconds = time.monotonic()
                return ask
        return None

    def pass_seconds(self) -> float | None:
        """How long ago the first batch of the last pass was asked for; None: none was."""
        return time.monotonic() - self._first_seconds if self.asked_at > self.begun_at else None

    def came_before(self, other: LoaderRequests) -> bool:
        """Whether the last one came after a pass over the other loader was left, and before its next one began."""
        return other.left_at < self.asked_at < other.begun_at
