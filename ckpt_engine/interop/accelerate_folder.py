"""Folders of Accelerate's `save_state`, written for `accelerator.load_state`, and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.data import rng
from ckpt_engine.errors import CorruptError, ForeignError, MismatchError
from ckpt_engine.interop import safe_load, state_parts
from ckpt_engine.interop.safe_load import Advance, Imported, whole_number
from ckpt_engine.interop.state_parts import CUSTOM as CUSTOM_KEY
from ckpt_engine.interop.state_parts import LOADERS, StateParts
from ckpt_engine.interop.state_parts import STREAMS as STREAMS_KEY

MODEL, MODEL_TORCH = "model.safetensors", "pytorch_model.bin"
OPTIMIZER, SCHEDULER = "optimizer.bin", "scheduler.bin"
LOADER, CUSTOM, SCALER = "dl_state_dict.bin", "custom_checkpoint_{}.pkl", "scaler.pt"
STREAMS = "random_states_{}.pkl"


def numbered(name: str, index: int) -> str:
    """Accelerate's name of the file of object number `index`: `model.safetensors`, `model_1.safetensors`, ..."""
    stem, dot, suffix = name.partition(".")
    return name if index == 0 else f"{stem}_{index}{dot}{suffix}"


def require(parts: StateParts, snapshot: str) -> None:
    """Refuse a snapshot without weights.

    Raises:
        MismatchError: it has nothing that has the form of a module's state dict.
    """
    if not parts.models:
        raise MismatchError(
            f"{snapshot} has no weights: nothing in it has the form of a module's state dict",
            hint="--to torch or --to dcp exports the whole state as it is",
        )


def write(parts: StateParts, step: int, folder: Path) -> tuple[str, ...]:
    """Write the files into `folder`, which exists; returns notes on what is there and what is not."""
    notes = [f"taken as {parts.sources()}"]
    for index, state_dict in enumerate(parts.models.values()):
        notes += state_parts.write(state_dict, folder, numbered(MODEL, index), numbered(MODEL_TORCH, index))
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
        legacy = state_parts.to_legacy(parts.streams)
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


def _missing(parts: StateParts) -> Iterator[str]:
    if not parts.optimizers:
        yield "no optimizer state in the snapshot: load_state fails where an optimizer was prepared"
    if not parts.schedulers:
        yield "no scheduler state in the snapshot: load_state fails where a scheduler was prepared"
    if parts.streams is None:
        yield "no random streams in the snapshot: load_state leaves them as they are"
    if not parts.loaders:
        yield "no data position: Accelerate's files have one of stateful loaders only; skip_first_batches skips by hand"


def read(folder: Path, advance: Advance) -> Imported:
    """A folder that `save_state` has written, from one process.

    Raises:
        MismatchError: it was sharded by FSDP, DeepSpeed or Megatron.
        ForeignError: it has no weights.
        UnstorableLeafError, CorruptError, StorageError: a file cannot be read.
    """
    notes = []
    models = _each(lambda i: state_parts.read(folder, numbered(MODEL, i), numbered(MODEL_TORCH, i), advance))
    if not models:
        raise ForeignError(f"{folder} has no {MODEL} and no {MODEL_TORCH}")
    state: dict[str, Any] = {}
    for key, found in (
        ("model", models),
        ("optimizer", _each(partial(_optional, folder, partial(numbered, OPTIMIZER), advance))),
        ("scheduler", _each(partial(_optional, folder, partial(numbered, SCHEDULER), advance))),
    ):
        state |= {numbered(key, index): one for index, one in enumerate(found)}
    custom = _each(partial(_optional, folder, CUSTOM.format, advance))
    state |= {f"{CUSTOM_KEY}{index}": one for index, one in enumerate(custom)}
    state[LOADERS] = _each(partial(_optional, folder, partial(numbered, LOADER), advance))
    if (scaler := _optional(folder, str, advance, SCALER)) is not None:
        state["scaler"] = scaler
    recorded = _optional(folder, STREAMS.format, advance, 0)
    step = None
    if isinstance(recorded, dict):
        step = _step(whole_number(recorded.get("step")), state)
        state[STREAMS_KEY] = _recorded(folder / STREAMS.format(0), recorded)
    else:
        notes.append("it has no random streams")
    if (folder / STREAMS.format(1)).exists():
        notes.append("it is of several processes: the random streams of the first one are kept")
    if (folder / "sampler.bin").exists():
        notes.append("sampler.bin left out: it is a pickled object; Accelerate makes its sampler again from the seed")
    return Imported("accelerate", state, step, None, tuple(notes))


def _step(recorded: int | None, state: dict[str, Any]) -> int | None:
    """The step of the run; None: it is not known.

    Accelerate counts the batches of `accumulate`, from 0 in each epoch, and nothing where that is not used. So a count
    of 0, or one below that of an optimizer, is not the run's.
    """
    optimizers = [one for key, one in state.items() if key.startswith("optimizer") and isinstance(one, dict)]
    counts = [
        int(one["step"])
        for optimizer in optimizers
        for one in optimizer.get("state", {}).values()
        if isinstance(one, dict) and isinstance(one.get("step"), int | float | torch.Tensor)
    ]
    return None if not recorded or recorded < max(counts, default=0) else recorded


def _each(read_one: Callable[[int], Any]) -> list[Any]:
    """Objects number 0, 1, ... up to the first that is not there."""
    return list(takewhile(lambda found: found is not None, map(read_one, count())))


def _optional(folder: Path, name: Callable[[Any], str], advance: Advance, which: Any) -> Any:
    file = folder / name(which)
    if not file.exists():
        return None
    value = safe_load.load(file).value
    advance(file.stat().st_size)
    return value


def _recorded(file: Path, recorded: dict[str, Any]) -> rng.RngState:
    try:
        return state_parts.from_legacy(
            state_parts.Legacy(
                recorded["random_state"],
                recorded["numpy_random_seed"],
                recorded["torch_manual_seed"],
                tuple(recorded.get("torch_cuda_manual_seed") or ()),
            )
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as err:
        raise CorruptError(f"{file} has no random streams: {err}") from err
