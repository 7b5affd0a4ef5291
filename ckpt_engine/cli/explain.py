"""`ckpt explain`: what an error code or an option means, or why a run has its interval."""

from __future__ import annotations

import inspect
import time
from typing import Any

import click

from ckpt_engine.cli.output import json_option, print_json, print_text
from ckpt_engine.cli.root import default_root, options_of, storage_options
from ckpt_engine.config import Config
from ckpt_engine.config.load_config import inner_section, unknown_key
from ckpt_engine.config.sections import Section
from ckpt_engine.errors import BY_CODE, CkptError, ConfigError, StorageMissingError
from ckpt_engine.observe.units import age
from ckpt_engine.tools.live_run import LiveWriter
from ckpt_engine.tools.stored_run import repository_of
from ckpt_engine.writer.attempts import read_attempts

BINDINGS = {
    "budget": "More snapshots would cost more than `overhead` allows.",
    "failure rate": "More snapshots would cost more than failures lose; fewer would lose more.",
    "max_lost_work": "A failure between snapshots that are further apart could lose more than `max_lost_work`.",
    "back-pressure": "The writer is busy with the last snapshot until then.",
    "bandwidth": "The nearest tier takes no more bytes per second: its `bandwidth`.",
    "step time": "A snapshot is taken between steps.",
}
"""What `Bounds.binding` means."""


def page_of(error: type[CkptError]) -> str:
    """What `ckpt explain` and docs/errors.md say of an error, as Markdown: its docstring, without its arguments."""
    return inspect.cleandoc(error.__doc__ or "").partition("\n\nArgs:")[0]


@click.command("explain", short_help="Say what an error code or an option means, or why the interval is what it is.")
@click.argument("what", required=False, metavar="[CODE | OPTION | interval]")
@click.argument("root", required=False)
@storage_options
@json_option
def explain(what: str | None, root: str | None, as_json: bool) -> None:
    """Print what CODE (CKPT202, or 202) or OPTION (keep.best) means; without it all codes, each with a line.

    `interval` says why the run at ROOT has its interval, from what it has recorded.
    """
    known = dict(sorted(BY_CODE.items()))
    name = f"CKPT{(what or '').upper().removeprefix('CKPT')}"
    if what == "interval":
        title, *lines = _interval(root or default_root())
        answer: Any = {"interval": title, "why": lines}
    elif what is not None and name not in known:
        title, lines = what, _option(what)
        answer = {"option": what, "meaning": lines}
    else:
        found = list(known.values()) if what is None else [known[name]]
        answer = [{"code": one.code, "name": one.__name__, "page": page_of(one)} for one in found]
        title, lines = f"{found[0].code}  {found[0].__name__}", ["", *page_of(found[0]).split("\n")]
    if as_json:
        print_json(answer)
    elif what is None:
        for one in found:
            sentence, *_ = page_of(one).split("\n\n")
            print_text(f"{one.code}  {' '.join(sentence.split())}")
    else:
        print_text(title, bold=True)
        print_text(*lines)


def _option(path: str) -> list[str]:
    """What an option means, and the keys below it.

    Raises:
        ConfigError: there is none of that name.
    """
    section: type[Section] = Config
    lines: list[str] = []
    for number, name in enumerate(keys := path.split(".")):
        if name not in section.model_fields:
            near = unknown_key(tuple(keys[: number + 1])).removeprefix("unknown key")
            raise ConfigError(
                f"there is no code and no option {path!r}{near if near.startswith(';') else ''}",
                hint="`ckpt explain` lists all codes, `ckpt schema` all options",
            )
        field = section.model_fields[name]
        section = inner_section(field.annotation) or Section
        lines = [f"{field.description}"]
    return lines + [f"  {path}.{name}: {one.description}" for name, one in section.model_fields.items()]


def _interval(root: str) -> list[str]:
    """How often a run takes snapshots, and why, clause by clause.

    Raises:
        StorageMissingError: it has recorded no interval.
    """
    config = options_of(root)
    live, rows = LiveWriter.of(config.root_url), read_attempts(repository_of(config.tiers[0]).storage).attempts
    found = [(one.began + since, why) for one in rows for since, _, why in one.intervals]
    found += [(time.time(), live.why)] if live is not None and live.why else []
    if not found:
        raise StorageMissingError(
            f"no interval is recorded at {config.root_url}",
            hint="a run records it when it has measured its snapshots; options such as every_n_steps fix it",
        )
    since, why = found[-1]
    often, _, reasons = why.partition(": ")
    return [
        f"snapshots {often} at {config.root_url}, as of {age(since)}",
        *filter(None, reasons.split("; ")),
        *[text for name, text in BINDINGS.items() if f"set by {name}" in why],
    ]
