"""`ckpt status`: how the tiers of a run are."""

from __future__ import annotations

import time
from contextlib import suppress

import click

from ckpt_engine.cli.output import bar, json_option, print_json, print_table, print_text, say_waiting
from ckpt_engine.cli.prune import places_of
from ckpt_engine.cli.root import options_of, root_argument, storage_options
from ckpt_engine.errors import CkptError
from ckpt_engine.observe import units
from ckpt_engine.observe.units import age, count
from ckpt_engine.tools.recorded_attempts import headline
from ckpt_engine.tools.run_status import RunReading, TierReading, read_run
from ckpt_engine.writer.run_records import TierStatus


@click.command("status", short_help="Show the tiers of a run, and how each one is.")
@root_argument
@storage_options
@json_option
def command(root: str, as_json: bool) -> None:
    """Show the tiers of the run at ROOT: what each has, and what its writer is doing.

    With a ckpt.yaml, all tiers are asked; with a folder or URL, only that one.
    """
    found = read_run(options_of(root), say_waiting)
    if as_json:
        print_json(to_json(found))
    else:
        print_status(found)
        with suppress(CkptError):  # a tier that does not answer is named above, and only a ckpt.yaml says what to keep
            for place in places_of(root):
                overdue = place.plan().remove
                if overdue:
                    there = f"{place.repository.storage.url} has {count(len(overdue), 'snapshot')}"
                    print_text(
                        f"{there} that retention would remove: `ckpt prune {root} --dry-run` names them", fg="red"
                    )


def print_status(found: RunReading) -> None:
    """Writes how a run is as lines of text."""
    titles = ("tier", "state", "snapshots", "newest", "taken", "waiting")
    cells = [(str(number), *_cells(tier)) for number, tier in enumerate(found.tiers, 1)]
    print_table(titles, cells, numbers=("snapshots",), ids="newest")
    for number, tier in enumerate(found.tiers, 1):
        unasked = " (name the ckpt.yaml of the run, and it is asked)" if tier.state == "not asked" else ""
        encoding = f" ({tier.writer.encoding})" if tier.writer is not None and tier.writer.encoding else ""
        print_text(f"tier {number}: {tier.url}{encoding}{unasked}")
        print_text(*tier.troubles(number), fg="red")
    print_text(*found.unread, fg="red")
    print_text(*run_lines(found))


def run_lines(found: RunReading) -> list[str]:
    """How the run is beside what its tiers have, for people."""
    times = found.live.spent.get("times", {}) if found.live is not None else {}
    writer = f"written by {found.holder}" if found.holder else "no process writes it now"
    lines = ["what its writer says is at the nearest tier" if found.tiers[0].error else writer]
    if found.status is not None:
        what = "the writer ended" if found.status.ended else "the writer was active"
        lines.append(f"{what} {age(found.status.written)}")
    if found.spent is not None:
        lines.append(f"{headline(found.spent)}: `ckpt goodput` says of what")
    if overhead := times.get("overhead", 0.0):
        share, budget = units.share(overhead), times.get("budget")
        against = (
            f"{bar(overhead / budget)} {share} of at most {units.share(budget)}" if budget else f"{share}, no budget"
        )
        lines.append(f"overhead {against}; a stall of {units.duration(times.get('stall_each', 0.0))} for each snapshot")
    lines += [f"next snapshot in {units.duration(times['until_next'])}"] if "until_next" in times else []
    lines += [found.replay.text()] if found.replay is not None else []
    return lines + (found.live.lines() if found.live is not None else [])


def _cells(tier: TierReading) -> tuple[str, ...]:
    status, newest = tier.writer or TierStatus(tier.url, ""), tier.newest
    return (
        tier.state,
        "" if tier.snapshots is None else f"{tier.snapshots:,}",
        newest.id if newest else status.newest or "",
        age(newest.created) if newest else "",
        f"{count(status.waiting, 'snapshot')}, {units.size(status.waiting_bytes)}" if status.waiting else "",
    )


def to_json(found: RunReading) -> dict[str, object]:
    """What `print_json` takes."""
    status, spent = found.status, found.spent
    return {
        "root": found.tiers[0].url,
        "holder": found.holder,
        "live": found.live,
        "goodput": spent and spent.goodput,
        "spent": spent and spent.numbers(),
        "writer": status
        and {
            "pid": status.pid,
            "host": status.host,
            "ended": status.ended,
            "age_seconds": time.time() - status.written,
        },
        "tiers": found.tiers,
        "replay": found.replay,
    }
