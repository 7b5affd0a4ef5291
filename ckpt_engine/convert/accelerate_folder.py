"""A snapshot as a folder of Accelerate's `save_state`, for `accelerator.load_state`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ckpt_engine.convert import model_file, streams
from ckpt_engine.convert.parts import Parts
from ckpt_engine.errors import MismatchError

MODEL, MODEL_TORCH = "model.safetensors", "pytorch_model.bin"
OPTIMIZER, SCHEDULER = "optimizer.bin", "scheduler.bin"
LOADER, CUSTOM, SCALER = "dl_state_dict.bin", "custom_checkpoint_{}.pkl", "scaler.pt"
STREAMS = "random_states_{}.pkl"


def numbered(name: str, index: int) -> str:
    """Accelerate's name of the file of object number `index`: `model.safetensors`, `model_1.safetensors`, ..."""
    stem, dot, suffix = name.partition(".")
    return name if index == 0 else f"{stem}_{index}{dot}{suffix}"


def require(parts: Parts, snapshot: str) -> None:
    """Refuse a snapshot without weights.

    Raises:
        MismatchError: it has nothing that has the form of a module's state dict.
    """
    if not parts.models:
        raise MismatchError(
            f"{snapshot} has no weights: nothing in it has the form of a module's state dict",
            hint="--to torch or --to dcp exports the whole state as it is",
        )


def write(parts: Parts, step: int, folder: Path) -> tuple[str, ...]:
    """Write the files into `folder`, which exists; returns notes on what is there and what is not."""
    notes = [f"taken as {parts.sources()}"]
    for index, state_dict in enumerate(parts.models.values()):
        notes += model_file.write(state_dict, folder, numbered(MODEL, index), numbered(MODEL_TORCH, index))
    for name, states in ((OPTIMIZER, parts.optimizers), (SCHEDULER, parts.schedulers)):
        for index, state in enumerate(states.values()):
            torch.save(state, folder / numbered(name, index))
    for index, state in enumerate(parts.custom):
        torch.save(state, folder / CUSTOM.format(index))
    for index, state in enumerate(parts.loaders):
        torch.save(state, folder / numbered(LOADER, index))
    for state in list(parts.scalers.values())[:1]:
        torch.save(state, folder / SCALER)
    if parts.streams is not None:
        legacy = streams.to_legacy(parts.streams)
        torch.save(
            {
                "step": step,
                "random_state": legacy.python,
                "numpy_random_seed": legacy.numpy,
                "torch_manual_seed": legacy.cpu,
                **({"torch_cuda_manual_seed": list(legacy.cuda)} if legacy.cuda else {}),
            },
            folder / STREAMS.format(0),
        )
    return (*notes, *_missing(parts))


def _missing(parts: Parts) -> Iterator[str]:
    if not parts.optimizers:
        yield "no optimizer state in the snapshot: load_state fails where an optimizer was prepared"
    if not parts.schedulers:
        yield "no scheduler state in the snapshot: load_state fails where a scheduler was prepared"
    if parts.streams is None:
        yield "no random streams in the snapshot: load_state leaves them as they are"
    if not parts.loaders:
        yield "no data position: Accelerate's files have one of stateful loaders only; skip_first_batches skips by hand"
