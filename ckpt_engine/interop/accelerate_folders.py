"""The folders of Accelerate's `save_state`.

They are written for `load_state`, and read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.errors import ForeignError, MismatchError
from ckpt_engine.interop import weight_files
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
from ckpt_engine.interop.state_parts import CUSTOM, LOADERS, STREAMS, recognise
from ckpt_engine.store.manifest import SnapshotInfo

OPTIMIZER, SCHEDULER = "optimizer.bin", "scheduler.bin"
LOADER, CUSTOM_FILE = "dl_state_dict.bin", "custom_checkpoint_{}.pkl"
STREAMS_FILE = "random_states_{}.pkl"
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
        notes += weight_files.write(state_dict, folder, numbered(MODEL, index), numbered(MODEL_TORCH, index))
    optimizers, schedulers = parts.optimizers.values(), parts.schedulers.values()
    files: dict[str, Any] = {
        numbered(name, index): one
        for name, states in ((OPTIMIZER, optimizers), (SCHEDULER, schedulers), (LOADER, parts.loaders))
        for index, one in enumerate(states)
    }
    files |= {CUSTOM_FILE.format(index): one for index, one in enumerate(parts.custom)}
    files |= dict(zip((SCALER,), parts.scalers.values(), strict=False))
    if parts.streams is not None:
        *streams, cuda = to_legacy(parts.streams)
        found = dict(zip(_STREAMS, [*streams, *([cuda] if cuda else [])], strict=False))
        files[STREAMS_FILE.format(0)] = {"step": info.step, **found}
    for name, one in files.items():
        torch.save(one, folder / name)
    return (*notes, *(note for part, note in _WITHOUT.items() if not getattr(parts, part)))


def read_accelerate(folder: Path, advance: Advance) -> Imported:
    """A folder that `save_state` has written, from one process.

    Raises:
        MismatchError: it was sharded by FSDP, DeepSpeed or Megatron.
        ForeignError: it has no weights.
        UnstorableLeafError, CorruptError, StorageError: a file cannot be read.
    """
    models = _each(lambda i: weight_files.read(folder, numbered(MODEL, i), numbered(MODEL_TORCH, i), advance))
    if not models:
        raise ForeignError(f"{folder} has no {MODEL} and no {MODEL_TORCH}")
    there = partial(optional, folder, advance)
    parts = {
        "model": models,
        "optimizer": _each(lambda i: there(numbered(OPTIMIZER, i))),
        "scheduler": _each(lambda i: there(numbered(SCHEDULER, i))),
    }
    state: dict[str, Any] = {numbered(key, i): one for key, found in parts.items() for i, one in enumerate(found)}
    custom = _each(lambda i: there(CUSTOM_FILE.format(i)))
    state |= {f"{CUSTOM}{index}": one for index, one in enumerate(custom)}
    state[LOADERS] = _each(lambda i: there(numbered(LOADER, i)))
    if (scaler := there(SCALER)) is not None:
        state["scaler"] = scaler
    recorded, step = there(STREAMS_FILE.format(0)), None
    if isinstance(recorded, dict):
        step = _step(whole_number(recorded.get("step")), state)
        state[STREAMS] = recorded_streams(folder / STREAMS_FILE.format(0), recorded, _STREAMS)
    notes = {
        "no optimizer in the folder": "optimizer" not in state,
        NO_STREAMS: STREAMS not in state,
        FIRST_STREAMS: (folder / STREAMS_FILE.format(1)).exists(),
        "sampler.bin left out: it is a pickled object; Accelerate makes its sampler again from the seed": (
            folder / "sampler.bin"
        ).exists(),
    }
    return Imported("accelerate", state, step, None, tuple(note for note, applies in notes.items() if applies))


def _step(recorded: int | None, state: dict[str, Any]) -> int | None:
    """The step of the run; None: it is not known.

    Accelerate counts the batches of `accumulate`, from 0 in each epoch, and nothing where that is not used. So a count
    of 0, or one below that of an optimizer, is not the run's.
    """
    counts = [
        int(one["step"])
        for key, optimizer in state.items()
        if key.startswith("optimizer") and isinstance(optimizer, dict)
        for one in optimizer.get("state", {}).values()
        if isinstance(one, dict) and isinstance(one.get("step"), int | float | torch.Tensor)
    ]
    return None if not recorded or recorded < max(counts, default=0) else recorded


def _each(read_one: Callable[[int], Any]) -> list[Any]:
    """Objects number 0, 1, ... up to the first that is not there."""
    return list(takewhile(lambda found: found is not None, map(read_one, count())))
