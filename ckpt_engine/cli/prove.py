"""`ckpt prove`: does a command repeat what a run has recorded behind one of its snapshots?"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ckpt_engine.cli.output import fields_of, json_option, print_answer, print_text
from ckpt_engine.cli.root import open_run, options_of, snapshot_arguments, storage_options
from ckpt_engine.config.rehearsal import Rehearsal
from ckpt_engine.errors import ResumeError
from ckpt_engine.store.names import ParsedId
from ckpt_engine.tools.recorded_steps import recorded_behind
from ckpt_engine.tools.rehearsal_runs import Proof, Runs, scratch_folder


class _BeforeCommand(click.Command):
    """What follows `--` is the command of the run, whatever comes before."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:end])
        if not args[end + 1 :]:
            raise click.UsageError("give the command of the run after --: ckpt prove -- python train.py ...", ctx)
        ctx.params["words"] = tuple(args[end + 1 :])
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- COMMAND..."]


@click.command("prove", cls=_BeforeCommand, short_help="Repeat recorded steps of a run, and compare.")
@snapshot_arguments("[SNAPSHOT]", most=1)
@click.option("--bisect", is_flag=True, help="Where it differs, resume from later snapshots too, to narrow that down.")
@click.option("--timeout", type=float, default=3600.0, show_default=True, help="Seconds that each run may take.")
@click.option("--scratch", type=click.Path(path_type=Path), help="A new folder for snapshots and output, kept.")
@storage_options
@json_option
def command(
    root: str,
    snapshots: tuple[str, ...],
    bisect: bool,
    timeout: float,
    scratch: Path | None,
    as_json: bool,
    words: tuple[str, ...],
) -> None:
    """Repeat the steps that ROOT has recorded after SNAPSHOT, with the run's own COMMAND, and compare.

    COMMAND runs in a scratch folder with a copy of the snapshot, up to the last recorded step; ROOT is only read. Each
    step is compared with what was recorded, and each snapshot of these steps at ROOT is compared bit for bit. For runs
    that ended without a kill, and to find a machine that computes wrongly. Without SNAPSHOT it begins at the newest one
    that has recorded steps after it, with --bisect at the oldest. Ends with exit code 1 if a step differs.
    """
    config = options_of(root)
    run = open_run(root, config)
    recorded = recorded_behind(run)
    if not (found := [one for one in recorded if not snapshots or one.id == run.find(*snapshots)[0]]):
        where = f"snapshot {snapshots[0]}" if snapshots else "any snapshot"
        raise ResumeError(
            f"no steps are recorded after {where} of {config.root_url}",
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
    print_answer(
        {
            "root": config.root_url,
            "exact": proof.resumed is None,
            **fields_of(proof),
            "scratch": scratch and str(place),
        },
        *proof.lines("what the run has behind it"),
        as_json=as_json,
    )
    sys.exit(0 if proof.resumed is None else 1)
