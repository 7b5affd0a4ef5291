"""`ckpt stop` and `ckpt save-now`: ask a run that trains on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from ckpt_engine.cli.output import json_option, print_answer
from ckpt_engine.cli.root import options_of, quantity, root_argument, storage_options
from ckpt_engine.config.option_types import parse_duration_seconds
from ckpt_engine.tools.live_run import ask_trainer, is_trained, wait_for
from ckpt_engine.tools.stored_run import repository_of
from ckpt_engine.writer import control

T = TypeVar("T")


@click.command("stop", short_help="Save and end a run that is being trained.")
@root_argument
@click.option("--wait", "wait", metavar="DURATION", help="Wait until it has ended, at most this long.")
@storage_options
@json_option
def stop(root: str, wait: str | None, as_json: bool) -> None:
    """Ask the run at ROOT, on this machine, for a snapshot at the end of its step, and to end with it.

    Its process ends with exit code 0, and a restart resumes from there.
    """
    url = options_of(root).root_url
    ended = _ask(url, control.Question.STOP, wait, lambda: not is_trained(url), f"the run at {url} did not end")
    asked = f"asked: the run at {url} takes a snapshot at the end of its step, and ends"
    done = f"the run at {url} has ended" if ended else asked
    print_answer({"root": url, "asked": True, "ended": bool(ended)}, done, as_json=as_json)


@click.command("save-now", short_help="Take a snapshot of a run that is being trained.")
@root_argument
@click.option("--wait", "wait", metavar="DURATION", help="Wait until it is durable, at most this long.")
@storage_options
@json_option
def save_now(root: str, wait: str | None, as_json: bool) -> None:
    """Ask the run at ROOT, on this machine, for a snapshot at the end of its step."""
    config = options_of(root)
    nearest, url = repository_of(config.tiers[0]), config.root_url
    before = set(nearest.ids()) if wait is not None else set()
    new = _ask(
        url,
        control.Question.SAVE,
        wait,
        lambda: [parsed.id for parsed in nearest.ids() if parsed not in before],
        f"no new snapshot at {url}",
    )
    asked = f"asked: the run at {url} takes a snapshot at the end of its step"
    done = f"{new[-1]} is durable at {url}" if new else asked
    print_answer({"root": url, "asked": True, "snapshot": new[-1] if new else None}, done, as_json=as_json)


def _ask(url: str, what: str, wait: str | None, look: Callable[[], T], late: str) -> T | None:
    """Ask the trainer, and wait until something is found; None: that is not wanted."""
    seconds = quantity("--wait", wait, parse_duration_seconds) if wait is not None else None
    ask_trainer(url, what)
    return None if seconds is None else wait_for(look, seconds, late)
