"""Files of weights, kept as `safetensors.torch.save_model` does: tied tensors once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ckpt_engine.errors import CorruptError, StorageMissingError
from ckpt_engine.grouping import grouped
from ckpt_engine.interop import safe_load
from ckpt_engine.interop.imported import Advance
from ckpt_engine.store.container import DTYPES
from ckpt_engine.store.json_checks import reading


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
    full = {name: tensor for name, tensor in state_dict.items() if tensor.numel()}
    same = {
        name: (one.untyped_storage().data_ptr(), one.storage_offset(), one.shape, one.stride(), one.dtype)
        for name, one in full.items()
    }
    names = grouped((key, name) for name, key in same.items())
    tied = {name: names[key][0] for name, key in same.items() if names[key][0] != name}
    apart = {name: one.detach().contiguous() for name, one in state_dict.items() if name not in tied}
    in_memory = grouped((same[name][0], name) for name in full if name not in tied)
    for name in (one for _, *others in in_memory.values() for one in others):
        apart[name] = apart[name].clone()
    return apart, tied


def read(folder: Path, name: str, torch_name: str, advance: Advance) -> dict[str, Any] | None:
    """The weights that lie in `folder` under either name, whole or in parts with an index; None if there are none.

    Raises:
        CorruptError: a file is damaged.
        StorageMissingError: the index names a file that is not there.
        UnstorableLeafError, ForeignError: as `safe_load.load`.
    """
    for one, reader in ((name, _read_safetensors), (torch_name, _read_torch)):
        if files := _parts(folder, one):
            return {key: value for file in files for key, value in reader(file, advance).items()}
    return None


def _parts(folder: Path, name: str) -> list[Path]:
    if (folder / name).exists():
        return [folder / name]
    if not (index := folder / f"{name}.index.json").exists():
        return []
    with reading(f"{index} is not an index of weights"):
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [folder / Path(one).name for one in names]
    for file in files:
        if not file.exists():
            raise StorageMissingError(f"{file}, a part of the weights, is missing")
    return files


def _read_safetensors(file: Path, advance: Advance) -> dict[str, Any]:
    try:
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
            tied = opened.metadata() or {}
    except SafetensorError as err:
        raise CorruptError(f"{file} is not a whole safetensors file: {err}") from err
    advance(file.stat().st_size)
    return tensors | {name: tensors[same] for name, same in tied.items() if same in tensors and name not in tensors}


def _read_torch(file: Path, advance: Advance) -> dict[str, Any]:
    if not isinstance((value := safe_load.load(file, advance).value), dict):
        raise CorruptError(f"{file} holds a {type(value).__name__} instead of weights by name")
    return value
