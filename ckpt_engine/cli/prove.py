"""`ckpt prove`: does a command repeat what a run has recorded behind one of its snapshots?"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ckpt_engine.cli.output import fields_of, json_option, print_json, print_text
from ckpt_engine.cli.rehearsal_runs import Proof, Runs, scratch_folder
from ckpt_engine.cli.root import Run, open_run, options_of, storage_options
from ckpt_engine.config.rehearsal import Rehearsal
from ckpt_engine.errors import ResumeError
from ckpt_engine.observe.units import count
from ckpt_engine.store.names import ParsedId
from ckpt_engine.store.rows import read_lives


@click.command("prove", short_help="Repeat recorded steps of a run, and compare.")
@click.argument("root")
@click.option("--step", type=int, help="Of the snapshot to begin with (default: the newest that steps come behind).")
@click.option("--bisect", is_flag=True, help="Where it differs, resume from later snapshots too, to narrow that down.")
@click.option("--timeout", type=float, default=3600.0, show_default=True, help="Seconds that each run may take.")
@click.option("--scratch", type=click.Path(path_type=Path), help="A new folder for snapshots and output, kept.")
@storage_options
@json_option
@click.argument("words", metavar="-- COMMAND", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    root: str,
    step: int | None,
    bisect: bool,
    timeout: float,
    scratch: Path | None,
    as_json: bool,
    words: tuple[str, ...],
) -> None:
    """Repeat the steps that ROOT has recorded behind a snapshot, with the run's own COMMAND, and compare.

    COMMAND runs in a scratch folder with a copy of the snapshot, up to the last recorded step; ROOT is only read. Each
    step is compared with what was recorded, and each snapshot that ROOT has of these steps bit for bit. For runs that
    ended without a kill, and to find a machine that computes wrongly. With --bisect and without --step it begins at the
    oldest snapshot that has recorded steps behind it. Ends with exit code 1 if a step differs.
    """
    config = options_of(root)
    run = open_run(root, config)
    recorded = recorded_behind(run)
    found = list(recorded) if step is None else [one for one in recorded if one.step == step]
    if not found:
        where = "any snapshot" if step is None else f"a snapshot of step {step}"
        raise ResumeError(
            f"nothing is recorded behind {where} of {config.root_url}",
            hint=f"these have recorded steps: {', '.join(str(one.step) for one in recorded) or 'none'}; a run records "
            "its steps unless `replay: off` is set, the newest 4,096 of each process",
        )
    begin = found[0] if bisect else found[-1]
    with scratch_folder(scratch) as place:
        runs = Runs(words, place, timeout)

        def prove(start: ParsedId) -> Proof:
            name = f"from-step-{start.step}"
            if not as_json:
                print_text(f"resumed at step {start.step}, to step {recorded[start]}", err=True)
            Rehearsal(str(place / name), 1, 1).place_of(config.root_url)
            return runs.prove(name, [(run, start)], recorded[start], [config.root_url])

        proof = prove(begin)
        later = [one for one in recorded if one.step > begin.step] if bisect else []
        # A snapshot behind the fault has its outcome already: what comes after it repeats.
        while proof.resumed is not None and (later := [one for one in later if one.step < proof.resumed.step]):
            middle = len(later) // 2
            one = prove(later[middle])
            proof, later = (proof, later[:middle]) if one.resumed is None else (one, later[middle + 1 :])
    if as_json:
        kept = None if scratch is None else str(place)
        print_json({"root": config.root_url, "exact": proof.resumed is None, **fields_of(proof), "scratch": kept})
    else:
        _print(proof)
    sys.exit(0 if proof.resumed is None else 1)


def recorded_behind(run: Run) -> dict[ParsedId, int]:
    """The snapshots with recorded steps behind them, oldest first, and the last such step of each."""
    from ckpt_engine.probe.recorder import NOTE  # torch
    from ckpt_engine.probe.repeated_steps import steps_behind

    lives, found = read_lives((place.storage for place in run.places), 0), {}
    for parsed, holders in run.holders.items() if lives else ():
        saved = holders[0].read(parsed.id).notes.get(NOTE)
        rows = steps_behind(lives, saved["calls"]) if saved else {}
        found[parsed] = max((row.step for row in rows.values()), default=0)
    return {parsed: last for parsed, last in found.items() if last}


def _print(proof: Proof) -> None:
    what = f"{count(proof.snapshots, 'snapshot')}, {count(proof.values, 'value')}"
    if proof.resumed is None:
        print_text(f"exact: resumed at step {proof.killed_after}, equal to what the run has behind it ({what})")
    else:
        print_text(f"NOT EXACT: resumed at step {proof.killed_after}, step {proof.resumed.step} differs")
    if lines := proof.lines():
        print_text(*lines)
