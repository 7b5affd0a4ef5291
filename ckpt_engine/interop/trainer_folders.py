"""The `checkpoint-N` folders of transformers' Trainer, written for it and for `from_pretrained`, and read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.errors import ForeignError, MismatchError
from ckpt_engine.interop import safe_load, weight_files
from ckpt_engine.interop.folder_files import (
    FIRST_STREAMS,
    MODEL,
    MODEL_TORCH,
    NO_STREAMS,
    SCALER,
    optional,
    recorded_streams,
)
from ckpt_engine.interop.imported import Advance, Imported, whole_number
from ckpt_engine.interop.legacy_streams import to_legacy
from ckpt_engine.interop.state_parts import FILES, STREAMS, TRAINER_STATE, is_kept_file, recognise
from ckpt_engine.store.json_checks import reading
from ckpt_engine.store.manifest import SnapshotInfo

CONFIG = "config.json"
_STATES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": SCALER}
_WITHOUT = {
    "optimizers": "no optimizer state in the snapshot: the Trainer resumes with a fresh one",
    "schedulers": "no scheduler state in the snapshot: the Trainer resumes with a fresh one",
    "streams": "no random streams in the snapshot: the Trainer leaves them as they are",
}
"""What it means for the Trainer that a snapshot lacks one of its `StateParts`."""
STREAMS_FILE = "rng_state.pth"
_TRAINER_STREAMS = ("python", "numpy", "cpu", "cuda")
STATE_FILE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
_SWITCHES: dict[str, Any] = {"TrainerControl": {"args": {}, "attributes": {}}}


def check_transformers(state: Any, info: SnapshotInfo) -> None:
    """Refuse a snapshot that is not of a transformers model.

    Raises:
        MismatchError: it has no weights, several models, or no configuration of the model.
    """
    if len((parts := recognise(state)).models) != 1:
        raise MismatchError(
            f"{info.id} cannot become a transformers checkpoint, which has one model; it has: "
            f"{', '.join(parts.models) or 'none'}",
            hint="--to accelerate exports several models, --only one of them",
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
    notes += weight_files.write(next(iter(parts.models.values())), folder, MODEL, MODEL_TORCH)
    for name, data in parts.files.items():
        (folder / name).write_bytes(data)
    if parts.trainer_state is None:
        return (*notes, "no state of a Trainer in the snapshot: this is for from_pretrained, and not for resuming")
    states = (parts.optimizers, parts.schedulers, parts.scalers)
    for name, found in zip(_STATES.values(), states, strict=True):
        for one in list(found.values())[:1]:
            torch.save(one, folder / name)
    if parts.streams is not None:
        write_streams(parts.streams, folder)
    notes += [note for part, note in _WITHOUT.items() if not getattr(parts, part)]
    # A Trainer that resumes counts on an entry for its own switches when it saves next.
    callbacks = {**_SWITCHES, **(parts.trainer_state.get("stateful_callbacks") or {})}
    text = json.dumps({**parts.trainer_state, "stateful_callbacks": callbacks}, indent=2, sort_keys=True)
    (folder / STATE_FILE).write_text(text + "\n")
    return tuple(notes)


def write_streams(recorded: Mapping[str, Any], folder: Path) -> None:
    """Write the file of random streams that a Trainer reads right before its first step.

    Raises:
        MismatchError: as `to_legacy`.
    """
    *streams, cuda = to_legacy(recorded)
    torch.save(dict(zip(_TRAINER_STREAMS, [*streams, *cuda[:1]], strict=False)), folder / STREAMS_FILE)


def read_transformers(folder: Path, advance: Advance) -> Imported:
    """A `checkpoint-N` folder of a Trainer that ran in one process.

    Raises:
        MismatchError: it has an adapter (PEFT) instead of a whole model.
        ForeignError: it has no weights, or no state of a Trainer.
        UnstorableLeafError, CorruptError, StorageError: a file cannot be read.
    """
    model = weight_files.read(folder, MODEL, MODEL_TORCH, advance)
    if model is None and next(folder.glob("adapter_model.*"), None) is not None:
        raise MismatchError(
            f"{folder} has an adapter and not the whole model",
            hint="merge it (PeftModel.merge_and_unload) and save that, or resume with the Trainer alone",
        )
    if model is None:
        raise ForeignError(f"{folder} has no {MODEL} and no {MODEL_TORCH}")
    with reading(f"{folder / STATE_FILE} is not the state of a Trainer"):
        trainer_state = json.loads((folder / STATE_FILE).read_bytes())
        step, epoch = whole_number(trainer_state["global_step"]), whole_number((trainer_state.get("epoch") or 0) // 1)
    states = {key: optional(folder, advance, name) for key, name in _STATES.items()}
    state: dict[str, Any] = {"model": model, **{key: one for key, one in states.items() if one is not None}}
    files = (folder / STREAMS_FILE, folder / "rng_state_0.pth")
    if (recorded := next((one for one in files if one.exists()), None)) is not None:
        state[STREAMS] = recorded_streams(recorded, safe_load.load(recorded, advance).value, _TRAINER_STREAMS)
    notes = {
        "no optimizer in the folder": "optimizer" not in state,
        "no scheduler in the folder": "scheduler" not in state,
        NO_STREAMS: STREAMS not in state,
        FIRST_STREAMS: recorded == files[1],
        f"{ARGUMENTS} left out: it is a pickled object, and resuming does not read it": (folder / ARGUMENTS).exists(),
    }
    state[TRAINER_STATE] = trainer_state
    known = [path for path in sorted(folder.iterdir()) if path.is_file() and is_kept_file(path.name)]
    # An index of weights is not kept: these are one file again when exported.
    kept = [path for path in known if path.name != STATE_FILE and not path.name.endswith(".index.json")]
    state[FILES] = {path.name: path.read_bytes() for path in kept}
    # What grows with the run, and what is put back by other means, is in the state only.
    about = {TRAINER_STATE: {**trainer_state, "log_history": [], "stateful_callbacks": {}}}
    found = tuple(note for note, applies in notes.items() if applies)
    return Imported("transformers", state, step, epoch, found, about)
