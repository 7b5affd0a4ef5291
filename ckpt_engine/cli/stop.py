"""`ckpt stop` and `ckpt save-now`: ask a run that is trained on this machine, through the writer that serves it."""

from __future__ import annotations

import getpass
import os
import threading
import time
from collections.abc import Callable

import click

from ckpt_engine.cli.output import json_option, print_json
from ckpt_engine.config import load_config
from ckpt_engine.config.sections import parse_duration_seconds
from ckpt_engine.errors import ConfigError, WaitTimeoutError, WriterError
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage
from ckpt_engine.writer import control


@click.command("stop", short_help="Save and end a run that is being trained.")
@click.argument("root")
@click.option("--wait", "wait", metavar="DURATION", help="Wait at most so long until it has ended.")
@json_option
def command(root: str, wait: str | None, as_json: bool) -> None:
    """Ask the run at ROOT, on this machine, for a snapshot at the end of its step, and to end with it.

    Its process ends with 0, and a restart goes on from there.
    """
    seconds = seconds_of(wait)
    url = ask_trainer(root, control.STOP)
    if seconds is not None:
        wait_for(lambda: not is_served(url), seconds, f"the run at {url} did not end")
    if as_json:
        print_json({"root": url, "asked": True, "ended": seconds is not None})
    elif seconds is not None:
        click.echo(f"the run at {url} has ended")
    else:
        click.echo(f"asked: the run at {url} takes a snapshot at the end of its step, and ends")


@click.command("save-now", short_help="Take a snapshot of a run that is being trained.")
@click.argument("root")
@click.option("--wait", "wait", metavar="DURATION", help="Wait at most so long until it is durable.")
@json_option
def save_now(root: str, wait: str | None, as_json: bool) -> None:
    """Ask the run at ROOT, on this machine, for a snapshot at the end of its step."""
    seconds = seconds_of(wait)
    tier = load_config(root).tiers[0]
    nearest = Repository(open_storage(tier.url, tier.for_storage()))
    before = {parsed.id for parsed in nearest.ids()} if seconds is not None else set()
    url = ask_trainer(root, control.SAVE)
    new: list[str] = []
    if seconds is not None:

        def found() -> bool:
            new[:] = [parsed.id for parsed in nearest.ids() if parsed.id not in before]
            return bool(new)

        wait_for(found, seconds, f"no new snapshot at {url}")
    if as_json:
        print_json({"root": url, "asked": True, "snapshot": new[-1] if new else None})
    elif new:
        click.echo(f"{new[-1]} is durable at {url}")
    else:
        click.echo(f"asked: the run at {url} takes a snapshot at the end of its step")


ANSWER_SECONDS = 10.0
LOOK_SECONDS = 0.2


def ask_trainer(root: str, what: str) -> str:
    """Tell the trainer of the run at `root` (a folder, URL or ckpt.yaml) to `save` or to `stop`.

    Returns:
        The root's URL.

    Raises:
        ConfigError: a YAML file that is wrong or missing.
        WriterError: no process trains that run on this machine as this user.
    """
    url = load_config(root).root_url
    reply = control.ask(url, {"what": what, "who": _who()}, ANSWER_SECONDS)
    if reply is None:
        raise WriterError(
            f"no run at {url} is being trained on this machine by this user",
            hint=f"`ckpt status {root}` says who writes it; ask on that machine, with the root that the run was given",
        )
    if not reply.body.get("trainer"):
        why = reply.body.get("error", "its trainer is gone, and its writer ends by itself")
        raise WriterError(f"the run at {url} cannot be asked: {why}")
    return url


def is_served(url: str) -> bool:
    """Whether the run still has a writer with a trainer."""
    reply = control.ask(url, {"what": control.STATUS}, ANSWER_SECONDS)
    return reply is not None and bool(reply.body.get("trainer"))


def wait_for(found: Callable[[], bool], seconds: float, what: str) -> None:
    """Look again and again.

    Raises:
        WaitTimeoutError: `what` did not happen within `seconds`.
    """
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not found():
        if time.monotonic() > deadline:
            raise WaitTimeoutError(f"{what} within {seconds:g} s; the run was asked and goes on with it")
        pause.wait(LOOK_SECONDS)


def seconds_of(text: str | None) -> float | None:
    """The value of `--wait`.

    Raises:
        ConfigError: not a duration.
    """
    if text is None:
        return None
    try:
        return parse_duration_seconds(text)
    except ValueError as err:
        raise ConfigError(f"--wait: {err}, got {text!r}") from err


def _who() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        name = f"user {os.geteuid()}"
    return f"{name} (pid {os.getpid()})"
