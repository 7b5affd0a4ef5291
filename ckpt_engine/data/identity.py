"""Tells whether two objects hold the same values, from a bounded look at them: the samples of a dataset, attributes.

Nothing is loaded for it: no sample is asked for, and of what lies in memory only some values are read. Floating-point
samples are compared with a tolerance, as another machine may have computed them with other last bits.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from ckpt_engine.data import native
from ckpt_engine.data.datasets_private import is_of_package

__all__ = ["Samples", "checksum", "differing", "samples_of"]

Samples = dict[str, Any]
"""By path: `{"length": …, "checksum": …}`, of floats `{"length": …, "floats": […]}`."""

_NODES = 16
_PICKED = 256
_ROWS, _ROW = 64, 8
_BYTES = 1 << 20
_RELATIVE, _ABSOLUTE = 1e-3, 1e-6
_PLAIN = (str, int, float, bool, bytes, PurePath, np.generic, type(None))
_LISTS = (list, tuple, range, array, deque)


def samples_of(dataset: Any) -> Samples:
    """Which samples a dataset has, as far as its attributes tell.

    Read are the indices of a `Subset`, and attributes with one entry per sample (file names, labels, tensors), here and
    in the datasets inside. Of iterable ones: the streams that shuffle them.
    """
    found: Samples = {}
    if isinstance(dataset, IterableDataset):
        return native.orders(dataset)
    queue, seen = deque([("dataset", dataset)]), {id(dataset)}
    while queue and len(seen) <= _NODES:
        path, node = queue.popleft()
        for name, value in _columns(path, node):
            described = _described(value)
            if described is not None:
                found[name] = described
        for name, inner in _inner(node):
            if id(inner) not in seen:
                seen.add(id(inner))
                queue.append((f"{path}.{name}", inner))
    return found


def differing(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The paths that both know and that show other values; not those whose length changed."""
    return [
        path
        for path, then in saved.items()
        if (now := current.get(path)) is not None and then["length"] == now["length"] and not _alike(then, now)
    ]


def checksum(value: Any) -> int | None:
    """Of the values in a tensor, an array or a container; None for anything else. Of large ones a part is read."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            return None
        flat = value.detach().reshape(-1)
        step = max(1, flat.numel() * flat.element_size() // _BYTES)
        return zlib.crc32(flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return checksum(value.reshape(-1)[:: max(1, value.size // _PICKED)].tolist())
        flat_array = value.reshape(-1)
        return zlib.crc32(np.ascontiguousarray(flat_array[:: max(1, value.nbytes // _BYTES)]).tobytes())
    if isinstance(value, Mapping):
        value = [list(value.keys()), list(value.values())]
    elif isinstance(value, set | frozenset):
        value = sorted(map(repr, value))
    if not isinstance(value, _LISTS):
        return None
    numbers = value if len(value) <= _BYTES // 8 else [value[i] for i in _spread(len(value), _BYTES // 8)]
    try:
        kind = "d" if any(isinstance(one, float) for one in numbers) else "q"
        return zlib.crc32(array(kind, numbers))
    except (TypeError, OverflowError):
        text = "\n".join(_text(value[i]) for i in _spread(len(value), _PICKED))
        return zlib.crc32(f"{len(value)}\n{text}".encode())


def _columns(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """What has one entry per sample of `node`."""
    if isinstance(node, (*_LISTS, np.ndarray, torch.Tensor)):
        yield path, node
        return
    length = _length(node)
    if length is None:
        return
    if (rows := _arrow_rows(node, length)) is not None:
        yield path, rows
        return
    for name, value in list(getattr(node, "__dict__", {}).items()):
        if _is_column(value) and _length(value) == length:
            yield f"{path}.{name}", value
        elif isinstance(value, list | tuple) and len(value) <= _NODES:
            for index, one in enumerate(value):
                if isinstance(one, np.ndarray | torch.Tensor) and _length(one) == length:
                    yield f"{path}.{name}[{index}]", one


def _inner(node: Any) -> Iterator[tuple[str, Any]]:
    """Datasets inside of a dataset."""
    if isinstance(node, Subset):
        yield "dataset", node.dataset
    elif isinstance(node, ConcatDataset):
        yield from ((f"datasets[{index}]", one) for index, one in enumerate(node.datasets))
    elif not isinstance(node, (*_LISTS, np.ndarray, torch.Tensor)):
        for name, value in list(getattr(node, "__dict__", {}).items()):
            if isinstance(value, torch.utils.data.Dataset) or _arrow_rows(value, _length(value)) is not None:
                yield name, value


def _is_column(value: Any) -> bool:
    return isinstance(value, (*_LISTS, np.ndarray, torch.Tensor)) or hasattr(value, "iloc")


def _described(value: Any) -> dict[str, Any] | None:
    length = _length(value)
    if length is None:
        return None
    if hasattr(value, "iloc"):  # pandas
        value = [str(value.iloc[i].tolist())[:1000] for i in _spread(length, _ROWS)]
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            return None
        rows = value.detach()[torch.tensor(_spread(length, _ROWS), dtype=torch.int64, device=value.device)]
        rows = rows.reshape(len(rows), math.prod(value.shape[1:]))[:, :_ROW].cpu()
        value = rows.to(torch.float64).numpy() if rows.is_floating_point() else rows.numpy()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        value = np.stack([value[i].reshape(-1)[:_ROW] for i in _spread(length, _ROWS)]) if length else value
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
        return {"length": length, "floats": value.astype(np.float64).reshape(-1).tolist()}
    if isinstance(value, range):
        value = [value.start, value.stop, value.step]
    elif not isinstance(value, np.ndarray):
        value = [_text(value[i]) for i in _spread(length, _PICKED)] if len(value) == length else value
    return {"length": length, "checksum": checksum(value)}


def _arrow_rows(node: Any, length: int | None) -> list[str] | None:
    """Some rows of a dataset of the package `datasets`, as they are stored: nothing is decoded."""
    if not is_of_package(node) or not hasattr(node, "with_format") or length is None:
        return None
    stored = node.with_format("arrow")
    return [str(stored[i].to_pydict())[:1000] for i in _spread(length, _ROW)]


def _alike(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if "floats" not in then or "floats" not in now:
        return bool(then.get("checksum") == now.get("checksum"))
    if len(then["floats"]) != len(now["floats"]):
        return False
    return bool(np.allclose(then["floats"], now["floats"], rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True))


def _text(value: Any) -> str:
    """A value as text that does not change from process to process: what has no such text is named by its type."""
    if isinstance(value, float | np.floating):
        return format(float(value), ".4g")
    if isinstance(value, _PLAIN):
        return str(value)[:1000]
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{tuple(value.shape)}{value.dtype}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(_text(one) for one in value[:_ROW]) + ")"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_text(value[name])}" for name in list(value)[:_ROW]) + "}"
    return type(value).__qualname__


def _spread(length: int, most: int) -> list[int]:
    """Indices that are spread evenly, the first and the last among them."""
    if length <= most:
        return list(range(length))
    return [number * (length - 1) // (most - 1) for number in range(most)]


def _length(value: Any) -> int | None:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return None
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError, RuntimeError):
        return None
