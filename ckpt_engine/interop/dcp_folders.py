"""Folders of `torch.distributed.checkpoint`.

They are written, and read without unpickling anything but what the format is of.

torch's own reader unpickles `.metadata` and every value that is no tensor. Here `.metadata` may name the classes of the
format only, and values are read with `weights_only`.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt_engine.errors import (
    CkptError,
    CorruptError,
    ForeignError,
    MismatchError,
    StorageMissingError,
    UnstorableLeafError,
)
from ckpt_engine.interop import safe_load
from ckpt_engine.interop.dcp_container import put_at
from ckpt_engine.interop.file_bounds import require_honest
from ckpt_engine.interop.imported import Advance, Imported, of_state
from ckpt_engine.interop.state_parts import is_optimizer
from ckpt_engine.store.manifest import SnapshotInfo

METADATA = ".metadata"
MOST_READ = 4
"""Times that the bytes of a folder are read at most."""
_MADE_BY_PYTHON = 1 << 9
_OF_METADATA = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_OTHERS = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def check_dcp(state: Any, info: SnapshotInfo) -> None:
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise MismatchError(f"the state of {info.id} is no dict with text keys, as dcp needs it", hint="--to torch")


def write_dcp(state: Any, _: SnapshotInfo, folder: Path) -> tuple[str, ...]:
    """From this one process. Raises what a value does that cannot be pickled."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")
            save(state, storage_writer=filesystem.FileSystemWriter(folder, single_file_per_rank=True))
    except CheckpointException as err:  # no Exception: code that catches those does not see it
        cause = next((one[0] if isinstance(one, tuple) else one for one in err.failures.values()), err)
        if isinstance(cause, OSError | CkptError):
            raise cause from err
        raise TypeError(f"{type(cause).__name__}: {cause}") from err  # of the kinds that the caller says in our words
    return ("dcp writes keys that are no text as text, and leaves empty dicts out",)


def read_dcp(folder: Path, advance: Advance) -> Imported:
    """The whole state, shards put together.

    Raises:
        UnstorableLeafError: a value holds a class that is not loaded; names it.
        MismatchError: files of the folder are compressed or encrypted.
        ForeignError, CorruptError: it is not a checkpoint of this kind, or parts are damaged or missing.
        StorageError: it cannot be read.
    """
    described = _read_metadata(folder)
    try:
        reader = _Reader(folder, described.storage_data, advance)
        flat = {
            name: reader.tensor(name, item) if isinstance(item, metadata.TensorStorageMetadata) else reader.value(name)
            for name, item in described.state_dict_metadata.items()
        }
        return of_state("dcp", _nested(flat, described.planner_data))
    except CkptError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, MemoryError) as err:
        raise CorruptError(f"{folder / METADATA} does not fit the files beside it: {err}") from err


class _Reader:
    """Items of the data files by name."""

    def __init__(self, folder: Path, items: Mapping[Any, Any], advance: Advance) -> None:
        self._folder = folder
        # Its keys are of classes that were made for the file, and equal to no others.
        self._items = {metadata.MetadataIndex(one.fqn, one.offset): item for one, item in items.items()}
        self._advance = advance
        # Each stored item is of one name: read again and again, a small folder would take for ever.
        self._left_bytes = MOST_READ * sum(file.stat().st_size for file in folder.iterdir() if file.is_file())

    def value(self, name: str, chunk: torch.Size | None = None) -> Any:
        """A value that is no tensor, or the chunk of a tensor that begins there."""
        return safe_load.load_bytes(self._bytes(metadata.MetadataIndex(name, chunk)), f"{name} in {self._folder}")

    def tensor(self, name: str, item: Any) -> torch.Tensor:
        """A tensor, put together of its chunks."""
        if sum(math.prod(chunk.sizes) for chunk in item.chunks) != math.prod(item.size):
            raise CorruptError(f"{name} in {self._folder} is not whole: chunks are missing, or overlap")
        stored = sum(self._items[metadata.MetadataIndex(name, chunk.offsets)].length for chunk in item.chunks)
        if math.prod(item.size) * item.properties.dtype.itemsize > stored:
            raise CorruptError(f"{name} in {self._folder} is larger than what is stored of it")
        out = torch.empty(item.size, dtype=item.properties.dtype)
        for chunk in item.chunks:
            if not isinstance((found := self.value(name, chunk.offsets)), torch.Tensor) or found.shape != chunk.sizes:
                raise CorruptError(f"{name} in {self._folder} has a chunk of another form than described")
            part = out
            for axis, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(axis, offset, size)
            part.copy_(found.detach())
        return out

    def _bytes(self, index: Any) -> bytes:
        item = self._items[index]
        if getattr(item, "transform_descriptors", None):
            raise MismatchError(
                f"{self._folder} is stored with {', '.join(item.transform_descriptors)}",
                hint="convert it with torch's own reader first (dcp_to_torch_save), then import that file",
            )
        file = self._folder / Path(item.relative_path).name  # names come from the file: not out of the folder
        try:
            with file.open("rb") as opened:
                if not 0 <= item.offset <= item.offset + item.length <= os.fstat(opened.fileno()).st_size:
                    raise CorruptError(f"{file} is cut off: {item.length} bytes from {item.offset} on are not there")
                self._left_bytes -= item.length
                if self._left_bytes < 0:
                    raise CorruptError(f"{self._folder / METADATA} names more bytes than the files beside it have")
                opened.seek(item.offset)
                data = opened.read(item.length)
        except FileNotFoundError as err:
            raise StorageMissingError(f"{file}, a part of the checkpoint, is missing") from err
        if len(data) != item.length:
            raise CorruptError(f"{file} became shorter while it was read")
        self._advance(len(data))
        return data


class _MetadataUnpickler(pickle.Unpickler):  # it takes only the classes named above
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._own: dict[type, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = self._allowed(module, name)
        if not isinstance(found, type) or issubclass(found, Enum) or not found.__flags__ & _MADE_BY_PYTHON:
            return found
        # A class of this file's own: a pickle can put attributes into the classes that it names.
        return self._own.setdefault(found, type(name, (found,), {"__module__": found.__module__}))

    def _allowed(self, module: str, name: str) -> Any:
        if module == metadata.__name__ and name in _OF_METADATA:
            return getattr(metadata, name)
        if module == "torch" and type(vars(torch).get(name)) is torch.dtype:  # getattr imports what is named
            return vars(torch)[name]
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        raise UnstorableLeafError(
            f"{METADATA} names {module}.{name}, which is no part of a checkpoint's description and is not loaded",
            hint="do not trust this folder",
        )


def _read_metadata(folder: Path) -> metadata.Metadata:
    file = folder / METADATA
    try:
        data = file.read_bytes()
        require_honest(data, str(file))
        found = _MetadataUnpickler(data).load()
    except FileNotFoundError as err:
        raise StorageMissingError(f"{file} does not exist") from err
    except (*safe_load.UNREADABLE, ImportError) as err:
        raise ForeignError(f"{file} does not describe a checkpoint: {type(err).__name__}: {err}") from err
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise ForeignError(f"{file} does not describe a checkpoint of torch.distributed.checkpoint")
    if any(not isinstance(item, filesystem._StorageInfo) for item in found.storage_data.values()):
        raise ForeignError(f"{folder} was not written by torch's FileSystemWriter")
    return found


def _nested(flat: Mapping[str, Any], paths: Any) -> dict[Any, Any]:
    """The state as it was before torch flattened it; text keys of optimizer states are numbers again."""
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        put_at(root, paths.get(name, (name,)) if isinstance(paths, Mapping) else (name,), value)
    return {key: _mended(node) for key, node in root.items()}


def _mended(node: Any) -> Any:
    """What dcp loses: lists have become dicts of numbers, keys of dicts texts, and an empty `state` is left out."""
    if not isinstance(node, dict):
        return node
    if (found := {key: _mended(child) for key, child in node.items()}) and all(isinstance(key, int) for key in found):
        return [found[key] for key in sorted(found)]
    if "param_groups" in found and "state" not in found:
        found = {"state": {}, **found}
    is_numbered = is_optimizer(found) and all(str(key).isdecimal() for key in found["state"])
    return {**found, "state": {int(key): value for key, value in found["state"].items()}} if is_numbered else found
