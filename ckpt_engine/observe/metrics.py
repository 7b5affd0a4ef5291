"""The numbers adapters log: what snapshots cost this run and how much work is at risk."""

from __future__ import annotations

from typing import Protocol

from ckpt_engine.observe.events import (
    Event,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotReplicated,
    SnapshotSkipped,
    SnapshotStaged,
    TierDegraded,
    TierRecovered,
)


class CadenceReading(Protocol):
    """What is read from the cadence of the run (`ckpt_engine.frequency.driver.Cadence` is one)."""

    @property
    def interval_steps(self) -> int | None: ...

    @property
    def overhead_fraction(self) -> float: ...

    def age_of_last_durable(self) -> float: ...


class RunMetrics:
    """An event sink that counts, and a mapping of names to numbers for the loggers of a trainer.

    Args:
        cadence: where interval, overhead and age come from; None leaves them out.
    """

    def __init__(self, cadence: CadenceReading | None = None) -> None:
        self._cadence = cadence
        self.stall_seconds = 0.0
        self.latency_seconds = 0.0
        self.written_bytes = 0
        self.committed = 0
        self.skipped = 0
        self.failed = 0
        self.replicated = 0
        self.sent_bytes = 0
        self._tiers: dict[str, bool] = {}
        """Further tiers heard of, and whether they are away."""

    def emit(self, event: Event) -> None:
        match event:
            case SnapshotStaged():
                self.stall_seconds = event.stall_seconds
            case SnapshotCommitted():
                self.committed += 1
                self.written_bytes += event.written_bytes
                self.latency_seconds = event.latency_seconds
            case SnapshotFailed():
                self.failed += 1
            case SnapshotSkipped():
                self.skipped += 1
            case SnapshotReplicated():
                self.replicated += 1
                self.sent_bytes += event.sent_bytes
                self._tiers[event.tier] = False
            case TierDegraded():
                self._tiers[event.tier] = True
            case TierRecovered():
                self._tiers[event.tier] = False
            case _:
                pass

    def numbers(self) -> dict[str, float]:
        """The current values, without a prefix.

        `stall_seconds` and `latency_seconds` are those of the newest snapshot; `written_bytes`, `committed`,
        `skipped` and `failed` count since the start; `interval_steps` is missing while there is none. `replicated`,
        `sent_bytes` (to further tiers) and `tiers_away` are there once a tier was heard of.
        """
        numbers: dict[str, float] = {
            "stall_seconds": self.stall_seconds,
            "latency_seconds": self.latency_seconds,
            "written_bytes": float(self.written_bytes),
            "committed": float(self.committed),
            "skipped": float(self.skipped),
            "failed": float(self.failed),
        }
        if self._tiers:
            numbers["replicated"] = float(self.replicated)
            numbers["sent_bytes"] = float(self.sent_bytes)
            numbers["tiers_away"] = float(sum(self._tiers.values()))
        if self._cadence is not None:
            if (interval := self._cadence.interval_steps) is not None:
                numbers["interval_steps"] = float(interval)
            numbers["overhead_percent"] = 100.0 * self._cadence.overhead_fraction
            numbers["age_of_last_durable_seconds"] = self._cadence.age_of_last_durable()
        return numbers
