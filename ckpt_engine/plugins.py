"""The storages and codecs of other packages, found by the names of entry points."""

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
