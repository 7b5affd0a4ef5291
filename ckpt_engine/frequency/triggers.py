"""The fixed triggers: when a snapshot is due whatever it costs.

Each trigger is a pure value that says when it fires next; `FixedTriggers` combines those a run has and remembers what
has fired. The adaptive trigger is not here: it belongs to `driver.Cadence`, which asks both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ckpt_engine.frequency.settings import FrequencySettings
from ckpt_engine.observe.units import duration

# Values of `SnapshotInfo.reason`; the order is the order in which triggers due at the same boundary are asked.
VALIDATION: Final = "validation"
EVERY_N_STEPS: Final = "every_n_steps"
EVERY_SECONDS: Final = "every_seconds"
INTERVAL: Final = "interval"
END: Final = "end"
MEMORY: Final = "memory"
"""Of snapshots that only stay in memory; they become durable if the trainer dies."""


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Fires at the multiples of `steps`, so that a resumed run keeps the grid of the first one."""

    steps: int

    def next_step(self, step: int) -> int:
        """The first step after `step` at which it fires."""
        return (step // self.steps + 1) * self.steps


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Fires `seconds` after it fired last, at the first boundary from then on."""

    seconds: float

    def next_time(self, fired: float) -> float:
        """The earliest time of the next firing; `fired` is when it fired last, or when training started."""
        return fired + self.seconds


class FixedTriggers:
    """The fixed triggers of one run and what has fired so far.

    Snapshots taken for other reasons do not move them. Firing is remembered once: what is not taken at its boundary
    (busy slot, forbidden boundary) is the caller's to retry.

    Args:
        step: the step training starts or resumes at.
        now: monotonic seconds.
    """

    __slots__ = ("_at_end", "_every_n", "_every_seconds", "_on_validation", "_validated", "wake_step", "wake_time")

    def __init__(self, settings: FrequencySettings, *, step: int, now: float) -> None:
        self._every_n = EveryNSteps(settings.every_n_steps) if settings.every_n_steps else None
        self._every_seconds = EverySeconds(settings.every_seconds) if settings.every_seconds else None
        self._on_validation = settings.on_validation_end
        self._at_end = settings.at_end
        self._validated = False
        self.wake_step: float = self._every_n.next_step(step) if self._every_n else math.inf
        self.wake_time: float = self._every_seconds.next_time(now) if self._every_seconds else math.inf

    def validation_ended(self) -> None:
        """A validation ended; matters only where it is a trigger."""
        self._validated = self._on_validation

    @property
    def validation_due(self) -> bool:
        return self._validated

    def fire(self, step: int, now: float) -> str | None:
        """The reason of the first trigger due at this boundary; all that are due count as fired."""
        reason = None
        if self._every_seconds is not None and now >= self.wake_time:
            self.wake_time = self._every_seconds.next_time(now)
            reason = EVERY_SECONDS
        if self._every_n is not None and step >= self.wake_step:
            self.wake_step = self._every_n.next_step(step)
            reason = EVERY_N_STEPS
        if self._validated:
            self._validated = False
            reason = VALIDATION
        return reason

    def at_end(self, step: int, taken_step: int) -> str | None:
        """`end` if training ends at `step` with work the snapshot at `taken_step` does not hold."""
        return END if self._at_end and step > taken_step else None

    def describe(self) -> str:
        """The fixed triggers in one line."""
        parts = []
        if self._every_n is not None:
            parts.append(f"every {self._every_n.steps} steps")
        if self._every_seconds is not None:
            parts.append(f"every {duration(self._every_seconds.seconds)}")
        if self._on_validation:
            parts.append("after each validation")
        if self._at_end:
            parts.append("at the end")
        return f"{', '.join(parts) or 'never'}: fixed"
