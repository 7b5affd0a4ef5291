"""`ckpt import`: a checkpoint of another program as a snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt_engine.cli.output import json_option, print_json, print_text, progress
from ckpt_engine.cli.root import options_of, repository_of, storage_options
from ckpt_engine.config import Config, Tier, load_config
from ckpt_engine.errors import CkptError, ConfigError, MismatchError
from ckpt_engine.interop import FILES, FOLDERS
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.store.manifest import SnapshotInfo

if TYPE_CHECKING:
    from ckpt_engine.interop.safe_load import Imported

FORMATS = ("auto", *FILES, *FOLDERS)
SAVE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What was, or would be, imported. `snapshot` is None if nothing was written."""

    source: str
    form: str
    root: str
    step: int
    epoch: int | None
    arrays: int
    nbytes: int
    snapshot: str | None = None
    notes: tuple[str, ...] = ()


@click.command("import", short_help="Turn a checkpoint of another program into a snapshot.")
@click.argument("given", metavar="SRC")
@click.argument("root", metavar="DST")
@click.option("--step", type=click.IntRange(min=0), help="The snapshot's step, where SRC does not say it.")
@click.option("--as", "form", type=click.Choice(FORMATS), default="auto", help="What SRC is (default: found out).")
@click.option("--dry-run", is_flag=True, help="Read SRC, say what would be written, and write nothing.")
@storage_options
@json_option
def command(given: str, root: str, step: int | None, form: str, dry_run: bool, as_json: bool) -> None:
    """Turn the checkpoint SRC into a snapshot of the run DST: a folder, a storage URL, or a ckpt.yaml.

    SRC is a Lightning .ckpt, a file of torch.save, or a folder of Accelerate's save_state, of transformers' Trainer
    (checkpoint-N) or of torch.distributed.checkpoint. No code in SRC is run: objects that would need it are refused by
    name. The snapshot appears whole or not at all, as the newest of the run; nothing else in DST changes.
    """
    source = _local(given)
    from ckpt_engine.interop import formats as sources  # torch

    tier = options_of(root).tiers[0]
    there = repository_of(tier).list()
    with progress(f"reading {source.name}", sources.nbytes(source), hidden=as_json) as advance:
        found = sources.read(source, None if form == "auto" else form, advance)
    planned = _plan(found, source, tier.url, step, there)
    if not dry_run:
        with progress(f"writing to {tier.url}", planned.nbytes, hidden=as_json) as advance:
            advance(0)
            planned = replace(planned, snapshot=_save(found, planned, _config(tier, len(there))))
    if as_json:
        print_json(planned)
    else:
        _print(planned)


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


def _config(tier: Tier, there: int) -> Config:
    """The nearest tier, and retention that removes nothing: that is the run's business."""
    nearest = tier.model_dump(mode="json", exclude_unset=True, exclude={"keep"})
    keep = {"last": there + 1}
    return load_config({"tiers": [nearest], "keep": keep, "writer": "thread", "slots": 1, "on_error": "raise"})


def _plan(found: Imported, source: Path, root: str, step: int | None, there: Sequence[SnapshotInfo]) -> ImportResult:
    """What will be written.

    Raises:
        UnstorableLeafError: a leaf cannot be stored; names it.
        MismatchError: the step is not known.
    """
    from ckpt_engine.state.flatten import Flattener  # torch

    chosen = found.step if step is None else step
    if chosen is None:
        raise MismatchError(f"{source} does not say at which step it was saved", hint="give it with --step")
    arrays = []
    for key, node in found.state.items():
        arrays += Flattener().scan(node, (key,)).arrays
        Flattener().describe(node, (key,))
    return ImportResult(
        source=str(source.absolute()),
        form=found.form,
        root=root,
        step=chosen,
        epoch=found.epoch,
        arrays=len(arrays),
        nbytes=sum(array.numel() * array.element_size() for array in arrays),
        notes=(*found.notes, *_about_run(there, chosen)),
    )


def _about_run(there: Sequence[SnapshotInfo], step: int) -> list[str]:
    if not there:
        return []
    found = f"the run has {count(len(there), 'snapshot')}, the newest of step {there[-1].step}"
    return [f"{found}: it resumes from step {step} now"]


def _save(found: Imported, planned: ImportResult, config: Config) -> str:
    from ckpt_engine.checkpointer import Checkpointer  # torch

    notes: Mapping[str, Any] = {
        "trainer": found.form,
        "imported": {"from": planned.source, "as": found.form, "notes": list(found.notes)},
        **found.about,
    }
    with Checkpointer(config) as checkpointer:
        handle = checkpointer.save(found.state, step=planned.step, epoch=planned.epoch, reason="import", notes=notes)
        try:
            return handle.wait(SAVE_SECONDS)
        except CkptError as err:
            # The cause is what helps; the wrapper speaks of the background.
            raise err.__cause__ if isinstance(err.__cause__, CkptError) else err from None


def _print(done: ImportResult) -> None:
    what = f"{count(done.arrays, 'tensor')}, {units.size(done.nbytes)}, step {done.step}"
    if done.snapshot is None:
        print_text(f"would import {done.source} ({done.form}) into {done.root}: {what}")
    else:
        print_text(f"imported {done.source} ({done.form}) as {done.snapshot} at {done.root}: {what}")
    for note in done.notes:
        print_text(f"  {note}")
