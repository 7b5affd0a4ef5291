"""One file of `torch.save`, written and read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ckpt_engine.convert import safe_load
from ckpt_engine.convert.imported import Advance, Imported, whole_number

_STEP_KEYS = ("global_step", "step")


def write(state: Any, out: BinaryIO) -> None:
    """Write any state."""
    torch.save(state, out)


def why_not_weights_only(path: Path) -> str | None:
    """Why `torch.load(weights_only=True)` refuses the file, or None if it takes it."""
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as err:
        lines = [line.strip() for line in str(err).splitlines()]
        return next((line for line in lines if "GLOBAL" in line), lines[0])
    return None


def read(path: Path, advance: Advance) -> Imported:
    """A file of `torch.save` with any state.

    Raises:
        UnstorableLeafError, ForeignError, StorageError: as `safe_load.load`.
    """
    value = safe_load.load(path).value
    advance(path.stat().st_size)
    state = value if isinstance(value, dict) else {"state": value}
    return of_state("torch", state)


def of_state(form: str, state: dict[Any, Any]) -> Imported:
    """A state of no known layout; its step and epoch are taken from keys of that name."""
    steps = (whole_number(state.get(key)) for key in _STEP_KEYS)
    step = next((number for number in steps if number is not None), None)
    return Imported(form, state, step, whole_number(state.get("epoch")))
