"""A digest of a batch as a loop gets it: small tensors as a whole, of large ones some words."""

from __future__ import annotations

from collections.abc import Iterable
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
    kind = type(value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        if value.is_nested:  # it has no shape
            value = value.unbind()
        else:
            parts.append(_form(value.dtype, value.shape))
            _add_tensor(parts, value if kind is torch.Tensor else here(value))
            return
    if isinstance(value, np.ndarray):
        parts.append(_form(value.dtype, value.shape))
        if value.dtype.kind not in "OV":
            parts.append(_some(np.asarray(value)))
    elif isinstance(value, _VALUES):
        parts.append(repr(value).encode("utf-8", "surrogatepass"))
    elif depth < _DEEPEST:
        parts.append(kind.__qualname__.encode())
        for name, one in _items_of(value):
            parts.append(repr(name).encode("utf-8", "surrogatepass"))
            _add(parts, one, depth + 1)


@lru_cache(256)
def _form(dtype: object, shape: tuple[int, ...]) -> bytes:
    return f"{dtype}{shape}".encode()


def _add_tensor(parts: list[Any], tensor: torch.Tensor) -> None:
    if type(tensor) not in PLAIN and is_wrapper(tensor):
        return
    if tensor.is_cpu and tensor.layout is _STRIDED and (address := tensor.data_ptr()):
        nbytes = tensor.nbytes
        if not tensor.is_contiguous():
            parts.append(_some(elements(tensor)))
        else:
            parts.append(MEMORY[address : address + nbytes] if nbytes <= WHOLE_BYTES else words(address, nbytes))


def _some(array: np.ndarray[Any, Any]) -> bytes:
    apart = array.nbytes // (WORDS * max(8, array.itemsize)) if array.nbytes > WHOLE_BYTES else 1
    return array.flat[:: apart or 1].tobytes()


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, _SEQUENCES):
        return enumerate(islice(value, _MOST_ITEMS))
    # A mapping that is no dict has one within, such as the batch of a tokenizer.
    items = dict.items(value if isinstance(value, dict) else getattr(value, "__dict__", {}))
    return [(name if isinstance(name, _NAMES) else type(name), one) for name, one in islice(items, _MOST_ITEMS)]
