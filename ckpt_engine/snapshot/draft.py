"""An array of a state on its way into the container: named and measured, without a place yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ckpt_engine.snapshot.flatten import ArrayLeaf


@dataclass(slots=True)
class Draft:
    """An entry before it has an offset.

    Args:
        array: index into the arrays of a snapshot.
        storage_bytes: see `plan.Source`, as `rows`.
        whole, start_bytes: where only some rows are written: shape of the array, and where they start in it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    array: int
    storage_bytes: tuple[int, int] | None
    lazy: bool
    leaves: list[ArrayLeaf]
    device: torch.device
    rows: tuple[int, int, int] | None = None
    whole: tuple[int, ...] | None = None
    start_bytes: int = 0
