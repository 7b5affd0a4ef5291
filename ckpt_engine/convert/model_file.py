"""Weights as one safetensors file, the way `safetensors.torch.save_model` writes them: tied tensors once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ckpt_engine.store.container import DTYPES


def write(state_dict: Mapping[str, Any], folder: Path, name: str, torch_name: str) -> tuple[str, ...]:
    """Write the weights as `name`, or as `torch_name` where safetensors has no such dtype or value; returns notes."""
    values = [value for value in state_dict.values() if isinstance(value, torch.Tensor)]
    odd = sorted({str(v.dtype) for v in values if str(v.dtype).removeprefix("torch.") not in DTYPES})
    if odd or len(values) < len(state_dict):
        torch.save(dict(state_dict), folder / torch_name)
        why = f"safetensors has no {', '.join(odd)}" if odd else "they hold values that are no tensors"
        return (f"weights are in {torch_name}: {why}",)
    apart, tied = untied(state_dict)
    save_file(apart, folder / name, metadata={"format": "pt", **tied})
    return (f"tied weights stored once: {', '.join(f'{a} = {b}' for a, b in tied.items())}",) if tied else ()


def untied(state_dict: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Contiguous tensors that share no memory, and for each name left out the name of the same tensor."""
    apart: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    memory: set[int] = set()
    for name, tensor in state_dict.items():
        where = tensor.untyped_storage().data_ptr()
        key = (where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            tied[name] = first[key]
            continue
        first[key] = name
        plain = tensor.detach().contiguous()
        apart[name] = plain.clone() if tensor.numel() and where in memory else plain
        memory.add(where)
    return apart, tied
