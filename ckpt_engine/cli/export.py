"""`ckpt export`: a snapshot as a file that other programs read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from ckpt_engine.cli import weights
from ckpt_engine.cli.outfile import check_free, new_file
from ckpt_engine.cli.output import count, json_option, print_json, progress
from ckpt_engine.cli.root import LATEST, find_snapshot, open_root
from ckpt_engine.cli.tree import entry_nbytes
from ckpt_engine.observe import units
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.storage.base import Storage

MODEL = "state_dict"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was, or would be, written. `notes` are for people."""

    snapshot: str
    out: str
    format: str
    arrays: int
    nbytes: int
    written: bool
    notes: tuple[str, ...] = ()


@click.command("export")
@click.argument("root")
@click.argument("names", nargs=-1, required=True, metavar="[SNAPSHOT] OUT")
@click.option("--to", "form", type=click.Choice(["safetensors", "lightning"]), required=True, help="What OUT becomes.")
@click.option("--component", help=f"Top-level key of the state whose tensors are exported (default: {MODEL}).")
@click.option("--all", "everything", is_flag=True, help="Export the tensors of all components.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@json_option
def command(
    root: str,
    names: tuple[str, ...],
    form: str,
    component: str | None,
    everything: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write SNAPSHOT (default: latest) to the file OUT.

    safetensors: the model's weights, for any safetensors reader. lightning: the whole training state without what only
    ckpt-engine needs, for `trainer.fit(ckpt_path=OUT)`. Every byte is verified, and OUT appears whole or not at all.
    """
    if len(names) > 2:
        raise click.UsageError(f"expected [SNAPSHOT] OUT, got {' '.join(names)}")
    if (component is not None or everything) and form == "lightning":
        raise click.UsageError("--component and --all are for --to safetensors")
    if component is not None and everything:
        raise click.UsageError("give --component or --all")
    repository, out = open_root(root), Path(names[-1])
    manifest = repository.read(find_snapshot(repository, names[0] if len(names) == 2 else LATEST))
    check_free(out, replace=force)
    job = (
        _lightning(manifest, out)
        if form == "lightning"
        else _safetensors(manifest, out, component, everything=everything)
    )
    done = job.planned
    if not dry_run:
        with progress(hidden=as_json) as bar:
            task = bar.add_task(f"exporting {out.name}", total=done.nbytes)
            notes = job.write(repository.storage, force, lambda nbytes: bar.advance(task, nbytes))
        done = replace(done, written=True, notes=(*done.notes, *notes))
    if as_json:
        print_json({"root": repository.storage.url, **asdict(done)})
    else:
        _print(done)


@dataclass(frozen=True, slots=True)
class _Job:
    """`write(storage, replace, advance)` does what `planned` says and returns more notes."""

    planned: Exported
    write: Callable[[Storage, bool, Callable[[int], object]], tuple[str, ...]]


def _safetensors(manifest: Manifest, out: Path, component: str | None, *, everything: bool) -> _Job:
    chosen = weights.select_all(manifest) if everything else weights.select_component(manifest, component or MODEL)
    notes = []
    if chosen.tied:
        notes.append(f"{count(len(chosen.tied), 'tied tensor')} stored once; the file's metadata has the other names")
    if chosen.left_out:
        notes.append(f"{count(chosen.left_out, 'value')} that are no tensors left out")
    if chosen.opaque:
        notes.append(f"stored as bytes, safetensors lacks their dtype: {', '.join(chosen.opaque)}")

    def write(storage: Storage, force: bool, advance: Callable[[int], object]) -> tuple[str, ...]:
        with new_file(out, replace=force) as file:
            weights.write(storage, manifest, chosen, file, advance)
        return ()

    planned = Exported(
        manifest.info.id, str(out), "safetensors", len(chosen.arrays), chosen.nbytes, False, tuple(notes)
    )
    return _Job(planned, write)


def _lightning(manifest: Manifest, out: Path) -> _Job:
    from ckpt_engine.cli import lightning_file  # torch

    lightning_file.require_lightning(manifest)

    def write(storage: Storage, force: bool, advance: Callable[[int], object]) -> tuple[str, ...]:
        with new_file(out, replace=force) as file:
            notes = lightning_file.write(storage, manifest, file)
        advance(planned.nbytes)
        refused = lightning_file.why_not_weights_only(out)
        return (*notes, f"torch.load needs weights_only=False: {refused}") if refused else notes

    names = lightning_file.exported_entries(manifest)
    nbytes = sum(entry_nbytes(manifest.entries[name]) for name in names)
    planned = Exported(manifest.info.id, str(out), "lightning", len(names), nbytes, False)
    return _Job(planned, write)


def _print(done: Exported) -> None:
    verb = "wrote" if done.written else "would write"
    click.echo(f"{verb} {done.out}: {count(done.arrays, 'tensor')}, {units.size(done.nbytes)} of {done.snapshot}")
    for note in done.notes:
        click.echo(f"  {note}")
