"""What a cadence remembers of its snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_engine.frequency.failures import FailureBelief
from ckpt_engine.frequency.measure import CostMeter, measured

STATE_VERSION = 2


@dataclass(frozen=True, slots=True)
class Learned:
    """What a run knows about its failures and its snapshots; None: not known yet.

    `account`: seconds of clean training, of snapshots and of hooks since the run began. `before`: what was believed
    before the first attempt that the nearest tier knows of, where another one was lost.
    """

    failures: FailureBelief
    meter: CostMeter
    step_seconds: float | None
    interval_steps: int | None
    account: tuple[float, float, float] = (0.0, 0.0, 0.0)
    before: FailureBelief | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "version": STATE_VERSION,
            "failures": self.failures.to_json(),
            "costs": self.meter.to_json() if self.meter.known else None,
            "step_seconds": self.step_seconds,
            "interval_steps": self.interval_steps,
            "account": list(self.account),
            "before": self.before.to_json() if self.before is not None else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Learned:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: this version cannot read it.
        """
        if data["version"] != STATE_VERSION:
            raise ValueError(f"version {data['version']!r}")
        clean, spent, *hooks = data.get("account", (0.0, 0.0))
        return cls(
            FailureBelief.from_json(data["failures"]),
            CostMeter.from_json(data["costs"]) if data["costs"] is not None else CostMeter(),
            None if data["step_seconds"] is None else measured(float(data["step_seconds"])),
            None if data["interval_steps"] is None else int(data["interval_steps"]),
            (measured(float(clean)), measured(float(spent)), measured(float(*hooks))),
            FailureBelief.from_json(before) if (before := data.get("before")) is not None else None,
        )
