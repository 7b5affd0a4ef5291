"""Where a run ended, as one number for each of its parts; and the random streams it starts with."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed all global random streams."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def digest(**parts: Any) -> dict[str, str]:
    """One number for each part, bit for bit, and one for the random streams."""
    parts["streams"] = (torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())
    digests = {}
    for name, part in parts.items():
        seen = hashlib.sha256()
        _absorb(part, seen)
        digests[name] = seen.hexdigest()
    return digests


def _absorb(node: Any, seen: Any) -> None:
    if isinstance(node, torch.Tensor):
        seen.update(f"{node.dtype}{tuple(node.shape)}".encode() + node.detach().cpu().contiguous().numpy().tobytes())
    elif isinstance(node, np.ndarray):
        seen.update(node.tobytes())
    elif isinstance(node, Mapping):
        for key in sorted(node, key=str):
            seen.update(str(key).encode())
            _absorb(node[key], seen)
    elif isinstance(node, list | tuple):
        for child in node:
            _absorb(child, seen)
    else:
        seen.update(repr(node).encode())
