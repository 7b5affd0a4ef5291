"""What other packages bring: storages and codecs, by names of entry points, and code that is not the user's."""

from __future__ import annotations

import csv
import functools
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ckpt_engine.errors import ConfigError

STORAGES = "ckpt_engine.storages"
"""By URL scheme: a callable with the URL and the options that returns a `Storage`.

The options are `storage_options` of the tier and the fields of `ObjectOptions`, which separates the two.
"""
CODECS = "ckpt_engine.codecs"
"""By codec name: a class without arguments that is a `Codec`."""
_OURS = frozenset({"ckpt_engine", "lightning_ckpt", "accelerate_ckpt"})
_FRAMEWORKS = _OURS.union(
    ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "torchmetrics")
)
_LIBRARY_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def plugin(group: str, name: str) -> Any:
    """The object that an installed package registers under this name.

    Args:
        group: of entry points: one of the constants of this module.

    Returns:
        The object, imported; None: no package registers that name.

    Raises:
        ConfigError: two packages register the name, or it cannot be imported.
    """
    found = sorted({one.value: one for one in entry_points(group=group, name=name)}.items())
    if not found:
        return None
    if len(found) > 1:
        both = " and ".join(value for value, _ in found)
        raise ConfigError(f"{both} both register {name!r} in {group}", hint="uninstall one of the two packages")
    value, entry = found[0]
    try:
        return entry.load()
    except Exception as err:
        raise ConfigError(
            f"{value}, registered as {name!r} in {group}, cannot be imported: {type(err).__name__}: {err}",
            hint="repair or uninstall the package",
        ) from err


# ---- whose code it is


def is_library(kind: type) -> bool:
    """Whether a class comes with an installed package: what begins with an underscore there is not the user's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return is_library_file(file)


@functools.cache
def is_library_file(file: str) -> bool:
    """Whether a file, or the folder of a package, belongs to an installed package that is not itself the program.

    Pip may have installed into a project's own folder, too: there its records name the files of the packages.
    """
    if file.startswith(_program()):
        return False
    if any(folder in file for folder in _LIBRARY_FOLDERS):
        return True
    folders = dict.fromkeys(map(os.path.abspath, sys.path))
    return any(file in _installed_into(one) for one in folders if file.startswith(f"{one}{os.sep}"))


@functools.cache
def _installed_into(folder: str) -> frozenset[str]:
    """Files that pip's records in this folder name, and the folders of the packages among them."""
    found = set[str]()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with record.open(newline="", encoding="utf-8", errors="replace") as file:
            found.update(f"{folder}/{row[0]}" for row in csv.reader(file) if row)
    return frozenset(found.union(one.removesuffix("/__init__.py") for one in found))


@functools.cache
def _program() -> tuple[str, ...]:
    """Where the package lies that this process runs, by `python -m` or as a command, if it is one that trains."""
    main = sys.modules["__main__"]
    names = {main.__spec__.name} if main.__spec__ is not None else set[str]()
    if Path(getattr(main, "__file__", None) or "").parent == Path(sys.executable).parent:
        names = {one.__module__ for one in vars(main).values() if isinstance(one, FunctionType)}
    packages = {name.partition(".")[0] for name in names} - _FRAMEWORKS
    found = [main, *(one for name, one in tuple(sys.modules.items()) if name.partition(".")[0] in packages)]
    if not any(_origin(value) in _FRAMEWORKS for one in found for value in tuple(vars(one).values())):
        return ()
    files = [getattr(sys.modules.get(name), "__file__", None) for name in packages]
    return tuple(one.removesuffix("__init__.py") for one in files if one)


def _origin(value: Any) -> str:
    """The package that a value of a module was imported from."""
    kind = type(value)
    name = value.__name__ if kind is ModuleType else value.__module__ if kind in (type, FunctionType) else ""
    return str(name).partition(".")[0]


def of_framework(kind: type) -> bool:
    """Whether a class is one of torch or of a trainer."""
    return kind.__module__.partition(".")[0] in _FRAMEWORKS


def of_us(kind: type) -> bool:
    """Whether a class is one of this package and its adapters."""
    return kind.__module__.partition(".")[0] in _OURS


def is_standard(kind: type) -> bool:
    """Whether a class comes with Python."""
    return is_standard_name(kind.__module__)


def is_standard_name(module: str) -> bool:
    """Whether the module of this name comes with Python."""
    return module.partition(".")[0] in sys.stdlib_module_names and module != "__main__"


def is_function_of_user(function: FunctionType) -> bool:
    """Whether a function is neither Python's, nor of torch, a trainer or another package."""
    module, file = function.__module__ or "", function.__code__.co_filename
    known = is_standard_name(module) or module.partition(".")[0] in _FRAMEWORKS
    return not known and not is_library_file(file)
