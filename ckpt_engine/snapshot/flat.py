"""Runs of consecutive elements of arrays: what a rank has where parameters are divided as one long row (FSDP1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ckpt_engine.ranks.boxes import Box, Grid

NOTHING = Box((0,), (0,))


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """What this rank has of an array: a run of its elements in C order.

    Args:
        part: live, of one dimension. Where there is nothing it MUST be a tensor of its own memory, because tensors that
            share memory count as tied.
        grid: who has which run.
        ranks: all that were asked, those with nothing included.
        rank: this one.
    """

    part: torch.Tensor
    grid: Grid
    ranks: frozenset[int]
    rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.grid.shape

    @property
    def box(self) -> Box:
        """The run: one dimension, whatever the array has."""
        number = self.grid.of(self.rank)
        return NOTHING if number is None else self.grid.boxes[number]

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for arrays that are divided alike."""
        return FlatPart, self.grid.signature

    def like(self, part: torch.Tensor) -> FlatPart:
        """Another array that is divided as this one is, of which this rank has `part`."""
        return FlatPart(part, self.grid, self.ranks, self.rank)

    def one(self, part: torch.Tensor) -> FlatPart:
        """A single number that the ranks have which have something of this array."""
        holders = tuple(sorted({rank for ranks in self.grid.holders for rank in ranks}))
        return FlatPart(part, _number(holders), self.ranks, self.rank)


@lru_cache(maxsize=1024)
def _number(holders: tuple[int, ...]) -> Grid:
    return Grid((), (Box((0,), (1,)),), (holders,))


def grid_of_runs(shape: Sequence[int], runs: Sequence[tuple[int, int, int]]) -> Grid:
    """The grid of an array whose elements are dealt in runs.

    Args:
        runs: (rank, first element, one after the last) of each rank that has something. Several may have the same run;
            otherwise they lie one behind another and are the array.
    """
    holders: dict[Box, list[int]] = {}
    for rank, start, stop in runs:
        holders.setdefault(Box((start,), (stop - start,)), []).append(rank)
    boxes = sorted(holders, key=lambda box: box.offsets)
    return Grid(tuple(shape), tuple(boxes), tuple(tuple(sorted(holders[box])) for box in boxes))
