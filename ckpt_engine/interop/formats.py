"""The formats of other programs under one signature: recognise, read, refuse and write them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt_engine.errors import (
    CkptError,
    ForeignError,
    MismatchError,
    StorageMissingError,
)
from ckpt_engine.interop import FOLDERS, accelerate_folders, folder_files, safe_load, torch_files, trainer_folders
from ckpt_engine.interop.dcp_folders import METADATA, check_dcp, read_dcp, write_dcp
from ckpt_engine.interop.imported import Advance, Imported
from ckpt_engine.store import names
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.storage.disk import translated

Check = Callable[[Any, SnapshotInfo], None]
"""Raises MismatchError if a state cannot become this format; the tensors' values do not matter."""
Writer = Callable[[Any, SnapshotInfo, Any], tuple[str, ...]]
"""Writes a state into an open file, or the path of an empty folder; returns notes."""
Reader = Callable[[Path, Advance], Imported]
_MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, pickle.PicklingError)
"""What the writers of others raise for values that they do not take."""


CHECKS: dict[str, Check] = {
    "dcp": check_dcp,
    "accelerate": accelerate_folders.check_accelerate,
    "transformers": trainer_folders.check_transformers,
}
WRITERS: dict[str, Writer] = {
    "lightning": torch_files.write_torch_file,
    "torch": torch_files.write_torch_file,
    "dcp": write_dcp,
    "accelerate": accelerate_folders.write_accelerate,
    "transformers": trainer_folders.write_transformers,
}
FORMATS: dict[str, Reader] = {
    "lightning": torch_files.read_lightning_file,
    "torch": torch_files.read_torch_file,
    "dcp": read_dcp,
    "accelerate": accelerate_folders.read_accelerate,
    "transformers": trainer_folders.read_transformers,
}


@contextmanager
def fitting(form: str, snapshot: str) -> Iterator[None]:
    """Runs a check or a writer; what it cannot take is said in our words.

    Raises:
        MismatchError: a state that can be stored need not be one that others can store.
    """
    try:
        yield
    except CkptError:
        raise
    except _MISFITS as err:
        raise MismatchError(
            f"the state of {snapshot} cannot become {form}: {type(err).__name__}: {err}",
            hint="--to safetensors exports its tensors",
        ) from err


def read(path: Path, form: str | None, advance: Advance) -> Imported:
    """Read `path` as `form`, or as what it is if that is None.

    Raises:
        StorageMissingError: there is nothing of that name.
        ForeignError: it is nothing of what can be read, or not of `form`.
        MismatchError: it is known, and cannot be imported; says what to do instead.
        UnstorableLeafError: it holds objects that are not loaded; names them.
        CorruptError, StorageError: it cannot be read.
    """
    if not path.exists():
        raise StorageMissingError(
            f"{path} does not exist", hint="check the path: it is relative to the working directory"
        )
    if form is not None and path.is_dir() != (form in FOLDERS):
        kind, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise ForeignError(f"{path} is a {kind}; --as {form} reads a {wanted}")
    try:
        return FORMATS[form or (_folder_form(path) if path.is_dir() else _file_form(path))](path, advance)
    except OSError as err:
        raise translated(err, "read", str(err.filename or path)) from err


def nbytes(path: Path) -> int:
    """Bytes that reading it takes, about."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def _folder_form(path: Path) -> str:
    if names.RECORD in (there := {child.name for child in path.iterdir()}):
        raise MismatchError(f"{path} is a run of ckpt-engine already", hint="`ckpt cp` copies it")
    if METADATA in there:
        return "dcp"
    sharded = [name for name in sorted(there) if name.startswith(("pytorch_model_fsdp", "optimizer_0", "mp_rank_"))]
    if inner := [name for name in sharded if (path / name / METADATA).exists()]:
        raise MismatchError(
            f"{path} was sharded by FSDP: {', '.join(inner)}",
            hint=f"import its parts: ckpt import {path / inner[0]} ...",
        )
    if sharded or "zero_to_fp32.py" in there:
        raise MismatchError(
            f"{path} was sharded by DeepSpeed or FSDP, whose files only their own programs put together",
            hint="put it together first: `python zero_to_fp32.py`, `accelerate merge-weights`; then import the result",
        )
    if trainer_folders.STATE_FILE in there:
        return "transformers"
    marks = {folder_files.MODEL, folder_files.MODEL_TORCH, accelerate_folders.OPTIMIZER}
    if there & (marks | {accelerate_folders.STREAMS_FILE.format(0), f"{folder_files.MODEL}.index.json"}):
        return "accelerate"
    numbered = sorted((name for name in there if name.startswith("checkpoint")), key=lambda name: (len(name), name))
    hint = f"name one of its folders, for example {path / numbered[-1]}" if numbered else "name the kind with --as"
    raise ForeignError(f"{path} is no checkpoint folder of Accelerate, transformers or dcp", hint=hint)


def _file_form(path: Path) -> str:
    if path.suffix == ".safetensors":
        raise MismatchError(
            f"{path} has weights only, and a training state has more",
            hint="weights need no import: safetensors.torch.load_file reads them into a model",
        )
    if not safe_load.is_zip(path):
        return "torch"  # of an old torch, or nothing: its reader tells
    state = safe_load.load(path, may_lose=lambda _: True).value
    return "lightning" if isinstance(state, dict) and torch_files.VERSION_KEY in state else "torch"
