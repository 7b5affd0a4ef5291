"""A cadence to try out."""

from __future__ import annotations

from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.frequency.failures import certain
from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.frequency.simulate import Recorder, VirtualClock


class Rig:
    """A cadence, its clock and its events, with steps of one second."""

    def __init__(self, start: int | None = 0, **settings: object) -> None:
        self.clock, self.sink = VirtualClock(), Recorder()
        self.cadence = Cadence(FrequencySettings(**settings), self.clock, self.sink)  # type: ignore[arg-type]
        self.step = 0
        if isinstance(stated := settings.get("mtbf_seconds"), float):
            self.cadence.assume(certain(stated))
        if start is not None:
            self.step = start
            self.cadence.start(start)

    def go(self, steps: int = 1, seconds: float = 1.0) -> str | None:
        """Trains until the first due snapshot, at most `steps` steps."""
        for _ in range(steps):
            self.step += 1
            self.clock.now += seconds
            if (reason := self.cadence.boundary(self.step)) is not None:
                return reason
        return None

    def take(self, stall: float = 0.0, latency: float | None = None) -> None:
        """Takes a snapshot now; with a latency it is durable at once (it is learned from at the next boundary)."""
        self.clock.now += stall
        self.cadence.taken(self.step, stall)
        if latency is not None:
            self.cadence.committed(self.step, latency, 10**9)
