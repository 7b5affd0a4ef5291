"""A boundary of a tracked loop: what `TrainingRun` asks there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt_engine.loop.feed import Feed, is_at_end
from ckpt_engine.preempt.stop_requests import Stop
from ckpt_engine.snapshot.save_request import SaveHandle

if TYPE_CHECKING:
    from ckpt_engine.loop.tracker import Tracker


class LoopBoundary:
    """A boundary of a tracked loop: what `TrainingRun` asks there.

    Args:
        feed: the loader that is asked for the next batch; None: the loop announces the boundary itself.
        obstacle: why no snapshot can be taken, as far as that is known already.

    Attributes:
        states: where each loader is, once `obstacle` was asked.
    """

    def __init__(self, tracker: Tracker, feed: Feed | None, obstacle: str | None) -> None:
        self._tracker, self._feed, self._obstacle = tracker, feed, obstacle
        self.states: Mapping[str, Any] = {}

    def end(self, stop: Stop) -> BaseException | None:
        if self.obstacle() is not None:
            return None
        return self._tracker._end(stop, lambda reason: self.take(reason, durable=True))

    def decided(self, *, due: bool) -> None:
        tracker = self._tracker
        if due or tracker._run.capture.audit.early_looks:
            tracker._run.capture.audit.boundary(tracker._counters(self._feed), taking=due)
        if not (due or tracker._run.engine.slots.snapshot_bytes):
            # The optimizers have their state now: the arena is made ready in the background.
            tracker._run.prepare(tracker._instant(self._feed, tracker._positions()).state())

    def obstacle(self) -> str | None:
        if self._obstacle is None:
            self.states = self._tracker._positions()
            if self._feed is not None and is_at_end(self.states[self._feed.name]):
                self._obstacle = "end of an epoch"
        return self._obstacle

    def take(self, reason: str, *, durable: bool) -> SaveHandle | None:
        return self._tracker._run.take(self._tracker._instant(self._feed, self.states), reason, durable=durable)
