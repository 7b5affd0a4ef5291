"""What other packages bring: storages and codecs, by names of entry points, and code that is not the user's."""

from __future__ import annotations

import csv
import functools
import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, EntryPoint, distributions
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from ckpt_engine.errors import ConfigError

STORAGES = "ckpt_engine.storages"
"""By URL scheme: a callable with the URL and the options that returns a `Storage`.

The options are `storage_options` of the tier and the fields of `ObjectOptions`, which separates the two.
"""
CODECS = "ckpt_engine.codecs"
"""By codec name: a class without arguments that is a `Codec`."""
_MEMBERS = {STORAGES: ("__call__",), CODECS: ("__call__", "name", "needs_base", "encode", "decode")}
"""What each object of a group has."""
_OURS = frozenset({"ckpt_engine", "lightning_ckpt", "accelerate_ckpt"})
_FRAMEWORKS = _OURS.union(
    ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "torchmetrics")
)
_LIBRARY_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def plugin(group: str, name: str) -> Any:
    """The object that an installed package registers under this name.

    The name may come from a store. So only what an installer has recorded counts: a package whose files a store or the
    working folder holds is not imported.

    Args:
        group: of entry points: one of the constants of this module.

    Returns:
        The object, imported; None: no package registers that name.

    Raises:
        ConfigError: two packages register the name, or it cannot be imported, or it is something else.
    """
    found = _registered(group).get(name, {})
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError(
            f"{' and '.join(sorted(found))} both register {name!r} in {group}",
            hint="uninstall one of the two packages",
        )
    [(value, (entry, package))] = found.items()
    what = f"{value}, registered as {name!r} in {group},"
    try:
        origin = _origin_of(entry.module)
        if origin is not None and not _is_recorded(package, origin):
            raise ConfigError(f"{what} would be imported from {origin}", hint="its package was installed elsewhere")
        made = entry.load()
    except ConfigError:
        raise
    except Exception as err:
        raise ConfigError(
            f"{what} cannot be imported: {type(err).__name__}: {err}", hint="repair or uninstall the package"
        ) from err
    if lacking := [member for member in _MEMBERS[group] if not hasattr(made, member)]:
        raise ConfigError(f"{what} lacks {' and '.join(lacking)}", hint="repair or uninstall the package")
    return made


@functools.cache
def _registered(group: str) -> Mapping[str, Mapping[str, tuple[EntryPoint, Distribution]]]:
    """By name and by what it refers to, the entry points of installed packages; of two versions the first on the path.

    The working folder and the folder of the program are on the path without a decision of the user: they do not count.
    """
    program = getattr(sys.modules["__main__"], "__file__", None) or "."
    implied = {os.path.realpath("."), os.path.realpath(Path(program).parent)}
    folders = [one for one in sys.path if os.path.realpath(one) not in implied]
    packages: dict[str, Distribution] = {}
    for package in distributions(path=folders):
        packages.setdefault(package.name, package)
    found: dict[str, dict[str, tuple[EntryPoint, Distribution]]] = {}
    for package in packages.values():
        for entry in package.entry_points.select(group=group):
            found.setdefault(entry.name, {})[entry.value] = entry, package
    return found


def _origin_of(module: str) -> str | None:
    """The file that the outermost package of a module would be imported from; None: there is none. Runs no code."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        spec = find_spec(".".join(parts[:length]))
        if spec is None or spec.origin is not None:  # a namespace has none, and no code either
            return spec.origin if spec is not None else None
    return None


def _is_recorded(package: Distribution, origin: str) -> bool:
    """Whether an installer has recorded that a file belongs to a package, or is of the folder that is its source."""
    rows = csv.reader((package.read_text("RECORD") or "").splitlines())
    if any(os.path.normpath(str(package.locate_file(row[0]))) == os.path.normpath(origin) for row in rows if row):
        return True
    source = json.loads(package.read_text("direct_url.json") or "{}")
    is_editable = source.get("dir_info", {}).get("editable") is True
    return is_editable and Path(origin).is_relative_to(unquote(urlsplit(source["url"]).path))


# ---- whose code it is


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
