"""`ckpt explain`: what an error code means, and what to do."""

from __future__ import annotations

import inspect

import click

from ckpt_engine import errors
from ckpt_engine.cli.output import json_option, print_json, print_text
from ckpt_engine.errors import CkptError, ConfigError


def page_of(error: type[CkptError]) -> str:
    """What `ckpt explain` and docs/errors.md say of an error, as Markdown: its docstring, without its arguments."""
    return inspect.cleandoc(error.__doc__ or "").partition("\n\nArgs:")[0]


@click.command("explain", short_help="Say what an error code means, and what to do.")
@click.argument("code", required=False)
@json_option
def explain(code: str | None, as_json: bool) -> None:
    """Print the page of CODE (CKPT202, or 202), or all codes, each with a line."""
    kinds = (one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, CkptError))
    known = {error.code: error for error in sorted(kinds, key=lambda error: error.code)}
    if code is None:
        found = list(known.values())
    else:
        name = f"CKPT{code.upper().removeprefix('CKPT')}"
        if name not in known:
            raise ConfigError(f"there is no code {code!r}", hint="`ckpt explain` lists all codes")
        found = [known[name]]
    if as_json:
        print_json([{"code": one.code, "name": one.__name__, "page": page_of(one)} for one in found])
    elif code is None:
        for one in found:
            sentence, *_ = page_of(one).split("\n\n")
            print_text(f"{one.code}  {' '.join(sentence.split())}")
    else:
        print_text(f"{found[0].code}  {found[0].__name__}", "", bold=True)
        print_text(*page_of(found[0]).split("\n"))
