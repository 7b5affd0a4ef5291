"""Folders of Accelerate's `save_state`, and `checkpoint-N` folders of transformers' Trainer: written for these programs
to go on with (the latter also for `from_pretrained`), and read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
from ckpt_engine.interop.state_parts import FILES, LOADERS, is_kept_file, recognise
from ckpt_engine.interop.state_parts import STREAMS as STREAMS_KEY
from ckpt_engine.interop.state_parts import TRAINER_STATE as TRAINER_STATE_KEY
from ckpt_engine.store.manifest import SnapshotInfo

MODEL, MODEL_TORCH = "model.safetensors", "pytorch_model.bin"
SCALER = "scaler.pt"

# ---- Accelerate

OPTIMIZER, SCHEDULER = "optimizer.bin", "scheduler.bin"
LOADER, CUSTOM = "dl_state_dict.bin", "custom_checkpoint_{}.pkl"
STREAMS = "random_states_{}.pkl"
_STREAMS = ("random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed")


_WITHOUT = {
    "optimizers": "no optimizer state in the snapshot: load_state fails where an optimizer was prepared",
    "schedulers": "no scheduler state in the snapshot: load_state fails where a scheduler was prepared",
    "streams": "no random streams in the snapshot: load_state leaves them as they are",
    "loaders": "no data position: Accelerate's files have one of stateful loaders only; "
    "skip_first_batches skips by hand",
}
"""What it means for Accelerate that a snapshot lacks one of its `StateParts`."""


def numbered(name: str, index: int) -> str:
    """Accelerate's name of the file of object number `index`: `model.safetensors`, `model_1.safetensors`, ..."""
    stem, dot, suffix = name.partition(".")
    return name if index == 0 else f"{stem}_{index}{dot}{suffix}"


def check_accelerate(state: Any, info: SnapshotInfo) -> None:
    """Refuse a snapshot without weights.

    Raises:
        MismatchError: it has nothing that has the form of a module's state dict.
    """
    if not recognise(state).models:
        raise MismatchError(
            f"{info.id} has no weights: nothing in it has the form of a module's state dict",
            hint="--to torch or --to dcp exports the whole state as it is",
        )


def write_accelerate(state: Any, info: SnapshotInfo, folder: Path) -> tuple[str, ...]:
    """Write the files into `folder`, which exists; returns notes on what is there and what is not."""
    parts = recognise(state)
    notes = [f"taken as {parts.sources()}"]
    for index, state_dict in enumerate(parts.models.values()):
        notes += state_parts.write(state_dict, folder, numbered(MODEL, index), numbered(MODEL_TORCH, index))
    optimizers, schedulers = parts.optimizers.values(), parts.schedulers.values()
    for name, states in ((OPTIMIZER, optimizers), (SCHEDULER, schedulers), (LOADER, parts.loaders)):
        for index, one in enumerate(states):
            torch.save(one, folder / numbered(name, index))
    for index, one in enumerate(parts.custom):
        torch.save(one, folder / CUSTOM.format(index))
    for one in list(parts.scalers.values())[:1]:
        torch.save(one, folder / SCALER)
    if parts.streams is not None:
        found: dict[str, Any] = dict(zip(_STREAMS, state_parts.to_legacy(parts.streams), strict=True))
        if not found[_STREAMS[3]]:
            del found[_STREAMS[3]]
        torch.save({"step": info.step, **found}, folder / STREAMS.format(0))
    return (*notes, *(note for part, note in _WITHOUT.items() if not getattr(parts, part)))


def read_accelerate(folder: Path, advance: Advance) -> Imported:
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
    there = partial(_optional, folder, advance)
    state: dict[str, Any] = {}
    for key, found in (
        ("model", models),
        ("optimizer", _each(lambda i: there(numbered(OPTIMIZER, i)))),
        ("scheduler", _each(lambda i: there(numbered(SCHEDULER, i)))),
    ):
        state |= {numbered(key, index): one for index, one in enumerate(found)}
    if "optimizer" not in state:
        notes.append("no optimizer in the folder")
    custom = _each(lambda i: there(CUSTOM.format(i)))
    state |= {f"{CUSTOM_KEY}{index}": one for index, one in enumerate(custom)}
    state[LOADERS] = _each(lambda i: there(numbered(LOADER, i)))
    if (scaler := there(SCALER)) is not None:
        state["scaler"] = scaler
    recorded = there(STREAMS.format(0))
    step = None
    if isinstance(recorded, dict):
        step = _step(whole_number(recorded.get("step")), state)
        state[STREAMS_KEY] = _recorded(folder / STREAMS.format(0), recorded, _STREAMS)
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


# ---- transformers

CONFIG = "config.json"
_STATES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": SCALER}
TRAINER_STREAMS = "rng_state.pth"
_TRAINER_STREAMS = ("python", "numpy", "cpu", "cuda")
TRAINER_STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
_SWITCHES: dict[str, Any] = {"TrainerControl": {"args": {}, "attributes": {}}}


def check_transformers(state: Any, info: SnapshotInfo) -> None:
    """Refuse a snapshot that is not of a transformers model.

    Raises:
        MismatchError: it has no weights, several models, or no configuration of the model.
    """
    parts = recognise(state)
    if len(parts.models) != 1:
        found = ", ".join(parts.models) or "none"
        raise MismatchError(
            f"{info.id} cannot become a transformers checkpoint, which has one model; it has: {found}",
            hint="--to accelerate exports several models, --to safetensors --component one of them",
        )
    if CONFIG not in parts.files:
        raise MismatchError(
            f"{info.id} has no model configuration ({CONFIG}), without which transformers cannot make the model",
            hint="--to safetensors exports the weights for a model that you make yourself; --to accelerate all states",
        )


def write_transformers(state: Any, _: SnapshotInfo, folder: Path) -> tuple[str, ...]:
    """Write the files into `folder`, which exists; returns notes on what is there and what is not."""
    parts = recognise(state)
    notes = [f"taken as {parts.sources()}"]
    notes += state_parts.write(next(iter(parts.models.values())), folder, MODEL, MODEL_TORCH)
    for name, data in parts.files.items():
        (folder / name).write_bytes(data)
    if parts.trainer_state is None:
        return (*notes, "no state of a Trainer in the snapshot: this is for from_pretrained, and not for resuming")
    states = (parts.optimizers, parts.schedulers, parts.scalers)
    for (kind, name), found in zip(_STATES.items(), states, strict=True):
        for one in list(found.values())[:1]:
            torch.save(one, folder / name)
        if not found and kind != "scaler":
            notes.append(f"no {kind} state in the snapshot: the Trainer resumes with a fresh one")
    if parts.streams is not None:
        write_streams(parts.streams, folder)
    else:
        notes.append("no random streams in the snapshot: the Trainer leaves them as they are")
    # A Trainer that resumes counts on an entry for its own switches when it saves next.
    callbacks = {**_SWITCHES, **(parts.trainer_state.get("stateful_callbacks") or {})}
    text = json.dumps({**parts.trainer_state, "stateful_callbacks": callbacks}, indent=2, sort_keys=True)
    (folder / TRAINER_STATE).write_text(text + "\n")
    return tuple(notes)


def write_streams(recorded: Mapping[str, Any], folder: Path) -> None:
    """Write the file of random streams that a Trainer reads right before its first step.

    Raises:
        MismatchError: as `state_parts.to_legacy`.
    """
    *streams, cuda = state_parts.to_legacy(recorded)
    torch.save(dict(zip(_TRAINER_STREAMS, [*streams, *cuda[:1]], strict=False)), folder / TRAINER_STREAMS)


def read_transformers(folder: Path, advance: Advance) -> Imported:
    """A `checkpoint-N` folder of a Trainer that ran in one process.

    Raises:
        MismatchError: it has an adapter (PEFT) instead of a whole model.
        ForeignError: it has no weights, or no state of a Trainer.
        UnstorableLeafError, CorruptError, StorageError: a file cannot be read.
    """
    model = state_parts.read(folder, MODEL, MODEL_TORCH, advance)
    if model is None and next(folder.glob("adapter_model.*"), None) is not None:
        raise MismatchError(
            f"{folder} has an adapter and not the whole model",
            hint="merge it (PeftModel.merge_and_unload) and save that, or go on with the Trainer's own resume",
        )
    if model is None:
        raise ForeignError(f"{folder} has no {MODEL} and no {MODEL_TORCH}")
    try:
        trainer_state = json.loads((folder / TRAINER_STATE).read_bytes())
        step, epoch = whole_number(trainer_state["global_step"]), whole_number((trainer_state.get("epoch") or 0) // 1)
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CorruptError(f"{folder / TRAINER_STATE} is not the state of a Trainer: {err}") from err
    state: dict[str, Any] = {"model": model}
    for key, name in _STATES.items():
        if (found := _optional(folder, advance, name)) is not None:
            state[key] = found
    notes = [f"no {key} in the folder" for key in ("optimizer", "scheduler") if key not in state]
    names = (TRAINER_STREAMS, "rng_state_0.pth")
    if (recorded := next((folder / name for name in names if (folder / name).exists()), None)) is None:
        notes.append("it has no random streams")
    else:
        state[STREAMS_KEY] = _recorded(recorded, safe_load.load(recorded, advance).value, _TRAINER_STREAMS)
        if recorded.name != TRAINER_STREAMS:
            notes.append("it is of several processes: the random streams of the first one are kept")
    state[TRAINER_STATE_KEY] = trainer_state
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and is_kept_file(path.name)]
    # An index of weights is not kept: these are one file again when exported.
    kept = [path for path in files if path.name != TRAINER_STATE and not path.name.endswith(".index.json")]
    state[FILES] = {path.name: path.read_bytes() for path in kept}
    if (folder / ARGUMENTS).exists():
        notes.append(f"{ARGUMENTS} left out: it is a pickled object, and resuming does not read it")
    # What grows with the run, and what is put back by other means, is in the state only.
    about = {TRAINER_STATE_KEY: {**trainer_state, "log_history": [], "stateful_callbacks": {}}}
    return Imported("transformers", state, step, epoch, tuple(notes), about)


# ---- both


def _optional(folder: Path, advance: Advance, name: str) -> Any:
    """What a file of torch.save has; None: it is not there."""
    file = folder / name
    if not file.exists():
        return None
    return safe_load.load(file, advance).value


def _recorded(file: Path, recorded: Any, keys: tuple[str, str, str, str]) -> rng.RngState:
    """The random streams that a file has under these keys; the last one is of the devices, and may be missing."""
    try:
        cuda = recorded.get(keys[3])
        devices = () if cuda is None else tuple(cuda) if isinstance(cuda, list | tuple) else (cuda,)
        python, numpy, cpu = (recorded[key] for key in keys[:3])
        return state_parts.from_legacy((python, numpy, cpu, devices))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as err:
        raise CorruptError(f"{file} has no random streams: {err}") from err
