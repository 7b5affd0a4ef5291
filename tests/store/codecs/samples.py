"""Bytes to encode that look like training state."""

from __future__ import annotations

import numpy as np


def weights(count: int, seed: int = 0) -> np.ndarray:
    """Float32 numbers as spread as weights are."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 0.02).astype(np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers: bfloat16, cut and not rounded."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
