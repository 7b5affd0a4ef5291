"""`ckpt status`: the tiers of a run, how far each one is, and what is wrong with it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import click

from ckpt_engine.cli.output import age, count, json_option, print_json, print_table, say_waiting
from ckpt_engine.config import load_config
from ckpt_engine.errors import CkptError, StorageMissingError
from ckpt_engine.observe import units
from ckpt_engine.restore import places
from ckpt_engine.store.lease import LeaseHolder, read_holder
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage
from ckpt_engine.writer import control
from ckpt_engine.writer.tier_status import WORKING, TierStatus, WriterStatus, read_status

LIVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Row:
    """One tier: what it has, as asked now (`error`: it does not answer), and what the writer said last."""

    url: str
    snapshots: int | None
    newest: SnapshotInfo | None
    error: str | None
    said: TierStatus | None


@dataclass(frozen=True, slots=True)
class _Live:
    """What the writer of the run on this machine says of itself; `error`: that it does not answer, and how.

    Args:
        trainer: whether its trainer lives.
        held_step, held_age_seconds, held_durable: of the snapshot that it keeps in memory.
        training_step: that the trainer has begun, where it says so.
    """

    pid: int | None
    trainer: bool = False
    held_step: int | None = None
    held_age_seconds: float | None = None
    held_durable: bool = False
    training_step: int | None = None
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
        return "; ".join(parts)


def _live(root_url: str) -> _Live | None:
    try:
        reply = control.ask(root_url, {"what": control.STATUS}, LIVE_SECONDS)
    except (CkptError, OSError) as err:
        return _Live(None, error=str(err))
    if reply is None:
        return None
    body: dict[str, Any] = reply.body
    held, beat, created = body.get("held") or {}, body.get("beat") or {}, body.get("held_created")
    return _Live(
        pid=body.get("pid"),
        trainer=bool(body.get("trainer")),
        held_step=held.get("step"),
        held_age_seconds=None if created is None else max(0.0, time.time() - created),
        held_durable=bool(held.get("durable")),
        training_step=beat.get("step"),
    )


@click.command("status", short_help="Show the tiers of a run, and how each one is.")
@click.argument("root")
@json_option
def command(root: str, as_json: bool) -> None:
    """Show the tiers of the run at ROOT: what each has, and what its writer is doing.

    All tiers are asked if ROOT is a ckpt.yaml; of a folder or URL, that one.
    """
    repositories = [Repository(open_storage(tier.url, tier.for_storage())) for tier in load_config(root).tiers]
    answers = places.ask(repositories, lambda place: place.list(), places.at_most, say_waiting)
    # A nearest tier that does not answer is not asked once more: it may hang.
    near = repositories[0] if answers[0].error is None else None
    status, why = _status(near) if near else (None, None)
    holder = read_holder(near.storage) if near else None
    live = _live(load_config(root).root_url)
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
        _print_json(repositories[0].storage.url, holder, status, rows, live)
    else:
        _print(holder, status, rows, why)
        if live is not None:
            click.echo(live.text())


def _status(repository: Repository) -> tuple[WriterStatus | None, str | None]:
    try:
        return read_status(repository.storage), None
    except CkptError as err:
        return None, str(err)


def _print(holder: LeaseHolder | None, status: WriterStatus | None, rows: list[_Row], why: str | None) -> None:
    titles = ("tier", "state", "snapshots", "newest", "taken", "waiting")
    print_table(titles, [_cells(row) for row in rows], numbers=("snapshots",))
    for row in rows:
        if row.error:
            click.secho(f"{row.url} does not answer: {row.error}", fg="red")
        if row.said is not None and row.said.state != WORKING:
            click.secho(f"{row.url} failed {age(row.said.since)}: [{row.said.code}] {row.said.message}", fg="red")
        if row.said is not None and row.said.encoding:
            click.echo(f"{row.url}: {row.said.encoding}")
    if why:
        click.secho(why, fg="red")
    if rows[0].error:
        click.echo("what its writer says is at the nearest tier")
    else:
        click.echo(f"written by {holder}" if holder else "no process writes it now")
    if status is not None:
        what = "the writer ended" if status.ended else "the writer was heard of"
        click.echo(f"{what} {age(status.written)}")


def _cells(row: _Row) -> tuple[str, ...]:
    said, newest = row.said, row.newest
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
    url: str, holder: LeaseHolder | None, status: WriterStatus | None, rows: list[_Row], live: _Live | None
) -> None:
    print_json(
        {
            "root": url,
            "holder": None if holder is None else asdict(holder),
            "live": None if live is None else asdict(live),
            "writer": None
            if status is None
            else {
                "pid": status.pid,
                "host": status.host,
                "ended": status.ended,
                "age_seconds": time.time() - status.written,
            },
            "tiers": [
                {
                    "url": row.url,
                    "snapshots": row.snapshots,
                    "newest": None if row.newest is None else asdict(row.newest),
                    "error": row.error,
                    "writer": None if row.said is None else asdict(row.said),
                }
                for row in rows
            ],
        }
    )
