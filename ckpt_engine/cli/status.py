"""`ckpt status`: the tiers of a run, how far each one is, and what is wrong with it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import click

from ckpt_engine.cli.output import age, count, json_option, print_json, print_table
from ckpt_engine.config import load_config
from ckpt_engine.errors import CkptError, StorageMissingError
from ckpt_engine.observe import units
from ckpt_engine.persist.status import WORKING, TierStatus, WriterStatus, read_status
from ckpt_engine.restore import places
from ckpt_engine.store.lease import Holder, read_holder
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage

ANSWER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Row:
    """One tier: what it has, as asked now (`error`: it does not answer), and what the writer said last."""

    url: str
    snapshots: int | None
    newest: SnapshotInfo | None
    error: str | None
    said: TierStatus | None


@click.command("status", short_help="Show the tiers of a run, and how each one is.")
@click.argument("root")
@json_option
def command(root: str, as_json: bool) -> None:
    """Show the tiers of the run at ROOT: what each has, and what its writer is doing.

    All tiers are asked if ROOT is a ckpt.yaml; of a folder or URL, that one.
    """
    repositories = [Repository(open_storage(tier.url, tier.for_storage())) for tier in load_config(root).tiers]
    answers = places.ask(repositories, lambda place: place.list(), ANSWER_SECONDS)
    # A nearest tier that does not answer is not asked once more: it may hang.
    near = repositories[0] if answers[0].error is None else None
    status, why = _status(near) if near else (None, None)
    holder = read_holder(near.storage) if near else None
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
    if status is None and not any(row.newest or row.error for row in rows):
        raise StorageMissingError(
            f"no run at {rows[0].url}", hint="check the path; a run starts with its first snapshot"
        )
    if as_json:
        _print_json(repositories[0].storage.url, holder, status, rows)
    else:
        _print(holder, status, rows, why)


def _status(repository: Repository) -> tuple[WriterStatus | None, str | None]:
    try:
        return read_status(repository.storage), None
    except CkptError as err:
        return None, str(err)


def _print(holder: Holder | None, status: WriterStatus | None, rows: list[_Row], why: str | None) -> None:
    titles = ("tier", "state", "snapshots", "newest", "taken", "waiting")
    print_table(titles, [_cells(row) for row in rows], numbers=("snapshots",))
    for row in rows:
        if row.error:
            click.secho(f"{row.url} does not answer: {row.error}", fg="red")
        if row.said is not None and row.said.state != WORKING:
            click.secho(f"{row.url} failed {age(row.said.since)}: [{row.said.code}] {row.said.message}", fg="red")
    if why:
        click.secho(why, fg="red")
    if rows[0].error:
        click.echo("what its writer says is at the nearest tier")
    else:
        click.echo(f"written by {holder}" if holder else "nobody writes it now")
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


def _print_json(url: str, holder: Holder | None, status: WriterStatus | None, rows: list[_Row]) -> None:
    print_json(
        {
            "root": url,
            "holder": None if holder is None else asdict(holder),
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
