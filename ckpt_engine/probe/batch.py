"""A digest of a batch as a loop gets it: small tensors as a whole, of large ones some words."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from ckpt_engine.state.sharding import here

WHOLE_BYTES = 4096
WORDS = 64
_DEEPEST = 8
_MOST_ITEMS = 256
_VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic)


def digest_of(batch: Any) -> int:
    """Of the values in nested containers and objects, and of their kinds and shapes. Runs no code of the objects."""
    hasher = xxhash.xxh3_64()
    _add(hasher, batch, 0)
    return hasher.intdigest()


def _add(hasher: Any, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(hasher, value)
    elif isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype}{value.shape}".encode())
        if value.dtype.kind not in "OV":
            _add_memory(hasher, value.ctypes.data, value.nbytes) if value.flags.forc else hasher.update(value.tobytes())
    elif isinstance(value, _VALUES):
        hasher.update(repr(value).encode("utf-8", "surrogatepass"))
    elif depth < _DEEPEST:
        hasher.update(type(value).__qualname__.encode())
        _add_items(hasher, value, depth + 1)


def _add_items(hasher: Any, value: Any, depth: int) -> None:
    if isinstance(value, Mapping):
        rows: Any = list(value.items())[:_MOST_ITEMS]
    elif isinstance(value, list | tuple):
        rows = enumerate(value[:_MOST_ITEMS])
    else:
        rows = list(getattr(value, "__dict__", {}).items())[:_MOST_ITEMS]
    for name, one in rows:
        hasher.update(str(name).encode("utf-8", "surrogatepass") if isinstance(name, str | int) else b"?")
        _add(hasher, one, depth)


def _add_tensor(hasher: Any, tensor: torch.Tensor) -> None:
    hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    tensor = here(tensor)
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return
    if not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    if address := tensor.data_ptr():
        _add_memory(hasher, address, tensor.nbytes)


def _add_memory(hasher: Any, address: int, nbytes: int) -> None:
    memory = (ctypes.c_char * nbytes).from_address(address)
    if nbytes <= WHOLE_BYTES:
        hasher.update(memory)
        return
    apart = nbytes // WORDS // 8 * 8
    hasher.update(np.ndarray((WORDS,), np.uint64, memoryview(memory), 0, (apart,)).tobytes())
