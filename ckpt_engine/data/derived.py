"""The random streams of a rank that did not exist, made from those that were saved."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpt_engine.data import rng

__all__ = ["derive"]


def derive(saved: Sequence[rng.RngState], rank: int) -> rng.RngState:
    """The streams of `rank` in a run of another number of ranks; the same at every resume.

    A stream that was the same on all saved ranks stays the same on all: what the ranks decide by it must not differ.
    Of any other one rank 0 goes on with that of rank 0, and another rank begins one whose seed is the SHA-256 of the
    stream of rank 0, its name and the number of the rank.

    Args:
        saved: `rng.capture()` of every saved rank, in order.
        rank: for which.
    """
    first = saved[0]
    if rank == 0:
        return first
    return {
        name: stream
        if len(saved) > 1 and all(one.get(name) == stream for one in saved)
        else _begin(name, stream, hashlib.sha256(repr((name, stream, rank)).encode()).digest())
        for name, stream in first.items()
    }


def _begin(name: str, like: Any, digest: bytes) -> Any:
    """A new stream of the kind that `like` is of."""
    seed = int.from_bytes(digest, "little")
    if name == "python":
        return rng.encode_python(random.Random(seed))
    if name == "numpy":
        return _begin_numpy(like, seed)
    if name == "torch":
        return _torch(torch.Generator(), seed)
    if isinstance(like, bytes):
        return _of_device(name, None, like, seed)
    return [_of_device(name, index, state, seed + index) for index, state in enumerate(like)]


def _begin_numpy(like: Mapping[str, Any], seed: int) -> Any:
    state = dict(getattr(np.random, like["bit_generator"])(seed).state)
    return rng.encode_numpy(state | ({"has_gauss": 0, "gauss": 0.0} if "key" in like else {}))


def _of_device(kind: str, index: int | None, like: bytes, seed: int) -> bytes:
    module: Any = getattr(torch, kind)
    if not module.is_available() or (index or 0) >= module.device_count():
        return like  # it cannot be put back here anyway, which `rng.restore` says
    return _torch(torch.Generator(kind if index is None else f"{kind}:{index}"), seed)


def _torch(generator: torch.Generator, seed: int) -> bytes:
    generator.manual_seed(seed % 2**63)
    return generator.get_state().numpy().tobytes()
