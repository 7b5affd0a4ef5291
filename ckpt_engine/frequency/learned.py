"""The values a cadence remembers: snapshots on their way, and what a run has learned from those that are settled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_engine.frequency.failure_rate import FailureRate
from ckpt_engine.frequency.measure import CostMeter

STATE_VERSION = 1


@dataclass(slots=True)
class InFlight:
    """A snapshot that was taken and is not settled yet."""

    step: int
    instant: float
    stall_seconds: float


@dataclass(frozen=True, slots=True)
class Settled:
    """The end of an in-flight snapshot; `latency_seconds` is None where it failed."""

    snapshot: InFlight
    latency_seconds: float | None
    busy_seconds: float
    written_bytes: float


@dataclass(frozen=True, slots=True)
class Learned:
    """What a run knows about its failures and its snapshots; None: not known yet."""

    failures: FailureRate
    meter: CostMeter
    step_seconds: float | None
    interval_steps: int | None

    @property
    def after_failure(self) -> FailureRate:
        """The belief after a failure some time after this: half an interval is the expectation."""
        lost = (self.interval_steps or 0) * (self.step_seconds or 0.0) / 2.0
        return self.failures.survived(lost).failed()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "version": STATE_VERSION,
            "failures": self.failures.to_json(),
            "costs": self.meter.to_json() if self.meter.known else None,
            "step_seconds": self.step_seconds,
            "interval_steps": self.interval_steps,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Learned:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: this version cannot read it.
        """
        if data["version"] != STATE_VERSION:
            raise ValueError(f"version {data['version']!r}")
        return cls(
            FailureRate.from_json(data["failures"]),
            CostMeter.from_json(data["costs"]) if data["costs"] is not None else CostMeter(),
            None if data["step_seconds"] is None else measured(float(data["step_seconds"])),
            None if data["interval_steps"] is None else int(data["interval_steps"]),
        )


def measured(seconds: float) -> float:
    """A measurement from outside; negative, NaN and infinite ones are none."""
    return seconds if 0.0 < seconds < math.inf else 0.0
