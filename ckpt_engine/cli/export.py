"""`ckpt export`: a snapshot as files that other programs read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from ckpt_engine.cli.output import fields_of, json_option, print_away, print_json, print_text, progress
from ckpt_engine.cli.root import named, open_run, resume_options, storage_options
from ckpt_engine.config.sections import ResumeChanges
from ckpt_engine.interop import FILES, FOLDERS
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.tools.export_snapshot import choose, of_rank, plan_safetensors, plan_state
from ckpt_engine.tools.float_formats import FLOAT_FORMATS
from ckpt_engine.tools.new_files import check_free

PEFT = "peft"
FORMATS = ("safetensors", *FILES, *FOLDERS, PEFT)
SUFFIXES = {".safetensors": "safetensors", ".ckpt": "lightning", ".pt": "torch", ".pth": "torch"}


@click.command("export", short_help="Write a snapshot as files for other programs.")
@click.argument("words", nargs=-1, required=True, metavar="[ROOT] [SNAPSHOT] OUT")
@click.option("--to", "form", type=click.Choice(FORMATS), help="Format of OUT (default: from the end of its name).")
@click.option("--dtype", type=click.Choice(FLOAT_FORMATS), help="Convert wider floating-point numbers to this type.")
@click.option(
    "--rank", type=click.IntRange(0), default=0, help="With several ranks: export the own components of this one."
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@resume_options
@storage_options
@json_option
def command(
    words: tuple[str, ...],
    form: str | None,
    dtype: str | None,
    rank: int,
    force: bool,
    dry_run: bool,
    section: ResumeChanges | None,
    as_json: bool,
) -> None:
    """Write SNAPSHOT (default: latest) to OUT: a file, or a folder for dcp, accelerate, transformers and peft.

    \b
    safetensors   the model's weights, for any safetensors reader
    lightning     the training state, for `trainer.fit(ckpt_path=OUT)`
    torch         the whole state, for `torch.load`
    dcp           the whole state, for `torch.distributed.checkpoint`
    accelerate    the training state, for `accelerator.load_state(OUT)`
    transformers  of its models: `Trainer.train(resume_from_checkpoint=OUT)`
    peft          the adapters, for `PeftModel.from_pretrained(base, OUT)`

    Every byte is verified, and OUT appears whole or not at all. State that only ckpt-engine can restore is left out.
    The parts of several ranks are merged; what differs between ranks is exported for one of them.

    With --only, --skip, --map and --override it is the state that the section resume of a ckpt.yaml makes of the
    snapshot. Without --only a file of safetensors has the model alone.
    """
    *rest, out_name = words
    form = form or SUFFIXES.get(Path(out_name).suffix, "")
    root, wanted = named(rest[0] if rest else None)
    wanted += tuple(rest[1:])
    for applies, why in (
        (
            not form,
            f"Missing option '--to': {out_name} does not end with {', '.join(SUFFIXES)}; "
            f"name one of {', '.join(FORMATS)}",
        ),
        (len(wanted) > 1, f"expected [ROOT] [SNAPSHOT] OUT, got {' '.join(words)}"),
        (dtype and form != "safetensors", "--dtype is for --to safetensors: a training state is exported as it is"),
    ):
        if applies:
            raise click.UsageError(why)
    run, out = open_run(root), Path(out_name)
    chosen = of_rank(choose(*run.find(*wanted)), rank)
    if section is not None:
        from ckpt_engine.tools.changed_snapshot import changed  # torch

        chosen = changed(chosen, section)
    check_free(out, replace=force, folder=form in (*FOLDERS, PEFT))
    if form == PEFT:
        from ckpt_engine.tools.export_adapters import plan_adapters  # torch

        planned, write = plan_adapters(chosen, out)
    elif form == "safetensors":
        planned, write = plan_safetensors(chosen, out, dtype, selected=section is not None and section.only is not None)
    else:
        planned, write = plan_state(chosen, out, form)
    served = chosen.sources[0].storage.url
    origin = () if served == run.tiers[0] else (f"read from {served}",)
    done = replace(planned, notes=(*planned.notes, *origin, *chosen.notes))
    sources = Sources([place.storage for place in chosen.sources])
    if not dry_run:
        with progress(f"exporting {out.name}", done.nbytes, hidden=as_json) as advance:
            notes = write(sources, force, advance)
        done = replace(done, written=True, notes=(*done.notes, *notes, *map(str, sources.repairs)))
    if as_json:
        print_json({"root": run.tiers[0], **fields_of(done), "away": run.away})
    else:
        verb = "wrote" if done.written else "would write"
        what = f"{count(done.arrays, 'tensor')}, {units.size(done.nbytes)} of {done.snapshot}"
        print_text(f"{verb} {done.out}: {what}", *(f"  {note}" for note in done.notes))
        print_away(run.away)
