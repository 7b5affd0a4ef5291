"""A digest of a batch as a loop gets it: small tensors as a whole, of large ones some words."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash

from ckpt_engine.probe.raw_memory import MEMORY, PLAIN, WORDS, elements, words
from ckpt_engine.state.sharding import here, is_wrapper

WHOLE_BYTES = 4096
_DEEPEST = 8
_MOST_ITEMS = 256
_STRIDED = torch.strided
_NAMES, _SEQUENCES = (str, int), (list, tuple)
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
        if not value.is_nested:
            _add_tensor(parts, value)
            return
        value = value.unbind()  # it has no shape
    if isinstance(value, np.ndarray):
        parts.append(_form(value.dtype, value.shape))
        if value.dtype.kind not in "OV":
            parts.append(_some(np.asarray(value)))
    elif isinstance(value, _VALUES):
        parts.append(repr(value).encode("utf-8", "surrogatepass"))
    elif depth < _DEEPEST:
        parts.append(type(value).__qualname__.encode())
        if isinstance(value, _SEQUENCES):
            for one in islice(value, _MOST_ITEMS):
                _add(parts, one, depth + 1)
        else:
            for name, one in _items_of(value):
                parts.append(repr(name).encode("utf-8", "surrogatepass"))
                _add(parts, one, depth + 1)
        parts.append(b";")


@lru_cache(256)
def _form(dtype: object, shape: tuple[int, ...]) -> bytes:
    return f"{dtype}{shape}".encode()


def _add_tensor(parts: list[Any], tensor: torch.Tensor) -> None:
    parts.append(_form(tensor.dtype, tensor.shape))
    if type(tensor) not in PLAIN and is_wrapper(tensor := here(tensor)):
        return
    if tensor.is_cpu and tensor.layout is _STRIDED and (address := tensor.data_ptr()):
        nbytes = tensor.nbytes
        if not tensor.is_contiguous():
            parts.append(_some(elements(tensor)))
        else:
            whole = nbytes <= WHOLE_BYTES
            parts.append(MEMORY[address : address + nbytes].tobytes() if whole else words(address, nbytes))


def _some(array: np.ndarray[Any, Any]) -> bytes:
    apart = array.nbytes // (WORDS * max(8, array.itemsize)) if array.nbytes > WHOLE_BYTES else 1
    return array.flat[:: apart or 1].tobytes()


def _items_of(value: Any) -> list[tuple[Any, Any]]:
    # A mapping that is no dict has one within, such as the batch of a tokenizer.
    items = dict.items(value if isinstance(value, dict) else getattr(value, "__dict__", {}))
    return [(name if isinstance(name, _NAMES) else type(name), one) for name, one in islice(items, _MOST_ITEMS)]
