"""Knows which snapshot is due."""

from __future__ import annotations

import math

RETRY_SECONDS = 10.0


class DueSnapshot:
    """A snapshot stays due until one is taken; until one is due, the boundaries of many steps have nothing to decide.

    Attributes:
        reason: of the one that is due; None: none is.
        held_back: a snapshot was late for want of a slot, since the newest one was learned from.
        overtaken: so many were not taken, because the next one was due before a slot was free.
        look_step, look_time: a boundary before both has nothing to decide.
    """

    def __init__(self, overtaken: int = 0) -> None:
        self.reason: str | None = None
        self.held_back, self.overtaken = False, overtaken
        self._obstacle: str | None = None
        self._retry_time = -math.inf
        self.look_step: float = -1
        self.look_time = math.inf

    def look_now(self) -> None:
        """The next boundary has something to decide."""
        self.look_step = -1

    def look_by(self, step: float, time: float) -> None:
        """A boundary has something to decide at `step` or at `time`, if not earlier."""
        self.look_step, self.look_time = min(self.look_step, step), min(self.look_time, time)

    def fired(self, reason: str | None) -> None:
        """A fixed trigger has fired, for that reason; None: none has."""
        self.overtaken += bool(reason and self.reason and self._obstacle == "busy")
        self.reason = self.reason or reason

    def offer(self, now: float) -> str | None:
        """The reason of the one to take at this boundary: after an error it is not offered for a while."""
        if self.reason is not None and now < self._retry_time:
            self.look_by(math.inf, self._retry_time)
            return None
        if self.reason is not None:
            self.look_now()
        return self.reason

    def skipped(self, obstacle: str, now: float) -> bool:
        """It could not be taken for that reason; whether that is so for the first time."""
        if obstacle == "busy":
            self.held_back = True
        elif obstacle == "error":
            self._retry_time = now + RETRY_SECONDS
        earlier, self._obstacle = self._obstacle, obstacle
        return earlier is None

    def taken(self, *, waited: bool) -> None:
        """One was taken, after a wait for a free slot or not."""
        self.held_back |= waited
        self.reason, self._obstacle, self._retry_time = None, None, -math.inf
        self.look_now()
