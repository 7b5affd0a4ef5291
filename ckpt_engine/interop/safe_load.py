"""Reads files of `torch.save` without running what is in them.

Where torch refuses a class, `load` reads the file once more with an inert stand-in for it, and says at which leaf it
is.
"""

from __future__ import annotations

import argparse
import errno
import io
import pathlib
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ckpt_engine.errors import CorruptError, ForeignError, StorageMissingError, UnstorableLeafError
from ckpt_engine.interop.file_bounds import ANOTHER_COPY, children, require_bounded, require_stored
from ckpt_engine.interop.imported import Advance
from ckpt_engine.observe import units
from ckpt_engine.store.storage.disk import translated

Where = tuple[Any, ...]
MayLose = Callable[[Where], bool]
"""Whether a part of the state that holds a refused class may be left out."""

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_UNPICKLER = re.compile(r"WeightsUnpickler error:(.*)")
_ZIP_BEGIN = b"PK\x03\x04"
_BEGIN_BYTES = 8
_SHOWN = 5
UNREADABLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    EOFError,
    MemoryError,
)
"""What reading nonsense raises."""
_SAVE_AGAIN = (
    "where you trust the file, load it with torch.load(weights_only=False), put plain data in that place "
    "(numbers, texts, dicts, tensors), and torch.save it again"
)


class Refused:
    """Stands for an object of a class that is not loaded; takes whatever a pickle hands it and keeps nothing."""

    name = ""

    def __new__(cls, *_: Any, **__: Any) -> Refused:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Keeps nothing."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a file holds.

    Args:
        left_out: paths of parts that had refused classes and that may be lost, with the class.
    """

    value: Any
    left_out: Mapping[str, str]


def load(path: Path, advance: Advance | None = None, may_lose: MayLose | None = None) -> Opened:
    """The content of a file of `torch.save`, on the CPU; its tensors stay in the file until they are used.

    Args:
        advance: follows what is read; without it only what is not in tensors is compared with the file's checksums.

    Raises:
        CorruptError: it is damaged.
        UnstorableLeafError: it holds classes that are not loaded; names them and their leaves.
        MismatchError: it is far larger than its file, written out.
        ForeignError: it is not a file of `torch.save`.
        StorageError: it cannot be read.
    """
    try:
        if zipped := is_zip(path):
            require_stored(path, path.stat().st_size, str(path), advance)
        elif advance is not None:
            advance(path.stat().st_size)
        return Opened(_load(path, mmap=zipped), {})
    except FileNotFoundError as err:
        raise StorageMissingError(
            f"{path} does not exist", hint="check the path: it is relative to the working directory"
        ) from err
    except OSError as err:
        if err.errno == errno.EINVAL:
            raise _foreign(path, err) from err  # of the place of a part
        raise translated(err, "read", str(path)) from err
    except UNREADABLE as err:
        return _second_look(path, zipped, err, may_lose)


def is_zip(path: Path) -> bool:
    """Whether it is a zip file, as torch writes it.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file, suppress(zipfile.BadZipFile):  # a damaged end can look like one volume of several
        return zipfile.is_zipfile(file)
    return False


def load_bytes(data: bytes, what: str) -> Any:
    """The content of bytes that `torch.save` has written; `what` is their name, for messages.

    Raises:
        UnstorableLeafError, ForeignError: as `load`.
    """
    try:
        if zipfile.is_zipfile(io.BytesIO(data)):
            require_stored(io.BytesIO(data), len(data), what, lambda _: None)
        found = _load(io.BytesIO(data), mmap=False)
        require_bounded(found, len(data), what)
    except UNREADABLE as err:
        if found := _GLOBAL.search(str(err)):
            raise UnstorableLeafError(f"{what} holds {found[1]}, which is not loaded", hint=_SAVE_AGAIN) from err
        raise CorruptError(f"{what} cannot be read: {_cause(err)}") from err
    return found


def _load(file: Path | IO[bytes], *, mmap: bool, more: list[Any] | None = None) -> Any:
    with torch.serialization.safe_globals([*_harmless(), *(more or ())]):
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    if isinstance(file, Path):
        require_bounded(found, file.stat().st_size, str(file))
    return found


def _second_look(path: Path, zipped: bool, error: Exception, may_lose: MayLose | None) -> Opened:
    if not zipped:
        if (found := _GLOBAL.search(str(error))) and isinstance(error, pickle.UnpicklingError):
            raise _refused(path, {}, [found[1]]) from error
        raise _foreign(path, error) from error
    try:
        with torch.serialization.safe_globals(_harmless()):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except UNREADABLE as err:
        raise _foreign(path, err) from err
    if not names:
        raise _foreign(path, error) from error
    stand_ins = [(type("Refused", (Refused,), {"name": name}), name) for name in names]
    try:
        value = _load(path, mmap=True, more=stand_ins)
    except UNREADABLE as err:  # torch never loads some modules (os, sys), whatever stands in for them
        raise _refused(path, {}, names) from err
    places = dict(_places(value, ()))
    kept = {where: name for where, name in places.items() if may_lose is None or not may_lose(where)}
    if kept or not places:
        raise _refused(path, kept, names) from error
    lost = {tuple(map(str, where[:2])): name for where, name in places.items()}
    return Opened(_without(value, set(lost), ()), {"/".join(where): name for where, name in lost.items()})


def _places(node: Any, where: Where) -> Iterator[tuple[Where, str]]:
    """Where stand-ins are."""
    if isinstance(node, Refused) or (isinstance(node, type) and issubclass(node, Refused)):
        yield where, node.name
    for key, child in children(node):
        yield from _places(child, (*where, key.name if isinstance(key, Refused) else key))


def _without(node: Any, lost: set[tuple[str, ...]], where: tuple[str, ...]) -> Any:
    """The first two levels of a state without some of their children."""
    if not isinstance(node, Mapping) or len(where) == 2:
        return node
    kept = {key: child for key, child in node.items() if (*where, str(key)) not in lost}
    if any(path[: len(where)] == where for path in lost):
        return {key: _without(child, lost, (*where, str(key))) for key, child in kept.items()}
    return node


def _refused(path: Path, places: Mapping[Where, str], names: list[str]) -> UnstorableLeafError:
    shown = [f"{name} at {'/'.join(map(str, where)) or '(root)'}" for where, name in places.items()] or names
    return UnstorableLeafError(
        f"{path} holds objects that are not loaded, because that can run code: {units.first(shown, _SHOWN)}",
        hint=_SAVE_AGAIN,
    )


def _foreign(path: Path, error: Exception) -> ForeignError:
    if path.stat().st_size == 0:
        return ForeignError(f"{path} is empty", hint=ANOTHER_COPY)
    if is_zip(path):
        return ForeignError(f"{path} is a zip file, and no whole one of torch.save: {_cause(error)}", hint=ANOTHER_COPY)
    with path.open("rb") as file:
        begin = file.read(_BEGIN_BYTES)
    if begin.startswith(_ZIP_BEGIN):
        return ForeignError(f"{path} is cut off: it begins as a zip file of torch.save does", hint=ANOTHER_COPY)
    return ForeignError(
        f"{path} is no file of torch.save: it begins with {begin!r}",
        hint="give a Lightning .ckpt, a file of torch.save, or a folder of save_state, Trainer (checkpoint-N) or dcp",
    )


def _cause(error: Exception) -> str:
    """What torch says about the file itself; its advice on `weights_only` does not help here."""
    text = str(error).strip()
    if (found := _UNPICKLER.search(text)) and found[1].strip():
        return found[1].strip()
    return text.splitlines()[0].partition(". ")[0] if text else type(error).__name__


@cache
def _harmless() -> list[Any]:
    """Classes whose construction runs nothing of the file's choice: arrays, paths, parsed arguments."""
    found: list[Any] = [np.ndarray, np.dtype, argparse.Namespace]
    found += {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"}
    for name, made in (("_reconstruct", np.empty(0)), ("scalar", np.float64(0))):
        function: Any = made.__reduce__()
        found += [(function[0], f"numpy.{core}.multiarray.{name}") for core in ("core", "_core")]
    paths = (pathlib.PosixPath, pathlib.PurePosixPath)
    return [
        *found,
        *((kind, f"{module}.{kind.__name__}") for kind in paths for module in ("pathlib", "pathlib._local")),
    ]
