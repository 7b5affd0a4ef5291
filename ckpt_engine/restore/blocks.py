"""Blocks: arrays that are stored as the boxes of several ranks one behind another (docs/format.md, "Tree")."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt_engine.ranks.boxes import Box


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
