"""`ckpt diff`: where two snapshots differ."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from ckpt_engine.cli.output import count, json_option, print_json
from ckpt_engine.cli.root import LATEST, open_run
from ckpt_engine.restore.choose import Candidate, assemble

SHOWN = 20


@click.command("diff", short_help="Say where two snapshots differ.")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--all", "everything", is_flag=True, help=f"Show every difference, not only the first {SHOWN}.")
@json_option
def command(first: str, second: str, everything: bool, as_json: bool) -> None:
    """Compare two snapshots bit for bit: ROOT#SNAPSHOT each, or ROOT for its latest.

    Tensors, values, random streams and data positions are compared by their place in the state. Tensors whose digests
    are equal are not read. The times that a run measured, which no two runs share, are left out. Ends with exit code 1
    if there is a difference.
    """
    from ckpt_engine.cli.compare import MEASURED, Comparison  # torch

    a, b = _snapshot(first), _snapshot(second)
    comparison = Comparison(a, b)
    found = [one for one in comparison if not one.path.startswith(MEASURED)]
    if as_json:
        rows = [asdict(one) for one in found]
        print_json({"a": a.info.id, "b": b.info.id, "compared": comparison.compared, "differences": rows})
    elif not found:
        click.echo(f"{a.info.id} and {b.info.id} are equal, bit for bit ({count(comparison.compared, 'value')})")
    else:
        for one in found if everything else found[:SHOWN]:
            click.echo(str(one))
        hidden = 0 if everything else max(len(found) - SHOWN, 0)
        more = f", {hidden:,} of them not shown (--all shows them)" if hidden else ""
        click.echo(f"{count(len(found), 'difference')} between {a.info.id} and {b.info.id}{more}")
    if found:
        sys.exit(1)


def _snapshot(name: str) -> Candidate:
    root, _, wanted = name.partition("#")
    return assemble(*open_run(root).find(wanted or LATEST))
