"""Which foreign format a path is, and its reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpt_engine.convert import accelerate_folder, dcp_read, lightning_file, safe_load, torch_file, transformers_folder
from ckpt_engine.convert.imported import Advance, Imported
from ckpt_engine.errors import ForeignError, MismatchError, StorageMissingError
from ckpt_engine.store import layout

Reader = Callable[[Path, Advance], Imported]

FORMATS: dict[str, Reader] = {
    "lightning": lightning_file.read,
    "torch": torch_file.read,
    "dcp": dcp_read.read,
    "accelerate": accelerate_folder.read,
    "transformers": transformers_folder.read,
}
_FILES = ("lightning", "torch")


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
        raise StorageMissingError(f"{path} does not exist")
    if form is not None and path.is_dir() == (form in _FILES):
        kind, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise ForeignError(f"{path} is a {kind}; --as {form} reads a {wanted}")
    return FORMATS[form or (_folder_form(path) if path.is_dir() else _file_form(path))](path, advance)


def nbytes(path: Path) -> int:
    """Bytes that reading it takes, about."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _folder_form(path: Path) -> str:
    there = {child.name for child in path.iterdir()}
    if layout.RECORD in there:
        raise MismatchError(f"{path} is a run of ckpt-engine already", hint="`ckpt cp` copies it")
    if dcp_read.METADATA in there:
        return "dcp"
    sharded = [name for name in sorted(there) if name.startswith(("pytorch_model_fsdp", "optimizer_0", "mp_rank_"))]
    inner = [name for name in sharded if (path / name / dcp_read.METADATA).exists()]
    if inner:
        raise MismatchError(
            f"{path} was sharded by FSDP: {', '.join(inner)}",
            hint=f"import its parts: ckpt import {path / inner[0]} ...",
        )
    if sharded or "zero_to_fp32.py" in there:
        raise MismatchError(
            f"{path} was sharded by DeepSpeed or FSDP, whose files only their own programs put together",
            hint="put it together first: `python zero_to_fp32.py`, `accelerate merge-weights`; then import the result",
        )
    if transformers_folder.TRAINER_STATE in there:
        return "transformers"
    marks = {accelerate_folder.MODEL, accelerate_folder.MODEL_TORCH, accelerate_folder.OPTIMIZER}
    if there & (marks | {accelerate_folder.STREAMS.format(0), f"{accelerate_folder.MODEL}.index.json"}):
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
    state = safe_load.load(path, lambda _: True).value
    lightning = isinstance(state, dict) and lightning_file.VERSION_KEY in state
    return "lightning" if lightning else "torch"
