"""A snapshot as a `checkpoint-N` folder of transformers' Trainer, also for `from_pretrained`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.convert import model_file, streams
from ckpt_engine.convert.parts import Parts
from ckpt_engine.errors import MismatchError

MODEL, MODEL_TORCH, CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"
OPTIMIZER, SCHEDULER, SCALER, STREAMS = "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"
TRAINER_STATE = "trainer_state.json"


def require(parts: Parts, snapshot: str) -> None:
    """Refuse a snapshot that is not of a transformers model.

    Raises:
        MismatchError: it has no weights, several models, or no configuration of the model.
    """
    if len(parts.models) != 1:
        found = ", ".join(parts.models) or "none"
        raise MismatchError(
            f"{snapshot} cannot become a transformers checkpoint, which has one model; it has: {found}",
            hint="--to accelerate exports several models, --to safetensors --component one of them",
        )
    if CONFIG not in parts.files:
        raise MismatchError(
            f"{snapshot} has no model configuration ({CONFIG}), without which transformers cannot make the model",
            hint="--to safetensors exports the weights for a model that you make yourself; --to accelerate all states",
        )


def write(parts: Parts, step: int, epoch: int | None, folder: Path) -> tuple[str, ...]:
    """Write the files into `folder`, which exists; returns notes on what is there and what is not."""
    notes = [f"taken as {parts.sources()}"]
    notes += model_file.write(next(iter(parts.models.values())), folder, MODEL, MODEL_TORCH)
    for name, states in ((OPTIMIZER, parts.optimizers), (SCHEDULER, parts.schedulers), (SCALER, parts.scalers)):
        for state in list(states.values())[:1]:
            torch.save(state, folder / name)
    if parts.streams is not None:
        torch.save(_streams(parts.streams), folder / STREAMS)
    state = parts.trainer_state or {"global_step": step, "epoch": float(epoch or 0)}
    (folder / TRAINER_STATE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    for name, data in parts.files.items():
        (folder / name).write_bytes(data)
    return (*notes, *_missing(parts))


def _streams(recorded: Mapping[str, Any]) -> dict[str, Any]:
    legacy = streams.to_legacy(recorded)
    state = {"python": legacy.python, "numpy": legacy.numpy, "cpu": legacy.cpu}
    return {**state, "cuda": legacy.cuda[0]} if legacy.cuda else state


def _missing(parts: Parts) -> Iterator[str]:
    for what, there in (("optimizer state", parts.optimizers), ("scheduler state", parts.schedulers)):
        if not there:
            yield f"no {what} in the snapshot: the Trainer resumes with a fresh one"
    if parts.trainer_state is None:
        yield "no state of a Trainer in the snapshot: its log history and the states of callbacks are empty"
    if parts.streams is None:
        yield "no random streams in the snapshot: the Trainer leaves them as they are"
