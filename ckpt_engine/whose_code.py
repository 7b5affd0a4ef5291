"""Tells the user's code from that of libraries."""

from __future__ import annotations

import csv
import functools
import os
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_OURS = frozenset({"ckpt_engine", "lightning_ckpt", "accelerate_ckpt"})
_FRAMEWORKS = _OURS.union(
    ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "torchmetrics")
)
_LIBRARY_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def is_library(kind: type) -> bool:
    """Whether a class comes with an installed package: what begins with an underscore there is not the user's."""
    return is_library_file(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


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
    return is_framework_name(kind.__module__)


def is_framework_name(module: str) -> bool:
    """Whether a module is one of torch or of a trainer."""
    return module.partition(".")[0] in _FRAMEWORKS


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
