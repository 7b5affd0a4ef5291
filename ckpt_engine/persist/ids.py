"""The ids that the snapshots of one writer get, in the order in which they are asked for."""

from __future__ import annotations

import threading

from ckpt_engine.persist.intake import Order
from ckpt_engine.store import layout as names


class Ids:
    """Numbers orders. Thread safe.

    `begin` MUST come before the first id: until then further tiers may still say that they have higher numbers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seq = 0
        self._begun = threading.Event()

    def begin(self, seq: int) -> None:
        """Snapshots get `seq` and higher numbers."""
        with self._lock:
            self._seq = max(self._seq, seq)
        self._begun.set()

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._begun.is_set()

    def of(self, order: Order) -> str:
        """The id of `order`: the one it has, or a new one, higher than all before."""
        with self._lock:
            if order.snapshot is None:
                parent = names.parse_id(order.job.parent) if order.job.parent is not None else None
                if parent is not None:
                    # It may come from a tier that did not answer at the start.
                    self._seq = max(self._seq, parent.seq + 1)
                order.snapshot = names.snapshot_id(self._seq, order.job.step)
                self._seq += 1
            return order.snapshot

    def renew(self, order: Order) -> str:
        """A new id for an order that failed: something may be left of the attempt, or even still be at work."""
        with self._lock:
            order.snapshot = None
        return self.of(order)
