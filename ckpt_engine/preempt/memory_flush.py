"""A request to the writer to make durable what it has only in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_engine.observe.durability import Ledger, PendingCommit
from ckpt_engine.observe.events import Event, MemoryFlushed, SnapshotFailed

_PAUSE_SECONDS = 0.05


@dataclass(eq=False)
class MemoryFlush:
    """Asks the writer to make durable what is only in memory, and knows whether it has.

    Args:
        ask: lets it; the step, None: there is none. Any thread.
        ledger: what is durable.
        now: the source of moments.
        spare_seconds: that it may take besides writing.

    Attributes:
        asked: the snapshot that it was asked for last; None: it has said that this one is over, or was not asked.
    """

    ask: Callable[[], int | None]
    ledger: Ledger
    now: Callable[[], float]
    spare_seconds: float
    asked: PendingCommit | None = field(default=None, init=False)

    def begin(self) -> int | None:
        """Let the writer make durable what is only in memory; the step of that, None: there is none.

        Any thread. Waits for an answer of the writer, some seconds at most, and not for its disk.
        """
        since, step = self.now(), self.ask()
        if step is not None:
            self.asked = PendingCommit(step, int(self.ledger.standing.state_bytes), since)
        return step

    @property
    def is_pending(self) -> bool:
        """Whether it was asked, and has not said yet what came of it."""
        asked, durable_step = self.asked, self.ledger.standing.safest.newest_step
        return asked is not None and (durable_step is None or durable_step < asked.step)

    def emit(self, event: Event) -> None:
        """Hears what came of it; an event sink."""
        asked = self.asked
        if asked is not None and (
            (isinstance(event, SnapshotFailed) and event.step == asked.step)
            # `ask` knows the lowest step of several writers; and an answer to an earlier one may come only now.
            or (
                isinstance(event, MemoryFlushed) and event.step >= asked.step and event.instant_monotonic >= asked.since
            )
        ):
            self.asked = None

    def wait(self, poll: Callable[[], None], left: Callable[[], float]) -> None:
        """The engine does not wait for what the writer had only in memory: wait for it.

        Args:
            poll: takes in what the writer says.
            left: seconds that there are.
        """
        while self.is_pending and (seconds := left()) > 0.0:
            threading.Event().wait(min(_PAUSE_SECONDS, seconds))
            poll()
