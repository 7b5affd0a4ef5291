"""The clock that everything that measures time is given, so that tests can own time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: one for durations, one for people. Both in seconds."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never goes back; the only source of durations."""

    def wall(self) -> float:
        """Seconds since the epoch; for display and ordering by people only: it may jump."""


class SystemClock:
    """The machine's clocks. `monotonic` is comparable between processes of one boot."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
