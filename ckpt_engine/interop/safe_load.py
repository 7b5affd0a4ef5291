"""Files of `torch.save`, Lightning's `.ckpt` among them: write them, and read them without running what is in them.

Where torch refuses a class, `load` reads the file once more with an inert stand-in for it, and says at which leaf it
is. Pickles share what is in them: thirty lists that each contain the one before twice are a few hundred bytes, and a
thousand million values to code that walks through them. So `require_bounded`, `require_stored` and `require_honest`
refuse what is larger than its file accounts for. `Imported` is what was read, before it becomes a snapshot.
"""

from __future__ import annotations

import argparse
import errno
import io
import pathlib
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ckpt_engine.errors import CorruptError, ForeignError, MismatchError, StorageMissingError, UnstorableLeafError
from ckpt_engine.observe import units
from ckpt_engine.state.flatten import MAX_DEPTH
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.storage.disk import translated

Where = tuple[Any, ...]
MayLose = Callable[[Where], bool]
"""Whether a part of the state that holds a refused class may be left out."""

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_UNPICKLER = re.compile(r"WeightsUnpickler error:(.*)")
_ZIP_BEGIN = b"PK\x03\x04"
_BEGIN_BYTES = 8
_SHOWN = 5
_CHUNK_BYTES = 1 << 20
_FOLDER = 0x10
"""torch reads nothing of what a zip file says to be one, and gives memory as it finds it."""
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
_ANOTHER_COPY = "it is damaged or was not written to its end: take another copy, or an older checkpoint"


class Refused:
    """Stands for an object of a class that is not loaded; takes whatever a pickle hands it and keeps nothing."""

    name = ""

    def __new__(cls, *_: Any, **__: Any) -> Refused:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Keeps nothing."""

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
        with path.open("rb") as file:
            file.read(1)
        zipped = is_zip(path)
        if zipped:
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
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # a damaged end can look like one volume of several
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
    with torch.serialization.safe_globals([*_HARMLESS, *(more or ())]):
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    if isinstance(file, Path):
        require_bounded(found, file.stat().st_size, str(file))
    return found


def _second_look(path: Path, zipped: bool, error: Exception, may_lose: MayLose | None) -> Opened:
    if not zipped:
        found = _GLOBAL.search(str(error))
        if found and isinstance(error, pickle.UnpicklingError):
            raise _refused(path, {}, [found[1]]) from error
        raise _foreign(path, error) from error
    try:
        with torch.serialization.safe_globals(_HARMLESS):
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
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _places(key, (*where, "(key)"))
            yield from _places(child, (*where, key if not isinstance(key, Refused) else key.name))
    elif isinstance(node, list | tuple | set | frozenset):
        for index, child in enumerate(node):
            yield from _places(child, (*where, index))
    elif isinstance(node, argparse.Namespace):
        yield from _places(vars(node), where)


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
        return ForeignError(f"{path} is empty", hint=_ANOTHER_COPY)
    if is_zip(path):
        return ForeignError(
            f"{path} is a zip file, and no whole one of torch.save: {_cause(error)}", hint=_ANOTHER_COPY
        )
    with path.open("rb") as file:
        begin = file.read(_BEGIN_BYTES)
    if begin.startswith(_ZIP_BEGIN):
        return ForeignError(f"{path} is cut off: it begins as a zip file of torch.save does", hint=_ANOTHER_COPY)
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


def _harmless() -> list[Any]:
    """Classes whose construction runs nothing of the file's choice: arrays, paths, parsed arguments."""
    found: list[Any] = [np.ndarray, np.dtype, argparse.Namespace]
    found += {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"}
    for name, made in (("_reconstruct", np.empty(0)), ("scalar", np.float64(0))):
        function: Any = made.__reduce__()
        found += [(function[0], f"numpy.{core}.multiarray.{name}") for core in ("core", "_core")]
    for name in ("PosixPath", "PurePosixPath"):
        found += [(getattr(pathlib, name), f"{module}.{name}") for module in ("pathlib", "pathlib._local")]
    return found


_HARMLESS = _harmless()


MOST_TIMES = 64
"""What is read, written out, has at most so many times the bytes of its file,"""
FREE_BYTES = 64 << 20
"""and so many more."""
_FREE_VALUES = 200_000
_NUMBERS = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"})
_MEMO = frozenset({"PUT", "LONG_BINPUT"})


def require_bounded(value: Any, nbytes: int, what: str) -> None:
    """Refuse a value that is far larger than `nbytes` bytes of a pickle are without sharing.

    Raises:
        MismatchError: says in which way.
    """
    left: list[tuple[Any, int]] = [(value, 1)]
    values, most_values = 0, _FREE_VALUES + MOST_TIMES * min(nbytes, FREE_BYTES)
    written, most_bytes = 0, FREE_BYTES + MOST_TIMES * nbytes
    seen: set[int] = set()
    while left:
        one, depth = left.pop()
        values += 1
        if isinstance(one, torch.Tensor | np.ndarray):
            if id(one) not in seen:
                seen.add(id(one))
                written += _nbytes(one)
        elif isinstance(one, str | bytes | bytearray):
            written += len(one)
        else:
            left += [(child, depth + 1) for child in _children(one)]
        if depth > MAX_DEPTH:
            raise MismatchError(f"{what} is nested deeper than {MAX_DEPTH} levels, or contains itself")
        if values > most_values or written > most_bytes:
            raise MismatchError(
                f"{what} has {nbytes:,} bytes, and what is in it would have more than {MOST_TIMES} times as many: its "
                "parts are shared, or repeat their elements",
                hint="do not trust it; if you have made it yourself, save it again with copies of what is shared",
            )


def _children(one: Any) -> Iterable[Any]:
    if isinstance(one, Mapping):
        return [*one.keys(), *one.values(), *([one._metadata] if hasattr(one, "_metadata") else [])]
    if isinstance(one, list | tuple | set | frozenset):
        return one
    return vars(one).values() if isinstance(one, argparse.Namespace) else ()


def _nbytes(array: Any) -> int:
    """What an array takes when it is written; of one whose elements are there, nothing that the file does not have."""
    if isinstance(array, np.ndarray):
        return int(array.nbytes)
    if array.layout is not torch.strided or array.device.type == "meta":
        return 0  # refused where it is stored
    nbytes = int(array.numel()) * array.element_size()
    return nbytes if nbytes > array.untyped_storage().nbytes() else 0


def require_stored(file: Path | IO[bytes], size: int, what: str, advance: Advance | None = None) -> None:
    """Refuse a zip file that is compressed, as torch compresses nothing, or damaged; without `advance` see `load`.

    Raises:
        CorruptError
    """
    with zipfile.ZipFile(file) as opened:
        parts = opened.infolist()
        nbytes = sum(one.file_size for one in parts)
        if nbytes > size or any(one.compress_type or one.external_attr & _FOLDER for one in parts):
            raise CorruptError(f"{what} is compressed, or its parts overlap: {nbytes:,} bytes in a file of {size:,}")
        try:
            for one in parts:
                if one.CRC == 0:
                    del one.CRC  # torch writes none after set_crc32_options(False)
                if one.filename.endswith("data.pkl"):
                    require_honest(opened.read(one), what)
                elif advance is not None:
                    with opened.open(one) as part:
                        while data := part.read(_CHUNK_BYTES):
                            advance(len(data))
        except (zipfile.BadZipFile, EOFError) as err:
            raise CorruptError(f"{what} is damaged: {err}", hint=_ANOTHER_COPY) from err


def require_honest(pickle: bytes, what: str) -> None:
    """Refuse a pickle that makes its reader reserve room for far more than it has.

    Raises:
        CorruptError
    """
    makes_room = b"bytearray" in pickle
    try:
        for code, argument, _ in pickletools.genops(pickle):
            number = isinstance(argument, int) and argument > len(pickle)
            if (number and (code.name in _MEMO or (makes_room and code.name in _NUMBERS))) or code.name == "BYTEARRAY8":
                raise CorruptError(f"{what} asks for room for {argument} bytes, more than it has")
    except ValueError as err:
        raise CorruptError(f"{what} is no whole pickle: {err}") from err


_STEP_KEYS = ("global_step", "step")


def why_not_weights_only(path: Path) -> str | None:
    """Why `torch.load(weights_only=True)` refuses the file, or None if it takes it."""
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as err:
        lines = [line.strip() for line in str(err).splitlines()]
        return next((line for line in lines if "GLOBAL" in line), lines[0])
    return None


def read_torch_file(path: Path, advance: Advance) -> Imported:
    """A file of `torch.save` with any state.

    Raises:
        UnstorableLeafError, ForeignError, StorageError: as `safe_load.load`.
    """
    value = load(path, advance).value
    state = value if isinstance(value, dict) else {"state": value}
    return of_state("torch", state)


def of_state(form: str, state: dict[Any, Any]) -> Imported:
    """A state of no known layout; its step and epoch are taken from keys of that name."""
    steps = (whole_number(state.get(key)) for key in _STEP_KEYS)
    step = next((number for number in steps if number is not None), None)
    return Imported(form, state, step, whole_number(state.get("epoch")))


Advance = Callable[[int], object]
"""Gets the bytes that were read."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A state and what is known about it.

    Args:
        form: what it was: lightning, torch, dcp, accelerate, transformers.
        state: as it will be saved.
        step, epoch: as the source says, or None.
        notes: sentences for people: what was left out and why.
        about: JSON values that the manifest keeps, to be read before the snapshot is loaded.
    """

    form: str
    state: Mapping[str, Any]
    step: int | None
    epoch: int | None
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)


def whole_number(value: Any) -> int | None:
    """A counter as a source stores it, or None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 0:
        return None
    return int(value)


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
    state = opened.value
    if not isinstance(state, dict) or any(key not in state for key in _NEEDED):
        raise ForeignError(f"{path} is not a Lightning checkpoint", hint="--as torch imports any file of torch.save")
    if not state.get("optimizer_states"):
        notes = ["it has weights only: fit(ckpt_path='auto') cannot resume from it"]
    else:
        notes = ["it has no random streams and no data position: a run resumed from it is not exact from here on"]
    notes += [f"{where} left out: {name} is not loaded" for where, name in opened.left_out.items()]
    kept = {key: value for key, value in state.items() if key not in _HPARAMS_TYPES}
    step, epoch = whole_number(state.get("global_step")), whole_number(state.get("epoch"))
    return Imported("lightning", kept, step, epoch, tuple(notes))


def _is_hyper_parameter(where: Where) -> bool:
    return (len(where) > 1 and where[0] in _HPARAMS) or where[:1] in [(key,) for key in _HPARAMS_TYPES]
