"""Reads words of the weights and moments that all ranks should have alike, for `store.replicas`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from ckpt_engine.probe.batch import digest_of
from ckpt_engine.probe.raw_memory import PLAIN
from ckpt_engine.state.entries import entry_name
from ckpt_engine.store.replicas import NAMES, ROW_BYTES, WORDS
from ckpt_engine.store.tree import is_dense

_Path = tuple[Any, ...]


def tables_of(values: Iterable[tuple[_Path, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """A table for each component. Nothing waits for a device.

    Args:
        values: tensors, or dicts of them, by their paths.
    """
    found: dict[str, list[tuple[_Path, torch.Tensor]]] = defaultdict(list)
    _add(found, values)
    return {component: table for component, some in found.items() if (table := _table(some))}


def _add(found: dict[str, list[tuple[_Path, torch.Tensor]]], values: Iterable[tuple[_Path, Any]]) -> None:
    for path, value in values:
        if isinstance(value, dict):
            _add(found, [((*path, key), one) for key, one in value.items()])
        elif type(value) in PLAIN and value.layout is torch.strided and value.dim():
            found[path[0]].append((path, value))


_name_of = lru_cache(1 << 16)(entry_name)


def _table(tensors: list[tuple[_Path, torch.Tensor]]) -> dict[str, torch.Tensor]:
    host = [(path, digest_of(one).to_bytes(ROW_BYTES, "little")) for path, one in tensors if one.is_cpu]
    cuda = [
        (path, one)
        for path, one in tensors
        if one.is_cuda and one.nbytes >= ROW_BYTES and is_dense(one.shape, one.stride())
    ]
    rows = [torch.frombuffer(bytearray().join(row for _, row in host), dtype=torch.uint8)] if host else []
    if cuda:
        device = cuda[0][1].device
        rows = [one.pin_memory() for one in rows] + [_spread(one) for _, one in cuda]
        rows = [one.to(device, non_blocking=True) for one in rows]
    names = "\n".join(_name_of(path) for path, _ in [*host, *cuda])
    if not rows:
        return {}
    return {NAMES: torch.frombuffer(bytearray(names.encode()), dtype=torch.uint8), WORDS: torch.cat(rows)}


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes that are as far from each other as can be, each the lowest one of an element where these have 8 or less."""
    data = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return data[:: data.numel() // ROW_BYTES // 8 * 8 or 1][:ROW_BYTES]
