"""The frequency settings of a run, as one validated value."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ckpt_engine.errors import ConfigError

DEFAULT_OVERHEAD = 0.01


@dataclass(frozen=True, slots=True)
class MemoryRhythm:
    """When snapshots are taken into memory: at fixed distances, or as often as the budget allows (both None)."""

    every_n_steps: int | None = None
    every_seconds: float | None = None

    @property
    def fixed(self) -> bool:
        return self.every_n_steps is not None or self.every_seconds is not None

    def least_seconds(self, step_seconds: float) -> float:
        """The shortest interval, for steps of that length."""
        if self.every_seconds is not None:
            return max(self.every_seconds, step_seconds)
        return (self.every_n_steps or 1) * step_seconds


@dataclass(frozen=True, slots=True)
class FrequencySettings:
    """When snapshots are taken. Several triggers coexist; the fixed ones are never adapted.

    Args:
        overhead: budget of the adaptive trigger, as a fraction of clean training time (0.01 is 1 %). None: no adaptive
            trigger, only the fixed ones.
        max_lost_work_seconds: RPO; upper bound of the adaptive interval plus persist time. None: no bound.
        mtbf_seconds: mean time between failures. None: learned online (`mtbf: auto`).
        every_n_steps: fixed trigger at every step number divisible by it.
        every_seconds: fixed trigger at this wall-clock distance.
        on_validation_end: fixed trigger at the first boundary after a validation.
        at_end: fixed trigger when training ends with work that is not in a snapshot.
        slots: arena slots, i.e. snapshots that can be in flight at the same time.
        bandwidth_bytes_per_second: what snapshots may write on average. None: no bound.
        memory: when snapshots are taken that only stay in memory. None: never.

    Raises:
        ConfigError: a value out of range; the message names the field.
    """

    overhead: float | None = DEFAULT_OVERHEAD
    max_lost_work_seconds: float | None = None
    mtbf_seconds: float | None = None
    every_n_steps: int | None = None
    every_seconds: float | None = None
    on_validation_end: bool = False
    at_end: bool = True
    slots: int = 1
    bandwidth_bytes_per_second: float | None = None
    memory: MemoryRhythm | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or isinstance(value, bool | MemoryRhythm):
                continue
            whole = field.name in ("every_n_steps", "slots")
            if not isinstance(value, int if whole else (int, float)) or not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{field.name} must be a positive {'integer' if whole else 'number'}, not {value!r}")
        if self.overhead is not None and self.overhead > 1:
            raise ConfigError(f"overhead is a fraction of training time between 0 and 1, not {self.overhead!r}")

    @property
    def budget(self) -> float:
        """The share of training time that snapshots of all kinds may cost."""
        return DEFAULT_OVERHEAD if self.overhead is None else self.overhead

    @classmethod
    def from_options(
        cls,
        *,
        overhead: float | None = None,
        max_lost_work_seconds: float | None = None,
        mtbf_seconds: float | None = None,
        every_n_steps: int | None = None,
        every_seconds: float | None = None,
        on_validation_end: bool = False,
        at_end: bool = True,
        slots: int = 1,
        bandwidth_bytes_per_second: float | None = None,
        memory: tuple[int | None, float | None] | None = None,
    ) -> FrequencySettings:
        """The settings a user means who gave only some of the options (None: not given).

        A fixed interval (`every_n_steps`, `every_seconds`) without an `overhead` or a `max_lost_work` switches the
        adaptive trigger off; everything else leaves it on, with the default budget where none was given. `memory` is
        the rhythm of the memory tier in steps and seconds.
        """
        fixed = every_n_steps is not None or every_seconds is not None
        if overhead is None and not (fixed and max_lost_work_seconds is None):
            overhead = DEFAULT_OVERHEAD
        return cls(
            overhead=overhead,
            max_lost_work_seconds=max_lost_work_seconds,
            mtbf_seconds=mtbf_seconds,
            every_n_steps=every_n_steps,
            every_seconds=every_seconds,
            on_validation_end=on_validation_end,
            at_end=at_end,
            slots=slots,
            bandwidth_bytes_per_second=bandwidth_bytes_per_second,
            memory=None if memory is None else MemoryRhythm(*memory),
        )
