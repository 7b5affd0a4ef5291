"""The numbers of a run that loggers and its status page show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ckpt_engine.observe.events import (
    Event,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotReplicated,
    SnapshotSkipped,
    SnapshotStaged,
)
from ckpt_engine.observe.run_times import RunTimes

SHORT = frozenset(
    {
        "overhead_percent",
        "interval_steps",
        "age_of_last_durable_seconds",
        "work_at_risk_seconds",
        "failed",
        "goodput_percent",
    }
)
"""What loggers get unless the option `log.loggers` asks for all."""


class CadenceReading(Protocol):
    """What is read from the cadence of the run (`ckpt_engine.frequency.cadence.Cadence` is one)."""

    @property
    def interval_steps(self) -> int | None:
        """Steps between snapshots; None: not known yet."""

    @property
    def overhead_fraction(self) -> float:
        """What snapshots cost, as a share of the training time without them."""

    def age_of_last_durable(self) -> float:
        """Seconds since the instant of the newest durable snapshot."""


class RunMetrics:
    """An event sink that counts, and a mapping of names to numbers for the loggers of a trainer.

    Args:
        cadence: where interval, overhead and age come from; None leaves them out.
        times: where goodput comes from; None leaves it out.
    """

    def __init__(self, cadence: CadenceReading | None = None, times: RunTimes | None = None) -> None:
        self._cadence, self._times = cadence, times
        self.stall_seconds = 0.0
        """For which the newest snapshot has blocked training until now, its fence included."""
        self.snapshot_bytes = 0
        self.durable_step: int | None = None
        """Of the newest durable snapshot."""
        self.outlook: Callable[[], Mapping[str, Any]] = dict
        """How the run stands, see `preempt.stop_plan.outlook`. Any thread."""
        self._latency_seconds = 0.0
        self._counted: Counter[str] = Counter()
        """Since the start: events by their names, and bytes by name in `numbers`."""

    def emit(self, event: Event) -> None:
        self._counted[event.name] += 1
        match event:
            case SnapshotStaged():
                self.snapshot_bytes = event.nbytes
            case SnapshotCommitted():
                self.durable_step, self._latency_seconds = event.step, event.latency_seconds
                self._counted["written_bytes"] += event.written_bytes
            case SnapshotReplicated():
                self._counted["sent_bytes"] += event.sent_bytes

    def numbers(self) -> dict[str, float]:
        """The current values, without a prefix. Any thread: each is right, all of them may be of two moments.

        `stall_seconds`, `snapshot_bytes` and `latency_seconds` are those of the newest snapshot; `written_bytes`,
        `committed`, `skipped` and `failed` count since the start; `interval_steps` is missing while there is none.
        `resume_exact` is there once the repeated steps were compared: 1 is equal, and 0 is different.
        `replicated`, `sent_bytes` (to further tiers) and `tiers_away` are there if there are further tiers.
        The numbers of the outlook, such as `work_at_risk_seconds`, are missing while they are not known.
        """
        counted, found = self._counted, self.outlook()
        numbers: dict[str, float] = {
            "stall_seconds": self.stall_seconds,
            "snapshot_bytes": float(self.snapshot_bytes),
            "latency_seconds": self._latency_seconds,
            "written_bytes": float(counted["written_bytes"]),
            "committed": float(counted[SnapshotCommitted.name]),
            "skipped": float(counted[SnapshotSkipped.name]),
            "failed": float(counted[SnapshotFailed.name]),
        }
        if further := found.get("tiers", [])[1:]:
            numbers["replicated"] = float(counted[SnapshotReplicated.name])
            numbers["sent_bytes"] = float(counted["sent_bytes"])
            numbers["tiers_away"] = float(sum(tier["away"] for tier in further))
        if self._times is not None:
            numbers |= self._times.spent.numbers()
            if (replay := self._times.replay) is not None and replay.result != "not compared":
                numbers["resume_exact"] = float(replay.result == "exact")
        if self._cadence is not None:
            if (interval := self._cadence.interval_steps) is not None:
                numbers["interval_steps"] = float(interval)
            numbers["overhead_percent"] = 100.0 * self._cadence.overhead_fraction
            numbers["age_of_last_durable_seconds"] = self._cadence.age_of_last_durable()
        return numbers | {name: float(value) for name, value in found.items() if isinstance(value, int | float)}

    def logged(self, loggers: str) -> dict[str, float]:
        """What a logger gets now, as it names it: `ckpt/failed` and so on. Any thread.

        Args:
            loggers: the option `log.loggers`; `full`: all numbers, else those of `SHORT`.
        """
        return {f"ckpt/{name}": value for name, value in self.numbers().items() if loggers == "full" or name in SHORT}
