"""`ckpt export`: a snapshot as files that other programs read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from ckpt_engine.cli import downcast, weights
from ckpt_engine.cli.outfile import check_free, check_free_folder, new_file, new_folder
from ckpt_engine.cli.output import count, json_option, print_away, print_json, progress
from ckpt_engine.cli.root import LATEST, Run, open_run
from ckpt_engine.cli.tree import array_leaves, entry_nbytes
from ckpt_engine.errors import FormatError, StorageMissingError
from ckpt_engine.observe import units
from ckpt_engine.restore.as_rank import as_rank, size_of
from ckpt_engine.restore.choose import Candidate, assemble
from ckpt_engine.restore.sources import Sources
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.some_ranks import require_whole
from ckpt_engine.store.tree import require_written_out

MODEL = "state_dict"
FORMATS = ("safetensors", "lightning", "torch", "dcp", "accelerate", "transformers")
FOLDERS = ("dcp", "accelerate", "transformers")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was, or would be, written. `source` is the place it is read from; `notes` are for people."""

    snapshot: str
    source: str
    out: str
    format: str
    arrays: int
    nbytes: int
    written: bool
    notes: tuple[str, ...] = ()


@click.command("export", short_help="Write a snapshot as files for other programs.")
@click.argument("root")
@click.argument("names", nargs=-1, required=True, metavar="[SNAPSHOT] OUT")
@click.option("--to", "form", type=click.Choice(FORMATS), required=True, help="What OUT becomes.")
@click.option("--component", help=f"Top-level key of the state whose tensors are exported (default: {MODEL}).")
@click.option("--all", "everything", is_flag=True, help="Export the tensors of all components.")
@click.option("--dtype", type=click.Choice(downcast.FORMATS), help="Convert wider floating-point numbers to this.")
@click.option("--rank", type=click.IntRange(0), default=0, help="Of several ranks: whose own components go along.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@json_option
def command(
    root: str,
    names: tuple[str, ...],
    form: str,
    component: str | None,
    everything: bool,
    dtype: str | None,
    rank: int,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write SNAPSHOT (default: latest) to OUT: a file, or a folder for dcp, accelerate and transformers.

    \b
    safetensors   the model's weights, for any safetensors reader
    lightning     the training state, for `trainer.fit(ckpt_path=OUT)`
    torch         the whole state, for `torch.load`
    dcp           the whole state, for `torch.distributed.checkpoint`
    accelerate    the training state, for `accelerator.load_state(OUT)`
    transformers  of a transformers model: for `Trainer.train(resume_from_checkpoint=OUT)` and `from_pretrained`

    Every byte is verified, and OUT appears whole or not at all. What only ckpt-engine could put back is left out. The
    shares of several ranks are merged; what each had of its own is exported for one of them.
    """
    if len(names) > 2:
        raise click.UsageError(f"expected [SNAPSHOT] OUT, got {' '.join(names)}")
    if (component is not None or everything) and form != "safetensors":
        raise click.UsageError("--component and --all are for --to safetensors")
    if dtype is not None and form != "safetensors":
        raise click.UsageError("--dtype is for --to safetensors: a training state is exported as it is")
    if component is not None and everything:
        raise click.UsageError("give --component or --all")
    run, out = open_run(root), Path(names[-1])
    chosen = _of_rank(_choose(*run.find(names[0] if len(names) == 2 else LATEST)), rank)
    (check_free_folder if form in FOLDERS else check_free)(out, replace=force)
    if form == "safetensors":
        job = _safetensors(chosen, out, component, everything=everything, dtype=dtype)
    elif form in FOLDERS:
        job = _folder(chosen, out, form)
    else:
        job = _file(chosen, out, form)
    done = replace(job.planned, notes=(*job.planned.notes, *_about_copies(run, chosen)))
    sources = Sources([place.storage for place in chosen.sources])
    if not dry_run:
        with progress(hidden=as_json) as bar:
            task = bar.add_task(f"exporting {out.name}", total=done.nbytes)
            notes = job.write(sources, force, lambda nbytes: bar.advance(task, nbytes))
        done = replace(done, written=True, notes=(*done.notes, *notes, *map(str, sources.repairs)))
    if as_json:
        print_json({"root": run.tiers[0], **asdict(done), "away": [asdict(one) for one in run.away]})
    else:
        _print(done)
        print_away(run.away)


def _choose(snapshot: str, holders: Sequence[Repository]) -> Candidate:
    """What to read, and from where. Of a snapshot that is not whole what is asked for may be there all the same."""
    try:
        return assemble(snapshot, holders)
    except (FormatError, StorageMissingError) as err:
        for place in holders:
            with suppress(FormatError, StorageMissingError):
                manifest = place.read(snapshot)
                require_whole(manifest.info, place.storage.url)
                return Candidate(manifest.info, manifest, tuple(holders), (f"not whole: [{err.code}] {err.message}",))
        raise


def _of_rank(snapshot: Candidate, rank: int) -> Candidate:
    """The snapshot as `rank` has it."""
    size = size_of(snapshot.manifest)
    if rank >= size:
        there = "one process" if size == 1 else f"ranks 0 to {size - 1}"
        raise click.UsageError(f"--rank {rank}: {snapshot.info.id} was taken by {there}")
    if size == 1:
        return snapshot
    note = f"of {size:,} ranks: what each of them had of its own is that of rank {rank}"
    return replace(snapshot, manifest=as_rank(snapshot.manifest, rank), notes=(*snapshot.notes, note))


def _about_copies(run: Run, chosen: Candidate) -> tuple[str, ...]:
    served = chosen.sources[0].storage.url
    return chosen.notes if served == run.tiers[0] else (f"read from {served}", *chosen.notes)


@dataclass(frozen=True, slots=True)
class _Job:
    """`write(sources, replace, advance)` does what `planned` says and returns more notes."""

    planned: Exported
    write: Callable[[Sources, bool, Callable[[int], object]], tuple[str, ...]]


def _safetensors(snapshot: Candidate, out: Path, component: str | None, *, everything: bool, dtype: str | None) -> _Job:
    manifest = snapshot.manifest
    chosen = weights.select_all(manifest) if everything else weights.select_component(manifest, component or MODEL)
    if dtype is not None:
        chosen = weights.as_dtype(chosen, dtype)
    notes = []
    if chosen.tied:
        notes.append(f"{count(len(chosen.tied), 'tied tensor')} stored once; the file's metadata has the other names")
    if chosen.left_out:
        notes.append(f"{count(chosen.left_out, 'value')} that are no tensors left out")
    if chosen.opaque:
        notes.append(f"stored as bytes, safetensors lacks their dtype: {', '.join(chosen.opaque)}")

    def write(sources: Sources, force: bool, advance: Callable[[int], object]) -> tuple[str, ...]:
        with new_file(out, replace=force) as file:
            loss = weights.write(sources, manifest, chosen, file, advance)
        return (loss.text(dtype),) if dtype is not None else ()

    planned = _planned(snapshot, out, "safetensors", len(chosen.arrays), chosen.nbytes)
    return _Job(replace(planned, notes=tuple(notes)), write)


def _planned(snapshot: Candidate, out: Path, form: str, arrays: int, nbytes: int) -> Exported:
    return Exported(snapshot.info.id, snapshot.sources[0].storage.url, str(out), form, arrays, nbytes, False)


def _file(snapshot: Candidate, out: Path, form: str) -> _Job:
    from ckpt_engine.convert import folders, lightning_file, rebuilt, torch_file  # torch

    manifest = snapshot.manifest
    if form == "lightning":
        lightning_file.require_lightning(manifest)
    tree = rebuilt.foreign_tree(manifest)
    planned = _planned_tree(snapshot, out, form, tree)

    def write(sources: Sources, force: bool, advance: Callable[[int], object]) -> tuple[str, ...]:
        state, notes = rebuilt.rebuild(sources, manifest, tree)
        with new_file(out, replace=force) as file, folders.fitting(form, snapshot.info.id):
            torch_file.write(state, file)
        advance(planned.nbytes)
        refused = torch_file.why_not_weights_only(out)
        return (*notes, f"torch.load needs weights_only=False: {refused}") if refused else notes

    return _Job(planned, write)


def _folder(snapshot: Candidate, out: Path, form: str) -> _Job:
    from ckpt_engine.convert import folders, rebuilt  # torch

    manifest, info = snapshot.manifest, snapshot.info
    tree = rebuilt.foreign_tree(manifest) if form == "dcp" else dict(manifest.tree)
    planned = _planned_tree(snapshot, out, form, tree)
    places = Sources([place.storage for place in snapshot.sources])
    require_written_out(tree, manifest.entries)
    with folders.fitting(form, info.id):
        folders.CHECKS[form](rebuilt.outline(places, manifest, tree), info)

    def write(sources: Sources, force: bool, advance: Callable[[int], object]) -> tuple[str, ...]:
        state, notes = rebuilt.rebuild(sources, manifest, tree)
        with new_folder(out, replace=force) as folder, folders.fitting(form, info.id):
            notes += folders.WRITERS[form](state, info, folder)
        advance(planned.nbytes)
        return notes

    return _Job(planned, write)


def _planned_tree(snapshot: Candidate, out: Path, form: str, tree: Mapping[str, Any]) -> Exported:
    names = list(dict.fromkeys(leaf.entry for leaf in array_leaves(tree)))
    nbytes = sum(entry_nbytes(snapshot.manifest.entries[name]) for name in names)
    return _planned(snapshot, out, form, len(names), nbytes)


def _print(done: Exported) -> None:
    verb = "wrote" if done.written else "would write"
    click.echo(f"{verb} {done.out}: {count(done.arrays, 'tensor')}, {units.size(done.nbytes)} of {done.snapshot}")
    for note in done.notes:
        click.echo(f"  {note}")
