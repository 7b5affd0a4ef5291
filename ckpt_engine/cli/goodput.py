"""`ckpt goodput`: what the time of a run went into."""

from __future__ import annotations

from collections import Counter

import click

from ckpt_engine.cli.output import bar, fields_of, json_option, print_json, print_table, print_text
from ckpt_engine.cli.root import options_of, root_argument, storage_options
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.tools.recorded_attempts import MEANINGS, failure_of, headline, history_of
from ckpt_engine.tools.stored_run import repository_of


@click.command("goodput", short_help="Show what the time of a run went into.")
@root_argument
@storage_options
@json_option
def command(root: str, as_json: bool) -> None:
    """Show what the time of the run at ROOT went into, across all its restarts; the sum is wall time.

    Reads the nearest tier. For a run that trains on this machine, the figures go up to now.
    """
    config = options_of(root)
    storage = repository_of(config.tiers[0]).storage
    if not (history := history_of(config, storage)).attempts:
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
                "attempts": [fields_of(one) | {"ended": failure_of(one)} for one in history.attempts],
            }
        )
    else:
        print_text(f"{headline(spent)} at {storage.url}", "", bold=True)
        notes = {**MEANINGS, "slowdown": f"{MEANINGS['slowdown']}, ± {units.duration(2.0 * spent.slowdown_error)}"}
        shares = {name: seconds / (spent.wall or 1.0) for name, seconds in spent.parts.items()}
        cells = [
            (name, units.percent(share), units.duration(spent.parts[name]), bar(share), notes[name])
            for name, share in shares.items()
            if share > 0.0 or name == "productive"
        ]
        print_table(("", "share", "time", "", ""), cells, numbers=("share", "time"))
        if spent.idle > 0.0:
            print_text(
                "", f"ranks waited for each other for {units.percent(spent.idle_share)} of it because of snapshots"
            )
        failures = Counter(
            one.failure
            for one in (*history.attempts[:-1], *(one for one in history.attempts[-1:] if one.end))
            if one.failure
        )
        classes = ", ".join(f"{number} of {kind}" for kind, number in failures.items())
        of = f" ({classes})" if classes else ""
        print_text("", f"{count(len(history.attempts), 'attempt')}, {count(failures.total(), 'failure')}{of}")
        print_text(f"the last attempt {failure_of(history.attempts[-1])}")
