"""The clock that everything that measures time is given, so that tests can own time."""

from __future__ import annotations

import os
import time
from pathlib import Path
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


def started_ticks(pid: int | str) -> int:
    """When a process began, in clock ticks since boot. Raises `OSError`."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def age_of_process() -> float:
    """Seconds since this process began; not by wall-clock time, which may be set meanwhile. Raises `OSError`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks("self") / os.sysconf("SC_CLK_TCK")
