"""A digest of a batch as a loop gets it: small tensors as a whole, of large ones some words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash

from ckpt_engine.probe.memory import MEMORY, elements, places, words
from ckpt_engine.state.sharding import here, is_wrapper

WHOLE_BYTES = 4096
_DEEPEST = 8
_MOST_ITEMS = 256
_MOST_KEPT = 512
_STRIDED = torch.strided
_NAMES, _SEQUENCES = (str, int), (list, tuple)
_VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic)


def digest_of(batch: Any, before: int = 0) -> int:
    """Of the values in nested containers and objects, and of their kinds and shapes.

    Args:
        before: of the batches before it.
    """
    parts: list[Any] = []
    _adder(type(batch))(parts, batch, 0)
    return xxhash.xxh3_64_intdigest(b"".join(parts), before)


@lru_cache(_MOST_KEPT)
def _adder(kind: type) -> Callable[[list[Any], Any, int], None]:
    if issubclass(kind, torch.Tensor):
        return _add_tensor
    if issubclass(kind, np.ndarray):
        return _add_array
    return _add_value if issubclass(kind, _VALUES) else _add_items


def _add_value(parts: list[Any], value: Any, _: int) -> None:
    parts.append(repr(value).encode("utf-8", "surrogatepass"))


def _add_items(parts: list[Any], value: Any, depth: int) -> None:
    if depth < _DEEPEST:
        parts.append(type(value).__qualname__.encode())
        for name, one in _items_of(value):
            parts.append(_text(name))
            _adder(type(one))(parts, one, depth + 1)


def _add_tensor(parts: list[Any], value: torch.Tensor, depth: int) -> None:
    if value.is_nested:  # it has no shape
        return _add_items(parts, value.unbind(), depth)
    parts.append(_form(value.dtype, value.shape))
    if type(value) is not torch.Tensor and is_wrapper(value := here(value)):
        return None
    if not value.is_cpu or value.layout is not _STRIDED:
        return None
    address, nbytes = value.data_ptr(), value.nbytes
    if address and nbytes and not value.is_contiguous():
        parts.append(_some(elements(value)))
    elif address:
        parts.append(MEMORY[address : address + nbytes] if nbytes <= WHOLE_BYTES else words(address, nbytes))


def _add_array(parts: list[Any], value: np.ndarray[Any, Any], _: int) -> None:
    parts.append(_form(value.dtype, value.shape))
    if value.dtype.kind not in "OV":
        parts.append(_some(np.asarray(value)))


def _some(array: np.ndarray[Any, Any]) -> bytes:
    if array.nbytes <= WHOLE_BYTES:
        return array.tobytes()
    return array.flat[places(array.nbytes, array.itemsize)].tobytes()


@lru_cache(_MOST_KEPT)
def _form(dtype: object, shape: tuple[int, ...]) -> bytes:
    return f"{dtype}{shape}".encode()


@lru_cache(_MOST_KEPT, typed=True)
def _text(name: object) -> bytes:
    return repr(name).encode("utf-8", "surrogatepass")


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, _SEQUENCES):
        return enumerate(islice(value, _MOST_ITEMS))
    # A mapping that is no dict has one within, such as the batch of a tokenizer.
    items = dict.items(value if isinstance(value, dict) else getattr(value, "__dict__", {}))
    return [(name if isinstance(name, _NAMES) else type(name), one) for name, one in islice(items, _MOST_ITEMS)]
