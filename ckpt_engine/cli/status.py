"""`ckpt status` and `ckpt top`: how the tiers of a run are."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass

import click

from ckpt_engine.cli.output import json_option, print_json, print_table, print_text, say_waiting
from ckpt_engine.cli.root import options_of, root_argument, storage_options
from ckpt_engine.config import Config
from ckpt_engine.errors import CkptError, StorageMissingError
from ckpt_engine.observe import units
from ckpt_engine.observe.resume_report import replay_of
from ckpt_engine.observe.run_times import RunSpent
from ckpt_engine.observe.units import age, count
from ckpt_engine.restore import ask_tiers
from ckpt_engine.store.lease import read_holder
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.tools.live_run import LiveWriter
from ckpt_engine.tools.recorded_attempts import headline, history_of
from ckpt_engine.tools.stored_run import repository_of
from ckpt_engine.writer.run_records import (
    WORKING,
    TierStatus,
    WriterStatus,
    read_status,
)


@dataclass(frozen=True, slots=True)
class _Row:
    """One tier: what it has, as asked now (`error`: it does not answer), and what its writer said last."""

    url: str
    snapshots: int | None
    newest: SnapshotInfo | None
    error: str | None
    writer: TierStatus | None


@click.command("status", short_help="Show the tiers of a run, and how each one is.")
@root_argument
@storage_options
@json_option
def command(root: str, as_json: bool) -> None:
    """Show the tiers of the run at ROOT: what each has, and what its writer is doing.

    With a ckpt.yaml, all tiers are asked; with a folder or URL, only that one.
    """
    config = options_of(root)
    repositories = list(map(repository_of, config.tiers))
    answers = ask_tiers.ask(repositories, lambda place: place.list(), ask_tiers.at_most, say_waiting)
    # A nearest tier that does not answer is not asked once more: it may hang.
    near = repositories[0] if answers[0].error is None else None
    status, why = _status(near) if near else (None, None)
    spent = _spent(config, near) if near else None
    holder = read_holder(near.storage) if near else None
    live = LiveWriter.of(config.root_url)
    statuses = {tier.url: tier for tier in status.tiers} if status else {}
    rows = [
        _Row(
            answer.place.storage.url,
            None if answer.value is None else len(answer.value),
            answer.value[-1] if answer.value else None,
            f"[{answer.error.code}] {answer.error.message}" if answer.error else None,
            statuses.pop(answer.place.storage.url, None),
        )
        for answer in answers
    ]
    rows += [_Row(tier.url, None, None, None, tier) for tier in statuses.values()]
    if status is None and live is None and not any(row.newest or row.error for row in rows):
        raise StorageMissingError(
            f"no run at {rows[0].url}", hint="check the path; a run starts with its first snapshot"
        )
    if as_json:
        _print_json(repositories[0].storage.url, holder, status, rows, live, spent)
    else:
        _print(holder, status, rows, why)
        if spent is not None:
            print_text(f"{headline(spent)}: `ckpt goodput` says of what")
        if (replay := replay_of(config.root_url)) is not None:
            print_text(replay.text())
        if live is not None:
            print_text(*live.lines())


@click.command("top", short_help="Show how a run is, again and again.")
@root_argument
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
    cells = [(str(number), *_cells(row)) for number, row in enumerate(rows, 1)]
    print_table(titles, cells, numbers=("snapshots",), ids="newest")
    for number, row in enumerate(rows, 1):
        encoding = f" ({row.writer.encoding})" if row.writer is not None and row.writer.encoding else ""
        print_text(f"tier {number}: {row.url}{encoding}")
        if row.error:
            print_text(f"tier {number} does not answer: {row.error}", fg="red")
        if row.writer is not None and row.writer.state != WORKING:
            said = f"[{row.writer.code}] {row.writer.message}"
            print_text(f"tier {number} failed {age(row.writer.since)}: {said}", fg="red")
    if why:
        print_text(why, fg="red")
    if rows[0].error:
        print_text("what its writer says is at the nearest tier")
    else:
        print_text(f"written by {holder}" if holder else "no process writes it now")
    if status is not None:
        what = "the writer ended" if status.ended else "the writer was active"
        print_text(f"{what} {age(status.written)}")


def _cells(row: _Row) -> tuple[str, ...]:
    status, newest = row.writer or TierStatus(row.url, ""), row.newest
    return (
        "no answer" if row.error else "not asked" if row.snapshots is None else status.state,
        "" if row.snapshots is None else f"{row.snapshots:,}",
        newest.id if newest else status.newest or "",
        age(newest.created) if newest else "",
        f"{count(status.waiting, 'snapshot')}, {units.size(status.waiting_bytes)}" if status.waiting else "",
    )


def _print_json(
    url: str,
    holder: LeaseHolder | None,
    status: WriterStatus | None,
    rows: list[_Row],
    live: LiveWriter | None,
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
