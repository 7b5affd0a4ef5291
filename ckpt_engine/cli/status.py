"""How a run is: `ckpt status` shows its tiers, `ckpt top` as it changes, `ckpt goodput` what its time went into.

`ckpt stop` and `ckpt save-now` ask a run that trains on this machine, through its writer.
"""

from __future__ import annotations

import getpass
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from ckpt_engine.cli.output import age, fields_of, json_option, print_json, print_table, print_text, say_waiting
from ckpt_engine.cli.root import options_of, quantity, repository_of, storage_options
from ckpt_engine.config import Config
from ckpt_engine.config.sections import parse_duration_seconds
from ckpt_engine.errors import CkptError, StorageMissingError, WaitTimeoutError, WriterError
from ckpt_engine.observe import units
from ckpt_engine.observe.resume_report import replay_of
from ckpt_engine.observe.run_times import RunSpent
from ckpt_engine.observe.units import count
from ckpt_engine.restore import ask_tiers
from ckpt_engine.store.lease import read_holder
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.writer import control
from ckpt_engine.writer.attempts import Attempt, AttemptHistory, read_attempts
from ckpt_engine.writer.run_records import WORKING, TierStatus, WriterStatus, read_status

LIVE_SECONDS = 5.0
ANSWER_SECONDS = 10.0
LOOK_SECONDS = 0.2
BAR_WIDTH = 14
MEANINGS = {
    "productive": "training that was not lost",
    "slowdown": "longer steps near snapshots",
    "stall": "snapshots blocked training",
    "fence": "waits for copies",
    "replay": "lost by failures, done again",
    "restore": "snapshots were read",
    "startup": "processes got ready",
    "validation": "evaluation",
    "end": "waits for the last snapshot",
    "down": "no process trained",
    "unknown": "not recorded",
}


@dataclass(frozen=True, slots=True)
class _Row:
    """One tier: what it has, as asked now (`error`: it does not answer), and what its writer said last."""

    url: str
    snapshots: int | None
    newest: SnapshotInfo | None
    error: str | None
    writer: TierStatus | None


@dataclass(frozen=True, slots=True)
class _Live:
    """What the writer of the run on this machine says of itself; `error`: that it does not answer, and how.

    Args:
        trainer: whether its trainer lives.
        held_step, held_age_seconds, held_durable: of the snapshot that it keeps in memory.
        training_step: that the trainer has begun, where it says so.
        interval_steps, why: how often it takes snapshots, and what decides that.
    """

    pid: int | None
    trainer: bool = False
    held_step: int | None = None
    held_age_seconds: float | None = None
    held_durable: bool = False
    training_step: int | None = None
    interval_steps: int | None = None
    why: str | None = None
    error: str | None = None

    def text(self) -> str:
        if self.error is not None:
            return f"its writer does not answer: {self.error}"
        parts = [f"its writer is process {self.pid}", "its trainer lives" if self.trainer else "its trainer is gone"]
        if self.training_step is not None:
            parts.append(f"step {self.training_step} has begun")
        if self.held_step is not None:
            taken = units.duration(self.held_age_seconds or 0.0)
            durable = "durable" if self.held_durable else "not durable yet"
            parts.append(f"step {self.held_step} is in memory, {durable}, taken {taken} ago")
        return "; ".join(parts) + (f"\nsnapshots {self.why}" if self.why else "")


def _live(root_url: str) -> _Live | None:
    try:
        reply = control.ask(root_url, {"what": control.STATUS}, LIVE_SECONDS)
    except (CkptError, OSError) as err:
        return _Live(None, error=str(err))
    if reply is None:
        return None
    body: dict[str, Any] = reply.body
    held, beat, created = body.get("held") or {}, body.get("beat") or {}, body.get("held_created")
    pace: dict[str, Any] = body.get("pace") or {}
    return _Live(
        pid=body.get("pid"),
        trainer=bool(body.get("trainer")),
        held_step=held.get("step"),
        held_age_seconds=None if created is None else max(0.0, time.time() - created),
        held_durable=bool(held.get("durable")),
        training_step=beat.get("step"),
        interval_steps=pace.get("interval_steps"),
        why=pace.get("why"),
    )


@click.command("status", short_help="Show the tiers of a run, and how each one is.")
@click.argument("root")
@storage_options
@json_option
def command(root: str, as_json: bool) -> None:
    """Show the tiers of the run at ROOT: what each has, and what its writer is doing.

    All tiers are asked if ROOT is a ckpt.yaml; of a folder or URL, that one.
    """
    config = options_of(root)
    repositories = list(map(repository_of, config.tiers))
    answers = ask_tiers.ask(repositories, lambda place: place.list(), ask_tiers.at_most, say_waiting)
    # A nearest tier that does not answer is not asked once more: it may hang.
    near = repositories[0] if answers[0].error is None else None
    status, why = _status(near) if near else (None, None)
    spent = _spent(config, near) if near else None
    holder = read_holder(near.storage) if near else None
    live = _live(config.root_url)
    said = {tier.url: tier for tier in status.tiers} if status else {}
    rows = [
        _Row(
            answer.place.storage.url,
            None if answer.value is None else len(answer.value),
            answer.value[-1] if answer.value else None,
            f"[{answer.error.code}] {answer.error.message}" if answer.error else None,
            said.pop(answer.place.storage.url, None),
        )
        for answer in answers
    ]
    rows += [_Row(tier.url, None, None, None, tier) for tier in said.values()]
    if status is None and live is None and not any(row.newest or row.error for row in rows):
        raise StorageMissingError(
            f"no run at {rows[0].url}", hint="check the path; a run starts with its first snapshot"
        )
    if as_json:
        _print_json(repositories[0].storage.url, holder, status, rows, live, spent)
    else:
        _print(holder, status, rows, why)
        if spent is not None:
            print_text(f"{_headline(spent)}: `ckpt goodput` says of what")
        if (replay := replay_of(config.root_url)) is not None:
            print_text(replay.text())
        if live is not None:
            print_text(*live.text().split("\n"))


@click.command("top", short_help="Show how a run is, again and again.")
@click.argument("root")
@click.option(
    "--every", default=2.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds between two looks."
)
@storage_options
@click.pass_context
def top(ctx: click.Context, root: str, every: float) -> None:
    """Show what `ckpt status` shows, as it changes; Ctrl-C ends it. A run that does not answer is asked again."""
    try:
        while True:
            if sys.stdout.isatty():
                click.clear()
            print_text(f"{root} at {time.strftime('%H:%M:%S')}", bold=True)
            try:
                ctx.invoke(command, root=root, as_json=False)
            except CkptError as err:
                print_text(str(err), fg="red")
            threading.Event().wait(every)
    except KeyboardInterrupt:
        print_text("")


def _status(repository: Repository) -> tuple[WriterStatus | None, str | None]:
    try:
        return read_status(repository.storage), None
    except CkptError as err:
        return None, str(err)


def _spent(config: Config, near: Repository) -> RunSpent | None:
    """What the time of the run went into; None: not known."""
    try:
        history = history_of(config, near.storage)
    except CkptError:
        return None
    return history.spent if history.rows else None


def _print(holder: LeaseHolder | None, status: WriterStatus | None, rows: list[_Row], why: str | None) -> None:
    titles = ("tier", "state", "snapshots", "newest", "taken", "waiting")
    print_table(titles, [_cells(row) for row in rows], numbers=("snapshots",))
    for row in rows:
        if row.error:
            print_text(f"{row.url} does not answer: {row.error}", fg="red")
        if row.writer is not None and row.writer.state != WORKING:
            print_text(f"{row.url} failed {age(row.writer.since)}: [{row.writer.code}] {row.writer.message}", fg="red")
        if row.writer is not None and row.writer.encoding:
            print_text(f"{row.url}: {row.writer.encoding}")
    if why:
        print_text(why, fg="red")
    if rows[0].error:
        print_text("what its writer says is at the nearest tier")
    else:
        print_text(f"written by {holder}" if holder else "no process writes it now")
    if status is not None:
        what = "the writer ended" if status.ended else "the writer was heard of"
        print_text(f"{what} {age(status.written)}")


def _cells(row: _Row) -> tuple[str, ...]:
    said, newest = row.writer, row.newest
    state = said.state if said else ""
    if row.error:
        state = "no answer"
    name = newest.id if newest else (said.newest or "") if said else ""
    waiting = ""
    if said is not None and said.waiting:
        waiting = f"{count(said.waiting, 'snapshot')}, {units.size(said.waiting_bytes)}"
    return (
        row.url,
        state,
        "" if row.snapshots is None else f"{row.snapshots:,}",
        name,
        age(newest.created) if newest else "",
        waiting,
    )


def _print_json(
    url: str,
    holder: LeaseHolder | None,
    status: WriterStatus | None,
    rows: list[_Row],
    live: _Live | None,
    spent: RunSpent | None,
) -> None:
    print_json(
        {
            "root": url,
            "holder": holder,
            "live": live,
            "goodput": spent and spent.goodput,
            "spent": spent and spent.numbers(),
            "writer": status
            and {
                "pid": status.pid,
                "host": status.host,
                "ended": status.ended,
                "age_seconds": time.time() - status.written,
            },
            "tiers": rows,
            "replay": replay_of(url),
        }
    )


@click.command("goodput", short_help="Show what the time of a run went into.")
@click.argument("root")
@storage_options
@json_option
def goodput(root: str, as_json: bool) -> None:
    """Show what the time of the run at ROOT went into, across all its restarts; the sum is wall time.

    Read from the nearest tier; of a run that is trained on this machine, up to now.
    """
    config = options_of(root)
    storage = repository_of(config.tiers[0]).storage
    history = history_of(config, storage)
    if not history.rows:
        raise StorageMissingError(
            f"no attempts are recorded at {storage.url}",
            hint="check the path; `ckpt ls` shows snapshots, and a run records its attempts from its first start on",
        )
    spent = history.spent
    if as_json:
        print_json(
            {
                "root": storage.url,
                "goodput": spent.goodput,
                "wall_seconds": spent.wall,
                "seconds": spent.parts,
                "slowdown_error_seconds": spent.slowdown_error,
                "idle_share": spent.idle_share,
                "attempts": [fields_of(one) | {"ended": failure_of(one)} for one in history.rows],
            }
        )
    else:
        _print_spent(storage.url, spent, history.rows)


def history_of(config: Config, storage: Storage) -> AttemptHistory:
    """The attempts as recorded at the nearest tier; of one that is trained on this machine up to now.

    Raises:
        CorruptError: the record is damaged.
        StorageError
    """
    history = read_attempts(storage)
    if not history.rows or history.rows[-1].end is not None:
        return history
    try:
        reply = control.ask(config.root_url, {"what": control.STATUS}, LIVE_SECONDS)
    except (CkptError, OSError):
        return history  # what its writer has recorded is at most a minute old
    if reply is None or not reply.body.get("trainer") or not (said := reply.body.get("spent")):
        return history
    now = replace(history.rows[-1], **said)
    lasted = max(now.seconds, time.time() - now.began)
    return replace(history, rows=(*history.rows[:-1], replace(now, seconds=lasted)))


def failure_of(one: Attempt) -> str:
    """How it ended, for people."""
    if one.end is None:
        return "trains, or was lost with its machine"
    return f"ended by a failure of {one.failure}" if one.failure else "ended by itself, or was stopped"


def _print_spent(url: str, spent: RunSpent, rows: Sequence[Attempt]) -> None:
    print_text(_headline(spent), bold=True, nl=False)
    print_text(f" at {url}", "")
    cells = []
    for name, seconds in spent.parts.items():
        if seconds <= 0.0 and name != "productive":
            continue
        share = seconds / spent.wall if spent.wall > 0.0 else 0.0
        meaning = MEANINGS[name]
        if name == "slowdown":
            meaning += f", ± {units.duration(2.0 * spent.slowdown_error)}"
        cells.append((name, percent(share), units.duration(seconds), bar(share), meaning))
    print_table(("", "share", "time", "", ""), cells, numbers=("share", "time"))
    if spent.idle > 0.0:
        print_text("", f"ranks waited for each other for {percent(spent.idle_share)} of it because of snapshots")
    failures = Counter(one.failure for one in (*rows[:-1], *(one for one in rows[-1:] if one.end)) if one.failure)
    classes = ", ".join(f"{number} of {kind}" for kind, number in failures.items())
    print_text("", f"{count(len(rows), 'attempt')}, {count(failures.total(), 'failure')}", nl=False)
    print_text(f" ({classes})" if classes else "")
    print_text(f"the last attempt {failure_of(rows[-1])}")


def _headline(spent: RunSpent) -> str:
    least = "at least " if spent.parts["unknown"] > 0.0 else ""  # of attempts that an older version has recorded
    return f"goodput {least}{percent(spent.goodput)} of {units.duration(spent.wall)}"


def percent(share: float) -> str:
    """`97.1 %`: one digit after the point."""
    return f"{100.0 * share:.1f} %"


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """So much of `width` columns, to an eighth of one."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


@click.command("stop", short_help="Save and end a run that is being trained.")
@click.argument("root")
@click.option("--wait", "wait", metavar="DURATION", help="Wait at most so long until it has ended.")
@storage_options
@json_option
def stop(root: str, wait: str | None, as_json: bool) -> None:
    """Ask the run at ROOT, on this machine, for a snapshot at the end of its step, and to end with it.

    Its process ends with 0, and a restart goes on from there.
    """
    seconds = quantity("--wait", wait, parse_duration_seconds) if wait is not None else None
    url = ask_trainer(root, control.STOP)
    if seconds is not None:
        wait_for(lambda: not is_served(url), seconds, f"the run at {url} did not end")
    if as_json:
        print_json({"root": url, "asked": True, "ended": seconds is not None})
    elif seconds is not None:
        print_text(f"the run at {url} has ended")
    else:
        print_text(f"asked: the run at {url} takes a snapshot at the end of its step, and ends")


@click.command("save-now", short_help="Take a snapshot of a run that is being trained.")
@click.argument("root")
@click.option("--wait", "wait", metavar="DURATION", help="Wait at most so long until it is durable.")
@storage_options
@json_option
def save_now(root: str, wait: str | None, as_json: bool) -> None:
    """Ask the run at ROOT, on this machine, for a snapshot at the end of its step."""
    seconds = quantity("--wait", wait, parse_duration_seconds) if wait is not None else None
    nearest = repository_of(options_of(root).tiers[0])
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
        print_text(f"{new[-1]} is durable at {url}")
    else:
        print_text(f"asked: the run at {url} takes a snapshot at the end of its step")


def ask_trainer(root: str, what: str) -> str:
    """Tell the trainer of the run at `root` (a folder, URL or ckpt.yaml) to `save` or to `stop`.

    Returns:
        The root's URL.

    Raises:
        ConfigError: a YAML file that is wrong or missing.
        WriterError: no process trains that run on this machine as this user.
    """
    url = options_of(root).root_url
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


def _who() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        name = f"user {os.geteuid()}"
    return f"{name} (pid {os.getpid()})"
