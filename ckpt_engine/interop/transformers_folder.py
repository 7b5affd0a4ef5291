"""`checkpoint-N` folders of transformers' Trainer, written (also for `from_pretrained`) and read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.data import rng
from ckpt_engine.errors import CorruptError, ForeignError, MismatchError
from ckpt_engine.interop import safe_load, state_parts
from ckpt_engine.interop.safe_load import Advance, Imported, whole_number
from ckpt_engine.interop.state_parts import FILES, StateParts, is_kept_file
from ckpt_engine.interop.state_parts import STREAMS as STREAMS_KEY
from ckpt_engine.interop.state_parts import TRAINER_STATE as TRAINER_STATE_KEY

MODEL, MODEL_TORCH, CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"
OPTIMIZER, SCHEDULER, SCALER, STREAMS = "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"
TRAINER_STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
_SWITCHES: dict[str, Any] = {"TrainerControl": {"args": {}, "attributes": {}}}


def require(parts: StateParts, snapshot: str) -> None:
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


def write(parts: StateParts, folder: Path) -> tuple[str, ...]:
    """Write the files into `folder`, which exists; returns notes on what is there and what is not."""
    notes = [f"taken as {parts.sources()}"]
    notes += state_parts.write(next(iter(parts.models.values())), folder, MODEL, MODEL_TORCH)
    for name, data in parts.files.items():
        (folder / name).write_bytes(data)
    if parts.trainer_state is None:
        return (*notes, "no state of a Trainer in the snapshot: this is for from_pretrained, and not for resuming")
    for name, states in ((OPTIMIZER, parts.optimizers), (SCHEDULER, parts.schedulers), (SCALER, parts.scalers)):
        for state in list(states.values())[:1]:
            torch.save(state, folder / name)
    if parts.streams is not None:
        write_streams(parts.streams, folder)
    # A Trainer that resumes counts on an entry for its own switches when it saves next.
    callbacks = {**_SWITCHES, **(parts.trainer_state.get("stateful_callbacks") or {})}
    text = json.dumps({**parts.trainer_state, "stateful_callbacks": callbacks}, indent=2, sort_keys=True)
    (folder / TRAINER_STATE).write_text(text + "\n")
    return (*notes, *_missing(parts))


def write_streams(recorded: Mapping[str, Any], folder: Path) -> None:
    """Write the file of random streams that a Trainer reads right before its first step.

    Raises:
        MismatchError: as `state_parts.to_legacy`.
    """
    legacy = state_parts.to_legacy(recorded)
    state = {"python": legacy.python, "numpy": legacy.numpy, "cpu": legacy.cpu}
    torch.save({**state, "cuda": legacy.cuda[0]} if legacy.cuda else state, folder / STREAMS)


def _missing(parts: StateParts) -> Iterator[str]:
    for what, there in (("optimizer state", parts.optimizers), ("scheduler state", parts.schedulers)):
        if not there:
            yield f"no {what} in the snapshot: the Trainer resumes with a fresh one"
    if parts.streams is None:
        yield "no random streams in the snapshot: the Trainer leaves them as they are"


def read(folder: Path, advance: Advance) -> Imported:
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
    for key, name in (("optimizer", OPTIMIZER), ("scheduler", SCHEDULER), ("scaler", SCALER)):
        if (folder / name).exists():
            state[key] = safe_load.load(folder / name).value
            advance((folder / name).stat().st_size)
    notes = [f"no {key} in the folder" for key in ("optimizer", "scheduler") if key not in state]
    recorded = next((path for path in (folder / STREAMS, folder / "rng_state_0.pth") if path.exists()), None)
    if recorded is None:
        notes.append("it has no random streams")
    else:
        state[STREAMS_KEY] = _recorded(recorded)
        if recorded.name != STREAMS:
            notes.append("it is of several processes: the random streams of the first one are kept")
    state[TRAINER_STATE_KEY] = trainer_state
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and is_kept_file(path.name)]
    state[FILES] = {path.name: path.read_bytes() for path in files if path.name != TRAINER_STATE and _is_no_index(path)}
    if (folder / ARGUMENTS).exists():
        notes.append(f"{ARGUMENTS} left out: it is a pickled object, and resuming does not read it")
    # What grows with the run, and what is put back by other means, is in the state only.
    about = {TRAINER_STATE_KEY: {**trainer_state, "log_history": [], "stateful_callbacks": {}}}
    return Imported("transformers", state, step, epoch, tuple(notes), about)


def _is_no_index(path: Path) -> bool:
    """Not an index of weights, which are one file again when exported."""
    return not path.name.endswith(".index.json")


def _recorded(file: Path) -> rng.RngState:
    recorded = safe_load.load(file).value
    try:
        cuda = recorded.get("cuda")
        devices = () if cuda is None else tuple(cuda) if isinstance(cuda, list | tuple) else (cuda,)
        return state_parts.from_legacy(
            state_parts.Legacy(recorded["python"], recorded["numpy"], recorded["cpu"], devices)
        )
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as err:
        raise CorruptError(f"{file} has no random streams: {err}") from err
