"""Files of `torch.save`, Lightning's `.ckpt` among them, as what they hold of a training."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ckpt_engine.errors import ForeignError, MismatchError
from ckpt_engine.interop.imported import Advance, Imported, of_state, whole_number
from ckpt_engine.interop.safe_load import Where, load
from ckpt_engine.store.manifest import Manifest, SnapshotInfo

VERSION_KEY = "pytorch-lightning_version"
_NEEDED = ("state_dict", VERSION_KEY)
_HPARAMS = ("hyper_parameters", "datamodule_hyper_parameters")
_HPARAMS_TYPES = ("hparams_type", "datamodule_hparams_type")


def why_not_weights_only(path: Path) -> str | None:
    """Why `torch.load(weights_only=True)` refuses the file, or None if it takes it."""
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as err:
        lines = [line.strip() for line in str(err).splitlines()]
        return next((line for line in lines if "GLOBAL" in line), lines[0])
    return None


def write_torch_file(state: Any, _: SnapshotInfo, file: BinaryIO) -> tuple[str, ...]:
    """Write any state; there is nothing to note."""
    torch.save(state, file)
    return ()


def read_torch_file(path: Path, advance: Advance) -> Imported:
    """A file of `torch.save` with any state.

    Raises:
        UnstorableLeafError, ForeignError, StorageError: as `safe_load.load`.
    """
    value = load(path, advance).value
    return of_state("torch", (value if isinstance(value, dict) else {"state": value}))


def require_lightning(manifest: Manifest) -> None:
    """Refuse what Lightning could not load.

    Raises:
        MismatchError: the snapshot was not taken by the Lightning adapter.
    """
    if missing := [key for key in _NEEDED if key not in manifest.tree]:
        raise MismatchError(
            f"{manifest.info.id} is not of a Lightning run: it has no {' and no '.join(map(repr, missing))}",
            hint="--to torch exports its whole state, --to safetensors its tensors",
        )


def read_lightning_file(path: Path, advance: Advance) -> Imported:
    """A file that Lightning has written.

    Its hyper-parameters may hold any object. Lightning does not need them to resume: those that are not loaded are
    left out.

    Raises:
        UnstorableLeafError: another part holds a class that is not loaded; names it.
        ForeignError: not a Lightning checkpoint.
        StorageError: it cannot be read.
    """
    opened = load(path, advance, _is_hyper_parameter)
    if not isinstance((state := opened.value), dict) or any(key not in state for key in _NEEDED):
        raise ForeignError(f"{path} is not a Lightning checkpoint", hint="--as torch imports any file of torch.save")
    lacks = (
        "it has no random streams and no data position: a run resumed from it is not exact from here on"
        if state.get("optimizer_states")
        else "it has weights only: fit(ckpt_path='auto') cannot resume from it"
    )
    notes = [lacks, *(f"{where} left out: {name} is not loaded" for where, name in opened.left_out.items())]
    kept = {key: value for key, value in state.items() if key not in _HPARAMS_TYPES}
    step, epoch = whole_number(state.get("global_step")), whole_number(state.get("epoch"))
    return Imported("lightning", kept, step, epoch, tuple(notes))


def _is_hyper_parameter(where: Where) -> bool:
    return (len(where) > 1 and where[0] in _HPARAMS) or where[:1] in [(key,) for key in _HPARAMS_TYPES]
