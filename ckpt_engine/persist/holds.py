"""Which arena slots are still read by calls that nobody waits for: the trainer gets those back later."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable


class Holds:
    """Counts the readers of each slot. Any thread.

    Args:
        freed: told a slot whose last reader has ended after its job was settled as held.
    """

    def __init__(self, freed: Callable[[int], object]) -> None:
        self._freed = freed
        self._lock = threading.Lock()
        self._readers: Counter[int] = Counter()
        self._promised: set[int] = set()

    def take(self, slot: int) -> Callable[[], None]:
        """Note a reader; the result, to be called once, notes its end."""
        with self._lock:
            self._readers[slot] += 1
        return lambda: self._end(slot)

    def settle(self, slot: int, tell: Callable[[bool], object]) -> None:
        """Call `tell` with whether the slot is still read; `freed` for it comes later than that."""
        with self._lock:
            held = self._readers[slot] > 0
            if held:
                self._promised.add(slot)
            tell(held)

    def _end(self, slot: int) -> None:
        with self._lock:
            self._readers[slot] -= 1
            if self._readers[slot] == 0:
                del self._readers[slot]
                if slot in self._promised:
                    self._promised.discard(slot)
                    self._freed(slot)
