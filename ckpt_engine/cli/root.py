"""What ROOT and the options of its storage on the command line mean."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from ckpt_engine.cli.output import say_waiting
from ckpt_engine.config import Config, load_config
from ckpt_engine.config.models import Tiers
from ckpt_engine.config.sections import Seal
from ckpt_engine.errors import ConfigError
from ckpt_engine.store.names import KEY_VARIABLE, RECORD
from ckpt_engine.tools.stored_run import Run, find_run

_GIVEN = "ckpt_engine.storage_options"
"""Where click's context keeps what the options of the storage say."""
_NAMED = "ckpt_engine.snapshots"
"""Where it keeps the snapshots that the argument of ROOT names."""
_SNAPSHOT = re.compile(r"latest|(step=)?\d+|\d{8}-[\w-]*")
_OPTIONS_FILE = "ckpt.yaml"


def find_root() -> str | None:
    """The ROOT of a command that names none: ./ckpt.yaml, this folder if it is a run, or $CKPT_ROOT."""
    here = _OPTIONS_FILE if Path(_OPTIONS_FILE).is_file() else "." if Path(RECORD).is_file() else None
    return here or os.environ.get("CKPT_ROOT")


def default_root() -> str:
    """As `find_root`.

    Raises:
        ConfigError: there is none.
    """
    if root := find_root():
        return root
    raise ConfigError(
        "no ROOT is given, and this folder has no ckpt.yaml and no run",
        hint="name the run's folder, its URL or its ckpt.yaml, or set CKPT_ROOT",
    )


def named(text: str | None) -> tuple[str, tuple[str, ...]]:
    """The root that ROOT, ROOT#SNAPSHOT, SNAPSHOT or nothing names, and the snapshot, if there is one.

    What exists as a path is a root, also with a `#` in its name. A `#` in a URL is written as %23.

    Raises:
        ConfigError: it has no root, and there is no default.
    """
    if not text or os.path.lexists(os.path.expanduser(os.path.expandvars(text))):  # noqa: PTH111 - as options do
        return text or default_root(), ()
    root, mark, snapshot = ("", "#", text) if _SNAPSHOT.fullmatch(text) else text.rpartition("#")
    return (root or default_root(), (snapshot,) if snapshot else ()) if mark else (text, ())


def root_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a verb the argument ROOT, or its default."""
    return click.argument("root", required=False, callback=lambda _ctx, _, value: value or default_root())(command)


def snapshot_arguments(
    metavar: str = "[SNAPSHOT]...", *, least: int = 0, most: int | None = None
) -> Callable[..., Any]:
    """Gives a verb the argument ROOT, or its default, and the snapshots that follow it or are named with it."""

    def take_root(ctx: click.Context, _: click.Parameter, value: str | None) -> str:
        root, ctx.meta[_NAMED] = named(value)
        return root

    def take(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
        found = (*ctx.meta.get(_NAMED, ()), *value)
        if most is not None and len(found) > most:
            raise click.UsageError(f"expected {metavar}, got {' '.join(found)}", ctx)
        if len(found) < least:
            raise click.MissingParameter(ctx=ctx, param=parameter)
        return found

    root = click.argument("root", required=False, callback=take_root)
    return lambda command: root(click.argument("snapshots", nargs=-1, metavar=metavar, callback=take)(command))


def _pairs(ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in values:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE", ctx, parameter)
        try:
            # Digits stay a text: they may be a secret.
            is_text = parameter.name != "override" and text[:1] not in ("{", "[") and text not in ("true", "false")
            found[name] = text if is_text else json.loads(text)
        except ValueError as err:
            raise click.BadParameter(f"the value of {name} is no JSON: {err}", ctx, parameter) from err
    return found


def _keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    pairs = value if parameter.name != "endpoint_url" else [f"endpoint_url={value}"] if value else []
    ctx.meta.setdefault(_GIVEN, {}).update(_pairs(ctx, parameter, pairs))


def storage_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a verb that takes ROOT the options of its storage; `options_of` uses them."""
    one = click.option(
        "--storage-option",
        multiple=True,
        metavar="NAME=VALUE",
        expose_value=False,
        callback=_keep,
        help="For the storage of ROOT, as in storage_options of a ckpt.yaml. Repeatable.",
    )
    url = click.option(
        "--endpoint-url",
        metavar="URL",
        expose_value=False,
        callback=_keep,
        help="Of S3: short for --storage-option endpoint_url=URL.",
    )
    return url(one(command))


def resume_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a verb the section `resume`, as options or of a ckpt.yaml: the argument `section`, None without them."""

    @click.option(
        "--only", multiple=True, metavar="PATTERN", help="Take this and nothing else. Repeatable, as all of these."
    )
    @click.option("--skip", multiple=True, metavar="PATTERN", help="Leave this out.")
    @click.option("--map", multiple=True, metavar="OLD=NEW", callback=_pairs, help="Rename a component or a weight.")
    @click.option(
        "--override", multiple=True, metavar="NAME=VALUE", callback=_pairs, help="Set a value, given as JSON."
    )
    @click.option("--config", metavar="FILE", help="Take the section resume of a ckpt.yaml instead.")
    @wraps(command)
    def run(*arguments: Any, config: str | None, **options: Any) -> Any:
        given = {name: value for name in ("only", "skip", "map", "override") if (value := options.pop(name))}
        section = load_config(config or {"tiers": "."}, resume=given or None).resume if config or given else None
        if isinstance(section, str):
            raise ConfigError(f"{config} has no section resume", hint="give --only, --skip, --map or --override")
        return command(*arguments, section=section, **options)

    return run


def options_of(root: str, *, as_plain: bool = False, **options: Any) -> Config:
    """The options that ROOT stands for: a folder, a URL or a ckpt.yaml.

    What `storage_options` were given counts for every storage URL in it; folders take none. With a key in the
    environment what has no section `seal` is sealed as well.

    Args:
        as_plain: it is not.

    Raises:
        ConfigError: as `load_config`.
    """
    config = load_config(root, **options)
    if os.environ.get(KEY_VARIABLE) and not as_plain:
        sealed = (tier.model_copy(update={"seal": tier.seal or Seal()}) for tier in config.tiers)
        config = config.model_copy(update={"tiers": Tiers.of(tuple(sealed))})
    context = click.get_current_context(silent=True)
    given: Mapping[str, Any] = context.meta.get(_GIVEN, {}) if context is not None else {}
    if not given:
        return config
    tiers = [
        tier if tier.is_folder else tier.model_copy(update={"storage_options": {**tier.storage_options, **given}})
        for tier in config.tiers
    ]
    return config.model_copy(update={"tiers": Tiers.of(tuple(tiers))})


def quantity(option: str, text: str, parse: Callable[[str], float]) -> float:
    """What the text of an option means.

    Raises:
        ConfigError: nothing that `parse` takes.
    """
    try:
        return parse(text)
    except ValueError as err:
        raise ConfigError(f"{option}: {err}, got {text!r}") from err


def open_run(root: str, config: Config | None = None, *, every: bool = False) -> Run:
    """The run at ROOT, as `find_run` has it; its storage gets the options of the command line.

    Args:
        config: what ROOT stands for, if that is known.
        every: no tier may be left out.
    """
    return find_run(root, config or options_of(root), say_waiting, every=every)
