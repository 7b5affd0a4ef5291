"""Reads words of the weights and moments that all ranks should have alike, for `store.replicas`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
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
    found: dict[str, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for path, tensor in _tensors(values):
        found[path[0]].append((entry_name(path), tensor))
    return {component: table for component, some in found.items() if (table := _table(some))}


def _tensors(values: Iterable[tuple[_Path, Any]]) -> Iterator[tuple[_Path, torch.Tensor]]:
    for path, value in values:
        if isinstance(value, dict):
            yield from _tensors(((*path, key), one) for key, one in value.items())
        elif type(value) in PLAIN and value.layout is torch.strided and value.dim():
            yield path, value.detach()


def _table(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    host = [(name, digest_of(one).to_bytes(ROW_BYTES, "little")) for name, one in tensors if one.is_cpu]
    fits = (one for one in tensors if one[1].is_cuda and one[1].nbytes >= ROW_BYTES)
    cuda = [(name, one) for name, one in fits if is_dense(one.shape, one.stride())]
    names, words = [name for name, _ in [*host, *cuda]], [_bytes(b"".join(row for _, row in host))] if host else []
    if cuda:
        device = cuda[0][1].device
        words = [one.pin_memory() for one in words] + [_spread(one) for _, one in cuda]
        words = [one.to(device, non_blocking=True) for one in words]
    return {NAMES: _bytes("\n".join(names).encode()), WORDS: torch.cat(words)} if words else {}


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes that are as far from each other as can be, each the lowest one of an element where these have 8 or less."""
    data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return data[:: data.numel() // ROW_BYTES // 8 * 8 or 1][:ROW_BYTES]
