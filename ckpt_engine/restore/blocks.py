"""Blocks: arrays that are stored as the boxes of several ranks one behind another (docs/format.md, "Tree")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckpt_engine.errors import FormatError
from ckpt_engine.ranks.boxes import Box, tiles


def boxes_of(node: Mapping[str, Any], shape: Sequence[int]) -> tuple[Box, ...]:
    """The boxes of the array of a leaf, in the order in which they are stored; one if it is in C order.

    Raises:
        FormatError: they do not make the array.
    """
    if "blocks" not in node:
        return (Box.whole(shape),)
    try:
        boxes = tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in node["blocks"])
        fits = all(len(box.offsets) == len(box.shape) == len(shape) for box in boxes) and tiles(shape, boxes)
    except (TypeError, ValueError) as err:
        raise FormatError(f"the blocks of {node.get('entry')!r} are malformed: {err}") from err
    if not fits:
        raise FormatError(f"the blocks of {node.get('entry')!r} do not make an array of shape {list(shape)}")
    return boxes


def put_together(stored: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
    """The array whose boxes `stored` has one behind another."""
    out = torch.empty_like(stored)
    flat = stored.view(-1)
    whole = Box.whole(stored.shape)
    at = 0
    for box in boxes:
        out[box.slices(whole)] = flat[at : at + box.count].view(box.shape)
        at += box.count
    return out
