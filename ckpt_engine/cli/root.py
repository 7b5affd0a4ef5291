"""What ROOT and the options of its storage on the command line mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import click

from ckpt_engine.cli.output import say_waiting
from ckpt_engine.config import Config, load_config
from ckpt_engine.config.models import MEMORY, Tiers
from ckpt_engine.errors import ConfigError
from ckpt_engine.tools.stored_run import Run, find_run

_GIVEN = "ckpt_engine.storage_options"
"""Where click's context keeps what the options of the storage say."""


def _keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    pairs = value if parameter.name != "endpoint_url" else [f"endpoint_url={value}"] if value else []
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE", ctx, parameter)
        try:
            # Digits stay a text: they may be a secret.
            found = json.loads(text) if text[:1] in ("{", "[") or text in ("true", "false") else text
        except ValueError as err:
            raise click.BadParameter(f"the value of {name} is no JSON: {err}", ctx, parameter) from err
        ctx.meta.setdefault(_GIVEN, {})[name] = found


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


def options_of(root: str, **options: Any) -> Config:
    """The options that ROOT stands for: a folder, a URL or a ckpt.yaml.

    What `storage_options` were given counts for every storage URL in it; folders take none.

    Raises:
        ConfigError: as `load_config`.
    """
    config = load_config(root, **options)
    context = click.get_current_context(silent=True)
    given: Mapping[str, Any] = context.meta.get(_GIVEN, {}) if context is not None else {}
    if not given:
        return config
    tiers = [
        tier
        if tier.is_folder or tier.url == MEMORY
        else tier.model_copy(update={"storage_options": {**tier.storage_options, **given}})
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
