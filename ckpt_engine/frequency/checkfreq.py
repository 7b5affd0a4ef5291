"""Algorithm 1 of CheckFreq (Mohan, Phanishayee, Chidambaram; FAST 2021), kept as the published point of comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# Relative slack of every ceil/floor here: measured seconds divided by measured seconds must not cost a whole step
# because 0.7 / 0.05 is not exactly 14 in binary.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Profile:
    """What CheckFreq measures before training.

    Args:
        iteration_seconds: one training iteration (Ti).
        update_seconds: the weight update within it (Tw); the snapshot must be over before it.
        cpu_copy_seconds: copying the state to host memory (Tc).
        device_copy_seconds: copying the state on the device (Tg).
        write_seconds: writing the copy to storage (Ts).
        state_bytes: size of the state (m).
        used_bytes: peak device memory of training (M).
        device_bytes: device memory (Mmax).
    """

    iteration_seconds: float
    update_seconds: float
    cpu_copy_seconds: float
    device_copy_seconds: float
    write_seconds: float
    state_bytes: float
    used_bytes: float
    device_bytes: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The interval, where the snapshot is made, and the stall it costs."""

    interval_steps: int
    mode: Literal["cpu", "device"]
    stall_seconds: float


def plan(profile: Profile, overhead: float) -> Plan:
    """The initial interval of CheckFreq for a budget `overhead` (fraction, > 0).

    Source: Algorithm 1 of the paper; the result is rounded up to whole steps, which the paper leaves open.
    """
    ti = profile.iteration_seconds
    cpu_stall = max(0.0, profile.cpu_copy_seconds - (ti - profile.update_seconds))
    device_stall = profile.device_copy_seconds
    mode: Literal["cpu", "device"]
    if profile.device_bytes - profile.used_bytes > profile.state_bytes and device_stall <= cpu_stall:
        stall, mode = device_stall, "device"
    else:
        stall, mode = cpu_stall, "cpu"
    hidden = (profile.cpu_copy_seconds + profile.write_seconds - stall) / ti
    within_budget = stall / (overhead * ti)
    return Plan(max(_ceil(hidden), _ceil(within_budget), 1), mode, stall)


def _ceil(value: float) -> int:
    return math.ceil(value * (1 - ROUNDING))
