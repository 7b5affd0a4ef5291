"""What was read of another program's checkpoint, before it becomes a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_STEP_KEYS = ("global_step", "step")
Advance = Callable[[int], object]
"""Gets the bytes that were read."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A state and what is known about it.

    Args:
        form: what it was: lightning, torch, dcp, accelerate, transformers.
        state: as it will be saved.
        step, epoch: as the source says, or None.
        notes: sentences for people: what was left out and why.
        about: JSON values that the manifest keeps, to be read before the snapshot is loaded.
    """

    form: str
    state: Mapping[str, Any]
    step: int | None
    epoch: int | None
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)


def whole_number(value: Any) -> int | None:
    """A counter as a source stores it, or None if it is none."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1 and value >= 0
    return int(value) if is_one else None


def of_state(form: str, state: dict[Any, Any]) -> Imported:
    """A state of no known layout; its step and epoch are taken from keys of that name."""
    steps = (whole_number(state.get(key)) for key in _STEP_KEYS)
    step = next((number for number in steps if number is not None), None)
    return Imported(form, state, step, whole_number(state.get("epoch")))
