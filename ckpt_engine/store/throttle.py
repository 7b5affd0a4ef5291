"""A bandwidth limit: a token bucket that is asked before bytes are sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_SECONDS = 0.25
SLICE_BYTES = 4 << 20
"""What is sent at once, so that a limit below the rate of a disk is kept evenly."""


class Throttle:
    """A token bucket (GCRA, ITU-T I.371): in any `t` seconds at most `rate * (t + 0.25 s)` bytes start, and one slice.

    A slice of any size starts when the ones before it are paid, and is paid by those after it. Thread safe; whoever
    asks first starts first.

    Args:
        bytes_per_second: the limit.
        clock: monotonic seconds.
    """

    def __init__(self, bytes_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"a rate must be above 0, not {bytes_per_second}")
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> float:
        """Seconds to wait before `nbytes` bytes may be sent; they count as sent from then on."""
        with self._lock:
            now = self._clock()
            starts = max(self._free_at, now - BURST_SECONDS)
            self._free_at = starts + nbytes / self._rate
        return max(0.0, starts - now)
