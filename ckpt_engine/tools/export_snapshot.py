"""Plans and writes what a snapshot becomes for other programs: a file or a folder of another format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_engine.errors import ArgumentError, FormatError, StorageMissingError
from ckpt_engine.interop import FOLDERS
from ckpt_engine.observe.units import count
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.choose import Candidate, assemble
from ckpt_engine.store.manifest import OWN_KEY, require_whole
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.tree import require_written_out
from ckpt_engine.tools.new_files import new_file, new_folder
from ckpt_engine.tools.selection import as_dtype, select
from ckpt_engine.tools.write_arrays import write_arrays

MODELS = ("state_dict", "model")
"""Top-level keys of the tensors that are exported by default."""
Write = Callable[[Sources, bool, Callable[[int], object]], tuple[str, ...]]
"""With the places to read from, whether OUT is replaced, and what follows the bytes: does what was planned; notes."""


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


def choose(snapshot: str, holders: Sequence[Repository]) -> Candidate:
    """What to read, and from where. Of a snapshot that is not whole what is asked for may be there all the same."""
    try:
        return assemble(snapshot, holders)
    except (FormatError, StorageMissingError) as err:
        for place in holders:
            with suppress(FormatError, StorageMissingError):
                manifest = place.read(snapshot)
                require_whole(manifest.info, place.storage.url)
                notes = (f"not whole: [{err.code}] {err.message}",)
                return Candidate(manifest.info, manifest, tuple(holders), notes).unpacked()
        raise


def of_rank(snapshot: Candidate, rank: int) -> Candidate:
    """The snapshot as `rank` has it.

    Raises:
        ArgumentError: there is no such rank.
    """
    if rank >= (size := snapshot.manifest.world_size):
        there = "one process" if size == 1 else f"ranks 0 to {size - 1}"
        raise ArgumentError(f"there is no rank {rank}: {snapshot.info.id} was taken by {there}")
    if size == 1:
        return snapshot
    note = f"of {size:,} ranks: what each of them had of its own is that of rank {rank}"
    return replace(snapshot, manifest=snapshot.manifest.as_rank(rank), notes=(*snapshot.notes, note))


def plan_safetensors(snapshot: Candidate, out: Path, dtype: str | None, *, selected: bool) -> tuple[Exported, Write]:
    """What a file of safetensors gets, and what writes it.

    Args:
        dtype: of wider floating-point numbers in the file.
        selected: all that the snapshot has, by its path where that is more than one component; else the first one of
            `MODELS` that it has.

    Raises:
        MismatchError: there are no such tensors, or two would get the same name.
    """
    manifest = snapshot.manifest
    model = next((name for name in MODELS if name in manifest.tree), MODELS[0])
    alone = next(iter(manifest.tree)) if len(manifest.tree) == 1 else None
    chosen = select(manifest, alone if selected else model)
    if dtype is not None:
        chosen = as_dtype(chosen, dtype)
    notes: dict[str, object] = {
        f"{count(len(chosen.tied), 'tied tensor')} stored once; the file's metadata has the other names": chosen.tied,
        f"{count(chosen.left_out, 'value')} that are no tensors left out": chosen.left_out,
        f"stored as bytes, safetensors lacks their dtype: {', '.join(chosen.opaque)}": chosen.opaque,
    }

    def write(sources: Sources, force: bool, advance: Callable[[int], object]) -> tuple[str, ...]:
        with new_file(out, replace=force) as file:
            loss = write_arrays(sources, manifest, chosen, file, advance)
        return (loss.text(dtype),) if dtype is not None else ()

    exported = planned(snapshot, out, "safetensors", len(chosen.arrays), chosen.nbytes)
    return replace(exported, notes=tuple(note for note, concerned in notes.items() if concerned)), write


def planned(snapshot: Candidate, out: Path, form: str, arrays: int, nbytes: int) -> Exported:
    """What an export is to be, before it is written."""
    return Exported(snapshot.info.id, snapshot.sources[0].storage.url, str(out), form, arrays, nbytes, False)


def plan_state(snapshot: Candidate, out: Path, form: str) -> tuple[Exported, Write]:
    """What a file or folder of another format gets, and what writes it.

    Raises:
        CkptError: the format cannot have this state.
    """
    from ckpt_engine.interop import formats, snapshot_trees, torch_files  # torch

    manifest, info, is_folder = snapshot.manifest, snapshot.info, form in FOLDERS
    keeps_own = form in ("accelerate", "transformers")
    tree = {key: node for key, node in manifest.tree.items() if keeps_own or key != OWN_KEY}
    names = snapshot_trees.entries_of(tree)
    exported = planned(snapshot, out, form, len(names), sum(manifest.entries[name].nbytes for name in names))
    if form == "lightning":
        torch_files.require_lightning(manifest)
    if is_folder:
        require_written_out(tree, manifest.entries)
        places = Sources([place.storage for place in snapshot.sources])
        with formats.fitting(form, info.id):
            formats.CHECKS[form](snapshot_trees.outline(places, manifest, tree), info)

    def write(sources: Sources, force: bool, advance: Callable[[int], object]) -> tuple[str, ...]:
        state, notes = snapshot_trees.rebuild(sources, manifest, tree)
        new: Callable[..., AbstractContextManager[Any]] = new_folder if is_folder else new_file
        with new(out, replace=force) as target, formats.fitting(form, info.id):
            notes += formats.WRITERS[form](state, info, target)
        advance(exported.nbytes)
        if not is_folder and (refused := torch_files.why_not_weights_only(out)):
            notes += (f"torch.load needs weights_only=False: {refused}",)
        return notes

    return exported, write
