"""`ckpt diff` shows where two snapshots differ.

It also shows which bytes they share.
"""

from __future__ import annotations

import sys

import click

from ckpt_engine.cli.output import json_option, print_answer
from ckpt_engine.cli.root import named, open_run, resume_options, storage_options
from ckpt_engine.config.sections import ResumeChanges
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.restore.choose import Candidate, assemble
from ckpt_engine.tools.origins import Origins, shared_bytes

DIFFERENCES = 20


@click.command("diff", short_help="Say where two snapshots differ.")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--all", "everything", is_flag=True, help=f"Show every difference, not only the first {DIFFERENCES}.")
@resume_options
@storage_options
@json_option
def command(first: str, second: str, everything: bool, section: ResumeChanges | None, as_json: bool) -> None:
    """Compare two snapshots bit for bit: ROOT#SNAPSHOT each, ROOT for its latest, or
    SNAPSHOT of the default ROOT.

    Tensors, values, random streams and data positions are compared by their place in the state. Tensors whose digests
    are equal are not read. The times that a run measured, which no two runs share, are left out. Also shows which
    snapshots' files each of them needs, and what they share. Ends with exit code 1 if there is a difference.

    With --only and --skip parts of both are compared. With --map, --override or --config, A is compared with what B
    becomes for a run that resumes from it with such a section resume.
    """
    from ckpt_engine.tools.changed_snapshot import changed
    from ckpt_engine.tools.compare import Comparison  # torch

    a, b = _snapshot(first), _snapshot(second)
    if section is not None:
        a = changed(a, section.model_copy(update={"map": {}, "override": {}}), strict=False)
        b = changed(b, section)
    comparison = Comparison(a, b)
    found = [one for one in comparison if not one.measured]
    origins = Origins.of(a.manifest), Origins.of(b.manifest)
    shared = shared_bytes(a.manifest, b.manifest)
    if found:
        shown = found if everything else found[:DIFFERENCES]
        hidden = len(found) - len(shown)
        more = f", {hidden:,} of them not shown (--all shows them)" if hidden else ""
        lines = [*map(str, shown), f"{count(len(found), 'difference')} between {a.info.id} and {b.info.id}{more}"]
    else:
        lines = [f"{a.info.id} and {b.info.id} are equal, bit for bit ({count(comparison.compared, 'value')})"]
    if shared or any(len(one.written_by) > 1 for one in origins):
        lines += [*map(str, origins), f"{units.size(shared)} of it is the same data"]
    answer = {
        "a": a.info.id,
        "b": b.info.id,
        "compared": comparison.compared,
        "differences": found,
        "stored": {"a": origins[0], "b": origins[1], "shared_bytes": shared},
    }
    print_answer(answer, *lines, as_json=as_json)
    sys.exit(int(bool(found)))


def _snapshot(name: str) -> Candidate:
    root, wanted = named(name)
    return assemble(*open_run(root).find(*wanted))
