"""The verbs that need no run: what a code means, a first ckpt.yaml and its schema, completion on the shell."""

from __future__ import annotations

import inspect
import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import yaml
from click.shell_completion import get_completion_class

from ckpt_engine.cli.output import check_free, json_option, new_file, print_json, print_text
from ckpt_engine.config import Config, load_config
from ckpt_engine.errors import CkptError, ConfigError

_SCHEMA_FILE = "ckpt.schema.json"
_PRESETS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text())


def _errors(base: type[CkptError] = CkptError) -> Iterator[type[CkptError]]:
    yield base
    for one in base.__subclasses__():
        if one.__module__ == base.__module__:
            yield from _errors(one)


def page_of(error: type[CkptError]) -> str:
    """What `ckpt explain` and docs/errors.md say of an error, as Markdown: its docstring, without its arguments."""
    return inspect.cleandoc(error.__doc__ or "").partition("\n\nArgs:")[0]


@click.command("explain", short_help="Say what an error code means, and what to do.")
@click.argument("code", required=False)
@json_option
def explain(code: str | None, as_json: bool) -> None:
    """Print the page of CODE (CKPT202, or 202), or all codes, each with a line."""
    errors = {error.code: error for error in sorted(_errors(), key=lambda error: error.code)}
    if code is None:
        found = list(errors.values())
    else:
        name = f"CKPT{code.upper().removeprefix('CKPT')}"
        if name not in errors:
            raise ConfigError(f"there is no code {code!r}", hint="`ckpt explain` lists all codes")
        found = [errors[name]]
    if as_json:
        print_json([{"code": one.code, "name": one.__name__, "page": page_of(one)} for one in found])
    elif code is None:
        for one in found:
            sentence, *_ = page_of(one).split("\n\n")
            print_text(f"{one.code}  {' '.join(sentence.split())}")
    else:
        print_text(f"{found[0].code}  {found[0].__name__}", "", bold=True)
        print_text(*page_of(found[0]).split("\n"))


@click.command("init", short_help="Write a first ckpt.yaml.")
@click.argument("file", default="ckpt.yaml", type=click.Path(path_type=Path))
@click.option("--preset", type=click.Choice(list(_PRESETS)), help="Ask nothing, and write what suits such a place.")
@click.option(
    "--tier", "tiers", multiple=True, metavar="URL", help="A folder or storage URL, nearest first. Repeatable."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def init(file: Path, preset: str | None, tiers: tuple[str, ...], force: bool) -> None:
    """Write FILE (ckpt.yaml) after three questions or from a preset, and the schema beside it, for editors."""
    check_free(file, replace=force)
    places = list(tiers)
    if preset is None:
        places = places or [
            click.prompt("Where do snapshots go? A folder or storage URL", default="ckpt"),
            click.prompt(
                "A second place, for the day the first one is gone? Nothing: none", default="", show_default=False
            ),
        ]
        preset = click.prompt("How does the job run?", type=click.Choice(list(_PRESETS)), default="laptop")
    places = [place for place in places or ["ckpt"] if place]
    load_config({"tiers": places})
    with new_file(file, replace=force) as out:
        out.write(_text(preset, places).encode())
    load_config(file)
    with new_file(file.with_name(_SCHEMA_FILE), replace=True) as out:
        out.write((json.dumps(_schema(), indent=2, ensure_ascii=False) + "\n").encode())
    print_text(f"wrote {file} and {_SCHEMA_FILE}: give it to Checkpointer, AdaptiveCheckpoint or TransformersCallback")


def _text(preset: str, places: list[str]) -> str:
    listed = "".join(f"  - {json.dumps(place)}\n" for place in places)
    return textwrap.dedent(
        f"""\
        # yaml-language-server: $schema={_SCHEMA_FILE}
        # All options: docs/configuration.md, or `ckpt schema`.

        # Where snapshots go, nearest first: every snapshot to the first place, copies to the others.
        tiers:
        {{}}
        # Share of training time that snapshots may cost; how often one is taken follows from it.
        overhead: 1%

        {{}}"""
    ).format(listed, _PRESETS[preset])


@click.command("schema", short_help="Print the JSON Schema of ckpt.yaml.")
def schema() -> None:
    """Print the JSON Schema of ckpt.yaml.

    Editors complete and check a YAML file that names the schema in its first line:

    \b
        # yaml-language-server: $schema=ckpt.schema.json
    """
    print_json(_schema())


def _schema() -> dict[str, object]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


_SHELLS = {
    "bash": ".local/share/bash-completion/completions/ckpt",
    "fish": ".config/fish/completions/ckpt.fish",
    "zsh": ".zfunc/_ckpt",
}
"""Where each shell looks for completions of a user."""


@click.command("completion", short_help="Let the shell complete verbs and options.")
@click.argument("shell", type=click.Choice(list(_SHELLS)), required=False)
def completion(shell: str | None) -> None:
    """Write what SHELL (default: the one in $SHELL) needs to complete `ckpt` where it looks for it."""
    from ckpt_engine.cli.main import commands

    name = shell or Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(name) if name in _SHELLS else None
    if kind is None:
        raise ConfigError(f"no completion for the shell {name!r}", hint=f"name one of {', '.join(_SHELLS)}")
    file = Path.home() / _SHELLS[name]
    file.parent.mkdir(parents=True, exist_ok=True)
    with new_file(file, replace=True) as out:
        out.write(kind(commands, {}, "ckpt", "_CKPT_COMPLETE").source().encode())
    more = " if ~/.zshrc has `fpath+=~/.zfunc` before `compinit`" if name == "zsh" else ""
    print_text(f"wrote {file}: new shells complete `ckpt`{more}")
