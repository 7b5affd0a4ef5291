"""Whether copying behind training (lazily) is cheaper than copying before it goes on."""

from __future__ import annotations

import os
from typing import Literal

import torch


def copies_lazily(setting: Literal["auto", "on", "off"], device: torch.device) -> bool:
    """Whether to stage lazily.

    A lazy copy takes time from forward and backward. If they use all cores, whatever waits for the slowest of them
    loses more than with an eager copy, which has all cores to itself (docs/benchmarks.md, "Every iteration").

    Args:
        setting: the option `lazy`.
        device: where training computes.
    """
    if setting == "auto":
        return device.type != "cpu" or torch.get_num_threads() < len(os.sched_getaffinity(0))
    return setting == "on"
