"""Keeps the snapshots that are not learned from yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_IN_FLIGHT = 64


@dataclass(slots=True, eq=False)
class TakenSnapshot:
    """A snapshot that is not learned from yet; the last three fields are known when it is over."""

    step: int
    instant: float
    stall_seconds: float
    latency_seconds: float | None = None
    """None: it is on its way, or has failed."""
    busy_seconds: float = 0.0
    written_bytes: float = 0.0


class SnapshotsUnderWay:
    """What became of the snapshots since training started.

    Args:
        step, now: where and when it started, all work until then being safe.

    Attributes:
        in_flight: oldest first; also those that are over, until they are learned from.
        settled: those of them that are over.
        durable_instant: of the newest durable one.
        failures: so many in a row have failed, the newest ones.
        taken_time: when the newest one was taken.
        taken_trained: seconds of training until then.
    """

    def __init__(self, step: int, now: float) -> None:
        self.in_flight: deque[TakenSnapshot] = deque(maxlen=_MOST_IN_FLIGHT)
        self.settled: list[TakenSnapshot] = []
        self.failures = 0
        self.taken_time, self.taken_trained, self.durable_instant = now, 0.0, now
        self._durable_step = self._quiet_step = step

    @property
    def safe_step(self) -> int:
        """That of the newest snapshot that is durable or on its way."""
        return max((one.step for one in self.in_flight), default=self._durable_step)

    @property
    def safe_time(self) -> float:
        """The instant of the newest snapshot that is durable or on its way."""
        return max([self.durable_instant, *(one.instant for one in self.in_flight)])

    def quiet_steps(self, step: int) -> int:
        """Clean steps until `step` since the last snapshot was learned from; 0 while one is in flight."""
        return 0 if self.in_flight else step - self._quiet_step

    def take(self, step: int, now: float, stall_seconds: float, trained_seconds: float) -> None:
        """One was taken at `step`."""
        self.in_flight.append(TakenSnapshot(step, now - stall_seconds, stall_seconds))
        self.taken_time, self.taken_trained = now, trained_seconds

    def commit(self, step: int, now: float, latency_seconds: float, busy_seconds: float, written_bytes: float) -> None:
        """The one of `step` is durable; taken before training started, its instant follows from the latency."""
        snapshot = self._settle(step, latency_seconds, busy_seconds, written_bytes)
        self.failures = 0
        self._durable_step = max(self._durable_step, step)
        self.durable_instant = max(self.durable_instant, snapshot.instant if snapshot else now - latency_seconds)

    def fail(self, step: int) -> None:
        """The one of `step` will not become durable."""
        self.failures += 1
        self._settle(step, None, 0.0, 0.0)

    def learn(self, step: int) -> Iterator[TakenSnapshot]:
        """Those that are over, each once; where none is left in flight, clean steps begin after `step`."""
        for settled in self.settled:
            self.in_flight.remove(settled)
            yield settled
        self.settled.clear()
        if not self.in_flight:
            self._quiet_step = step

    def _settle(self, step: int, latency: float | None, busy: float, written: float) -> TakenSnapshot | None:
        """Notes the end of a snapshot; it is learned from at the next boundary, when that step is measured too."""
        snapshot = next((one for one in self.in_flight if one.step == step), None)
        if snapshot is not None and all(one is not snapshot for one in self.settled):
            snapshot.latency_seconds, snapshot.busy_seconds, snapshot.written_bytes = latency, busy, written
            self.settled.append(snapshot)
        return snapshot
