"""A digest of a batch as a loop gets it: small tensors as a whole, of large ones some words."""

from __future__ import annotations

import ctypes
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash

from ckpt_engine.state.sharding import here, is_wrapper

WHOLE_BYTES = 4096
WORDS = 64
_DEEPEST = 8
_MOST_ITEMS = 256
_VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic)


def digest_of(batch: Any, before: int = 0) -> int:
    """Of the values in nested containers and objects, and of their kinds and shapes.

    Args:
        before: of the batches before it.
    """
    parts: list[Any] = []
    _add(parts, batch, 0)
    return xxhash.xxh3_64_intdigest(b"".join(parts), before)


def _add(parts: list[Any], value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        parts.append(f"{value.dtype}{value.shape}".encode())
        _add_tensor(parts, here(value))
    elif isinstance(value, np.ndarray):
        parts.append(f"{value.dtype}{value.shape}".encode())
        if value.dtype.kind not in "OV":
            whole = np.ascontiguousarray(value)
            _add_memory(parts, whole.ctypes.data, whole.nbytes)
    elif isinstance(value, _VALUES):
        parts.append(repr(value).encode("utf-8", "surrogatepass"))
    elif depth < _DEEPEST:
        parts.append(type(value).__qualname__.encode())
        for name, one in _items_of(value):
            parts.append(repr(name).encode("utf-8", "surrogatepass"))
            _add(parts, one, depth + 1)


def _items_of(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, list | tuple):
        items: Any = enumerate(value)
    else:
        # A mapping that is no dict has one within, such as the batch of a tokenizer.
        items = dict.items(value if isinstance(value, dict) else getattr(value, "__dict__", {}))
    return [(name if isinstance(name, str | int) else type(name), one) for name, one in islice(items, _MOST_ITEMS)]


def _add_tensor(parts: list[Any], tensor: torch.Tensor) -> None:
    if is_wrapper(tensor) or not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.numel():
        return
    whole = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    if address := whole.data_ptr():
        _add_memory(parts, address, whole.nbytes)


def _add_memory(parts: list[Any], address: int, nbytes: int) -> None:
    memory = (ctypes.c_char * nbytes).from_address(address)
    if nbytes > WHOLE_BYTES:
        apart = nbytes // WORDS // 8 * 8
        parts.append(np.ndarray((WORDS,), np.uint64, memoryview(memory), 0, (apart,)).tobytes())
    else:
        parts.append(memory.raw)
