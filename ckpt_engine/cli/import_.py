"""`ckpt import`: a checkpoint of another program as a snapshot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from ckpt_engine.cli.output import json_option, print_answer, progress
from ckpt_engine.cli.root import default_root, options_of, storage_options
from ckpt_engine.errors import ConfigError
from ckpt_engine.interop import FILES, FOLDERS
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.tools.import_checkpoint import config_of, plan_import, save_import
from ckpt_engine.tools.stored_run import repository_of

FORMATS = ("auto", *FILES, *FOLDERS)


@click.command("import", short_help="Turn a checkpoint of another program into a snapshot.")
@click.argument("given", metavar="SRC")
@click.argument("root", metavar="[DST]", required=False)
@click.option("--step", type=click.IntRange(min=0), help="The snapshot's step, if SRC does not have it.")
@click.option("--as", "form", type=click.Choice(FORMATS), default="auto", help="Format of SRC (default: detected).")
@click.option("--dry-run", is_flag=True, help="Read SRC, say what would be written, and write nothing.")
@storage_options
@json_option
def command(given: str, root: str | None, step: int | None, form: str, dry_run: bool, as_json: bool) -> None:
    """Turn the checkpoint SRC into a snapshot of the run DST: a folder, a storage URL, or a ckpt.yaml.

    SRC is a Lightning .ckpt, a file of torch.save, or a folder of Accelerate's save_state, of transformers' Trainer
    (checkpoint-N) or of torch.distributed.checkpoint. No code in SRC is run: objects that would need it are refused by
    name. The snapshot appears whole or not at all, as the newest of the run; nothing else in DST changes.
    """
    source = _local(given)
    from ckpt_engine.interop import formats as sources  # torch

    tier = options_of(root or default_root()).tiers[0]
    there = repository_of(tier).list()
    with progress(f"reading {source.name}", sources.nbytes(source), hidden=as_json) as advance:
        found = sources.read(source, None if form == "auto" else form, advance)
    planned = plan_import(found, source, tier.url, step, there)
    if not dry_run:
        with progress(f"writing to {tier.url}", planned.nbytes, hidden=as_json) as advance:
            advance(0)
            planned = replace(planned, snapshot=save_import(found, planned, config_of(tier, len(there))))
    what = f"{count(planned.arrays, 'tensor')}, {units.size(planned.nbytes)}, step {planned.step}"
    verb, place = "would import", f"into {planned.root}"
    if planned.snapshot is not None:
        verb, place = "imported", f"as {planned.snapshot} at {planned.root}"
    notes = (f"  {note}" for note in planned.notes)
    print_answer(planned, f"{verb} {planned.source} ({planned.form}) {place}: {what}", *notes, as_json=as_json)


def _local(given: str) -> Path:
    """The path that SRC means.

    Raises:
        ConfigError: it is a URL of another machine.
    """
    scheme, there, rest = given.partition("://")
    if there and scheme.lower() != "file":
        raise ConfigError(
            f"SRC is read from a local path, and {given} is a URL",
            hint="copy it to this machine first, and import the copy; `ckpt cp` copies what is a run of ours already",
        )
    return Path(rest if there else given)
