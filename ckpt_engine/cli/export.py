"""`ckpt export`: a snapshot as files that other programs read. No torch.

One safetensors file gets the arrays, verified on the way. Tied tensors are stored once, as
`safetensors.torch.save_model` does: the metadata maps each other name to the stored one, and
`safetensors.torch.load_model` ties them again. A smaller floating-point format is for exported files only, and what it
loses is counted and shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np

from ckpt_engine.cli.outline import OutlineLeaf, array_leaves, leaves
from ckpt_engine.cli.output import (
    check_free,
    fields_of,
    json_option,
    new_file,
    new_folder,
    print_away,
    print_json,
    print_text,
    progress,
)
from ckpt_engine.cli.root import LATEST, open_run, storage_options
from ckpt_engine.errors import CorruptError, FormatError, MismatchError, StorageMissingError
from ckpt_engine.interop import FILES, FOLDERS
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.ranks.boxes import Box, boxes_of
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.choose import Candidate, assemble
from ckpt_engine.store import container
from ckpt_engine.store.manifest import Entry, Manifest, require_whole
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.tree import require_written_out

FLOAT_FORMATS = ("float32", "bfloat16", "float16")
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_WIDE: dict[str, np.dtype[Any]] = {"float64": np.dtype("<f8"), "float32": np.dtype("<f4")}


def is_wider(dtype: str, target: str) -> bool:
    """Whether numbers of `dtype` lose something in `target`: only those are converted."""
    return dtype in _WIDE and _BYTES[dtype] > _BYTES[target]


@dataclass(slots=True)
class Loss:
    """What was lost until now.

    Args:
        largest_error: the largest absolute difference of a number that stays finite.
        overflowed: finite numbers that became infinite.
    """

    largest_error: float = 0.0
    overflowed: int = 0

    def text(self, target: str) -> str:
        """For people."""
        more = f"; {self.overflowed:,} numbers are too large for it and became infinite" * (self.overflowed > 0)
        return f"converted to {target}: numbers differ by at most {self.largest_error:.3g}{more}"


def narrow(data: bytes | bytearray, dtype: str, target: str, loss: Loss) -> bytes:
    """The same numbers in `target`, rounded to nearest, ties to even, as torch does.

    Args:
        data: numbers of `dtype`, little endian, for which `is_wider` holds.
        loss: takes in what is lost.
    """
    wide = np.frombuffer(data, _WIDE[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        if target == "bfloat16":
            bits = _bfloat16(wide.astype("<f4"))
            found, back = bits.tobytes(), (bits.astype("<u4") << 16).view("<f4")
        else:
            small = wide.astype("<f2" if target == "float16" else "<f4")
            found, back = small.tobytes(), small
        finite = np.isfinite(wide)
        stays = finite & np.isfinite(back)
        error = np.abs(back[stays].astype("<f8") - wide[stays].astype("<f8"))
    loss.largest_error = max(loss.largest_error, float(error.max(initial=0.0)))
    loss.overflowed += int(finite.sum() - stays.sum())
    return found


def _bfloat16(numbers: np.ndarray[tuple[int], np.dtype[np.float32]]) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    bits = numbers.view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # never overflows but for NaN
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded).astype("<u2")


MODELS = ("state_dict", "model")
FORMATS = ("safetensors", *FILES, *FOLDERS)


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
@click.option("--component", help=f"Top-level key of the tensors to export (default: {' or '.join(MODELS)}).")
@click.option("--all", "everything", is_flag=True, help="Export the tensors of all components.")
@click.option("--dtype", type=click.Choice(FLOAT_FORMATS), help="Convert wider floating-point numbers to this.")
@click.option("--rank", type=click.IntRange(0), default=0, help="Of several ranks: whose own components go along.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@storage_options
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
    has_component, is_state = component is not None, form != "safetensors"
    for applies, why in (
        (len(names) > 2, f"expected [SNAPSHOT] OUT, got {' '.join(names)}"),
        (is_state and (has_component or everything), "--component and --all are for --to safetensors"),
        (is_state and dtype, "--dtype is for --to safetensors: a training state is exported as it is"),
        (has_component and everything, "give --component or --all"),
    ):
        if applies:
            raise click.UsageError(why)
    run, out = open_run(root), Path(names[-1])
    chosen = _of_rank(_choose(*run.find(names[0] if len(names) == 2 else LATEST)), rank)
    check_free(out, replace=force, folder=form in FOLDERS)
    if form == "safetensors":
        planned, write = _safetensors(chosen, out, component, everything=everything, dtype=dtype)
    else:
        planned, write = _state(chosen, out, form)
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
                notes = (f"not whole: [{err.code}] {err.message}",)
                return Candidate(manifest.info, manifest, tuple(holders), notes).unpacked()
        raise


def _of_rank(snapshot: Candidate, rank: int) -> Candidate:
    """The snapshot as `rank` has it."""
    size = snapshot.manifest.world_size
    if rank >= size:
        there = "one process" if size == 1 else f"ranks 0 to {size - 1}"
        raise click.UsageError(f"--rank {rank}: {snapshot.info.id} was taken by {there}")
    if size == 1:
        return snapshot
    note = f"of {size:,} ranks: what each of them had of its own is that of rank {rank}"
    return replace(snapshot, manifest=snapshot.manifest.as_rank(rank), notes=(*snapshot.notes, note))


Write = Callable[[Sources, bool, Callable[[int], object]], tuple[str, ...]]
"""With the places to read from, whether OUT is replaced, and what follows the bytes: does what was planned; notes."""


def _safetensors(
    snapshot: Candidate, out: Path, component: str | None, *, everything: bool, dtype: str | None
) -> tuple[Exported, Write]:
    manifest = snapshot.manifest
    component = component or next((name for name in MODELS if name in manifest.tree), MODELS[0])
    chosen = select_all(manifest) if everything else select_component(manifest, component)
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

    planned = _planned(snapshot, out, "safetensors", len(chosen.arrays), chosen.nbytes)
    return replace(planned, notes=tuple(note for note, concerned in notes.items() if concerned)), write


def _planned(snapshot: Candidate, out: Path, form: str, arrays: int, nbytes: int) -> Exported:
    return Exported(snapshot.info.id, snapshot.sources[0].storage.url, str(out), form, arrays, nbytes, False)


def _state(snapshot: Candidate, out: Path, form: str) -> tuple[Exported, Write]:
    from ckpt_engine.interop import formats, safe_load, state_parts  # torch

    manifest, info, is_folder = snapshot.manifest, snapshot.info, form in FOLDERS
    tree = dict(manifest.tree) if form in ("accelerate", "transformers") else state_parts.foreign_tree(manifest)
    names = state_parts.entries_of(tree)
    planned = _planned(snapshot, out, form, len(names), sum(manifest.entries[name].nbytes for name in names))
    if form == "lightning":
        safe_load.require_lightning(manifest)
    if is_folder:
        require_written_out(tree, manifest.entries)
        places = Sources([place.storage for place in snapshot.sources])
        with formats.fitting(form, info.id):
            formats.CHECKS[form](state_parts.outline(places, manifest, tree), info)

    def write(sources: Sources, force: bool, advance: Callable[[int], object]) -> tuple[str, ...]:
        state, notes = state_parts.rebuild(sources, manifest, tree)
        new: Callable[..., AbstractContextManager[Any]] = new_folder if is_folder else new_file
        with new(out, replace=force) as target, formats.fitting(form, info.id):
            notes += formats.WRITERS[form](state, info, target)
        advance(planned.nbytes)
        if not is_folder and (refused := safe_load.why_not_weights_only(out)):
            notes += (f"torch.load needs weights_only=False: {refused}",)
        return notes

    return planned, write


def _print(done: Exported) -> None:
    verb = "wrote" if done.written else "would write"
    print_text(f"{verb} {done.out}: {count(done.arrays, 'tensor')}, {units.size(done.nbytes)} of {done.snapshot}")
    for note in done.notes:
        print_text(f"  {note}")


_BLOCK_BYTES = 4 << 20
_ARRAY_KINDS = ("tensor", "sharded", "ndarray")


@dataclass(frozen=True, slots=True)
class ExportedArray:
    """One array to write: its name in the file and where its bytes come from; `boxes`: where it is not in C order.

    Args:
        dtype: in the file.
        view: the part of the entry that it is, as its node says.
        stored: in the snapshot, if that is another one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    entry: Entry
    entry_name: str
    view: Mapping[str, Any] | None
    boxes: tuple[Box, ...] = ()
    stored: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Selection:
    """What goes into the file.

    Args:
        tied: other names → the stored name of the same array.
        left_out: values of the selected part that are no arrays.
    """

    arrays: tuple[ExportedArray, ...]
    tied: Mapping[str, str]
    left_out: int

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def opaque(self) -> tuple[str, ...]:
        """Arrays whose dtype safetensors lacks; they are stored as bytes."""
        return tuple(array.name for array in self.arrays if array.dtype not in container.DTYPES)


def as_dtype(selection: Selection, target: str) -> Selection:
    """The selection with its wider floating-point numbers in the format `target`."""
    arrays = [
        replace(array, dtype=target, stored=array.dtype) if is_wider(array.dtype, target) else array
        for array in selection.arrays
    ]
    return replace(selection, arrays=_aligned(arrays))


def item_bytes(dtype: str) -> int:
    """Bytes per element of a torch dtype."""
    return container.item_bytes(dtype) or 1


def select_component(manifest: Manifest, component: str) -> Selection:
    """The arrays of one component, named by their keys below it, joined by ".".

    Raises:
        MismatchError: there is no such component, it has no arrays, or two arrays would get the same name.
    """
    if component not in manifest.tree:
        names = ", ".join(name or "(the whole state)" for name in manifest.tree)
        raise MismatchError(
            f"{manifest.info.id} has no component {component!r}; it has: {names}",
            hint="name one with --component, or take everything with --all",
        )
    return _select(manifest, manifest.tree[component], lambda leaf: ".".join(leaf.path))


def select_all(manifest: Manifest) -> Selection:
    """Every array of the state, named by its path, joined by "/".

    Raises:
        MismatchError: as `select_component`.
    """
    return _select(manifest, dict(manifest.tree), lambda leaf: "/".join(leaf.path))


def write_arrays(
    sources: Sources, manifest: Manifest, selection: Selection, out: BinaryIO, advance: Callable[[int], object]
) -> Loss:
    """Write the file; `advance` gets the bytes written. What conversion has lost.

    Raises:
        CorruptError: the snapshot is damaged in all sources; names the entry.
        NewerFormatError: it is encoded in a way this version does not know.
    """
    rows = [(a.name, *container.container_form(a.dtype, a.shape, a.nbytes), a.nbytes) for a in selection.arrays]
    metadata = {"format": "pt", **selection.tied}
    metadata |= {
        f"ckpt-engine.{a.name}": f"{a.dtype} {list(a.shape)}"
        for a in selection.arrays
        if a.dtype not in container.DTYPES
    }
    out.write(container.build_header(rows, metadata))
    loss = Loss()
    views: dict[str, bytearray] = {}
    for array in selection.arrays:
        blocks = _blocks(sources, manifest, array)
        if array.view is not None:  # thousands of them may lie in one entry
            if array.entry_name not in views:
                views[array.entry_name] = bytearray().join(blocks)
            blocks = iter((views[array.entry_name],))
        for stored in _in_order(array, blocks):
            block = stored if array.stored is None else narrow(stored, array.stored, array.dtype, loss)
            out.write(block)
            advance(len(block))
    return loss


def _select(manifest: Manifest, node: Any, name_of: Callable[[OutlineLeaf], str]) -> Selection:
    require_written_out(node, manifest.entries)
    stored: dict[tuple[str, str], ExportedArray] = {}
    tied: dict[str, str] = {}
    taken: set[str] = set()
    for leaf in array_leaves(node):
        if leaf.node["$"] not in _ARRAY_KINDS:
            continue
        array = _array(manifest, leaf, name_of(leaf))
        if array.name in taken or array.name == "__metadata__":
            raise MismatchError(f"two arrays of {manifest.info.id} would be called {array.name!r} in the file")
        taken.add(array.name)
        same = stored.setdefault((array.entry_name, repr(leaf.node.get("view"))), array)
        if same is not array:
            tied[array.name] = same.name
    if not stored:
        raise MismatchError(f"there are no tensors in this part of {manifest.info.id}")
    others = [one for one in leaves(node) if not isinstance(one, dict) or one.get("$") not in _ARRAY_KINDS]
    return Selection(_aligned(stored.values()), tied, len(others))


def _aligned(arrays: Iterable[ExportedArray]) -> tuple[ExportedArray, ...]:
    """Large items first: every array is then aligned without holes, which the format forbids."""
    return tuple(sorted(arrays, key=lambda array: -item_bytes(array.dtype)))


def _array(manifest: Manifest, leaf: OutlineLeaf, name: str) -> ExportedArray:
    entry = manifest.entries[leaf.entry]
    view = leaf.node.get("view")
    if view is None:
        boxes = boxes_of(leaf.node, entry.shape)
        return ExportedArray(name, entry.dtype, entry.shape, entry, leaf.entry, None, boxes if len(boxes) > 1 else ())
    return ExportedArray(name, view["dtype"], tuple(view["shape"]), entry, leaf.entry, view)


def _blocks(sources: Sources, manifest: Manifest, array: ExportedArray) -> Iterator[bytearray]:
    """The entry's bytes, piece by piece, each verified."""
    decoder = sources.decoder(manifest)
    for start, piece in array.entry.placed():
        block = bytearray(piece.raw_nbytes)
        try:
            decoder.read(array.entry_name, start, piece, memoryview(block))
        except CorruptError as err:
            file = manifest.files[piece.file].name
            hint = "`ckpt verify` shows which snapshots are whole"
            raise CorruptError(f"{array.entry_name!r} in {file} is not what was written", hint=hint) from err
        yield block


def _in_order(array: ExportedArray, blocks: Iterator[bytearray]) -> Iterator[bytes | bytearray]:
    """The bytes of an array in C order."""
    if array.view is not None:
        yield from _cut_view(array, array.view, b"".join(blocks))
    elif array.boxes:
        yield _put_together(array, b"".join(blocks))
    else:
        yield from blocks


def _put_together(array: ExportedArray, stored: bytes) -> bytes:
    """The bytes of an array whose boxes lie one behind another."""
    size = item_bytes(array.stored or array.dtype)
    out = np.empty((*array.shape, size), np.uint8)
    whole, at = Box.whole(array.shape), 0
    for box in array.boxes:
        end = at + box.count * size
        out[box.slices(whole)] = np.frombuffer(stored[at:end], np.uint8).reshape(*box.shape, size)
        at = end
    return out.tobytes()


def _cut_view(array: ExportedArray, view: Mapping[str, Any], whole: bytes) -> Iterator[bytes]:
    """The bytes of a view in C order; a few at a time, as it may repeat what it has."""
    size = item_bytes(array.stored or array.dtype)
    strides = (*(step * size for step in view["stride"]), 1)
    raw = np.frombuffer(whole, np.uint8, offset=view["byte_offset"])
    yield from _in_blocks(np.lib.stride_tricks.as_strided(raw, (*array.shape, size), strides, writeable=False))


def _in_blocks(rows: Any) -> Iterator[bytes]:
    if rows.nbytes <= _BLOCK_BYTES:
        yield rows.tobytes()
        return
    step = _BLOCK_BYTES // rows[0].nbytes
    for start in range(0, len(rows), step or 1):
        yield from (rows[start : start + step].tobytes(),) if step else _in_blocks(rows[start])
