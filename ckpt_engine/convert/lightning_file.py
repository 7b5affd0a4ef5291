"""Lightning's `.ckpt` files: what a snapshot needs to become one, and how one is read."""

from __future__ import annotations

from pathlib import Path

from ckpt_engine.convert import safe_load
from ckpt_engine.convert.imported import Advance, Imported, whole_number
from ckpt_engine.errors import ForeignError, MismatchError
from ckpt_engine.store.manifest import Manifest

VERSION_KEY = "pytorch-lightning_version"
_NEEDED = ("state_dict", VERSION_KEY)
_HPARAMS = ("hyper_parameters", "datamodule_hyper_parameters")
_HPARAMS_TYPES = ("hparams_type", "datamodule_hparams_type")


def require_lightning(manifest: Manifest) -> None:
    """Refuse what Lightning could not load.

    Raises:
        MismatchError: the snapshot was not taken by the Lightning adapter.
    """
    missing = [key for key in _NEEDED if key not in manifest.tree]
    if missing:
        raise MismatchError(
            f"{manifest.info.id} is not of a Lightning run: it has no {' and no '.join(map(repr, missing))}",
            hint="--to torch exports its whole state, --to safetensors its tensors",
        )


def read(path: Path, advance: Advance) -> Imported:
    """A file that Lightning has written.

    Its hyper-parameters may hold any object. Lightning does not need them to resume: those that are not loaded are
    left out.

    Raises:
        UnstorableLeafError: another part holds a class that is not loaded; names it.
        ForeignError: not a Lightning checkpoint.
        StorageError: it cannot be read.
    """
    opened = safe_load.load(path, _is_hyper_parameter)
    state = opened.value
    if not isinstance(state, dict) or any(key not in state for key in _NEEDED):
        raise ForeignError(f"{path} is not a Lightning checkpoint", hint="--as torch imports any file of torch.save")
    advance(path.stat().st_size)
    if not state.get("optimizer_states"):
        notes = ["it has weights only: fit(ckpt_path='auto') cannot resume from it"]
    else:
        notes = ["it has no random streams and no data position: a run resumed from it is not exact from here on"]
    notes += [f"{where} left out: {name} is not loaded" for where, name in opened.left_out.items()]
    kept = {key: value for key, value in state.items() if key not in _HPARAMS_TYPES}
    return Imported("lightning", kept, whole_number(state["global_step"]), whole_number(state["epoch"]), tuple(notes))


def _is_hyper_parameter(where: safe_load.Where) -> bool:
    return (len(where) > 1 and where[0] in _HPARAMS) or where[:1] in [(key,) for key in _HPARAMS_TYPES]
