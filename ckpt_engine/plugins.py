"""What other packages bring under a name of their entry points: storages and codecs."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from ckpt_engine.errors import ConfigError

STORAGES = "ckpt_engine.storages"
"""By URL scheme: a callable with the URL and the options that returns a `Storage`.

The options are `storage_options` of the tier and the fields of `ObjectOptions`, which separates the two.
"""
CODECS = "ckpt_engine.codecs"
"""By codec name: a class without arguments that is a `Codec`."""


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
