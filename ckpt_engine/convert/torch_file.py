"""A snapshot as one file of `torch.save`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch


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
