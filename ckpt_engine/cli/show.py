"""`ckpt show`: what is inside one snapshot, from its manifest (docs/format.md, "Tree"); no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import click

from ckpt_engine.cli.output import json_option, metrics, print_away, print_beside, print_json, print_table, print_text
from ckpt_engine.cli.root import open_run, snapshot_arguments, storage_options
from ckpt_engine.errors import CkptError
from ckpt_engine.observe import units
from ckpt_engine.observe.resume_report import replay_of
from ckpt_engine.observe.units import age, count
from ckpt_engine.store.decode import decoder_of
from ckpt_engine.store.manifest import RANKS, DataFile, Manifest
from ckpt_engine.store.repository import Repository, fork_of
from ckpt_engine.store.tree import unpacked
from ckpt_engine.tools.origins import Origins, owner_of
from ckpt_engine.tools.outline import array_leaves, children, leaves, own_nbytes
from ckpt_engine.tools.stored_run import Run

LARGEST = 10
"""Entries that are listed unless all are asked for."""
SHOWN_IDS = 3
SHOWN_FILES = 8
MAX_DEPTH = 2
MAX_CHILDREN = 8


@click.command("show", short_help="Show what is inside one snapshot.")
@snapshot_arguments("[SNAPSHOT]", most=1)
@click.option("--all", "show_all", is_flag=True, help=f"List every entry, not only the {LARGEST} largest.")
@storage_options
@json_option
def show(root: str, snapshots: tuple[str, ...], show_all: bool, as_json: bool) -> None:
    """Show the components, the state tree and the entries of SNAPSHOT (default: latest).

    Reads the manifest only; `ckpt verify` reads the data.
    """
    run = open_run(root)
    found, holders = run.find(*snapshots)
    manifest, copies = _read(found, holders)
    stored = _stored_as(manifest, next((place for place in holders if copies[place.storage.url] is None), None))
    if as_json:
        print_json(_json(manifest, run, copies, stored))
    else:
        _print(manifest, run, copies, stored, everything=show_all)


def _stored_as(manifest: Manifest, place: Repository | None) -> dict[str, Any]:
    """The bytes that were written for a snapshot, those that it needs of older ones, and which ones need its files."""
    mine = manifest.info.id
    return {
        "written_bytes": sum(file.nbytes for file in manifest.files if owner_of(file.name) == mine),
        "referred_bytes": sum(nbytes for one, nbytes in Origins.of(manifest).written_by.items() if one != mine),
        "needed_by": place.needed_by(mine) if place is not None else (),
    }


def _read(snapshot: str, holders: Sequence[Repository]) -> tuple[Manifest, dict[str, str | None]]:
    """The manifest of the nearest copy that can be read, and by URL what is wrong with each copy's manifest.

    Raises:
        CkptError: none can be read; that of the nearest.
    """
    copies: dict[str, Manifest | CkptError] = {}
    for place in holders:
        try:
            copies[place.storage.url] = unpacked(place.read(snapshot), partial(decoder_of, place.storage.get_into))
        except CkptError as err:
            copies[place.storage.url] = err
    errors = {url: one if isinstance(one, CkptError) else None for url, one in copies.items()}
    for one in copies.values():
        if isinstance(one, Manifest):
            return one, {url: f"[{err.code}] {err.message}" if err else None for url, err in errors.items()}
    raise next(filter(None, errors.values()))


def _json(manifest: Manifest, run: Run, copies: Mapping[str, str | None], stored: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "root": run.tiers[0],
        "tiers": [{"url": url, "error": why} for url, why in copies.items()],
        "away": run.away,
        "run": manifest.run,
        "fork": fork_of(manifest.notes),
        "snapshot": manifest.info,
        "world": manifest.world,
        "software": manifest.software,
        "files": manifest.files,
        "stored": stored,
        "entries": {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "bytes": entry.nbytes,
                "files": sorted({manifest.files[piece.file].name for piece in entry.pieces}),
            }
            for name, entry in manifest.entries.items()
        },
        "tree": manifest.tree,
        "replay": replay_of(run.tiers[0]),
    }


def _print(
    manifest: Manifest, run: Run, copies: Mapping[str, str | None], stored: Mapping[str, Any], *, everything: bool
) -> None:
    info = manifest.info
    taken = datetime.fromtimestamp(info.created).astimezone().isoformat(" ", "seconds")
    facts = {
        "snapshot": info.id,
        "step": f"{info.step:,}" + ("" if info.epoch is None else f", epoch {info.epoch}"),
        "taken": f"{taken} ({age(info.created)}), why: {info.reason}",
        "metrics": metrics(info.metrics),
        "resumed from": info.parent or "",
        "forked from": str(fork_of(manifest.notes) or ""),
        "run": f"{manifest.run}, world size {manifest.world.get('size', '?')}",
        "software": ", ".join(f"{name} {version}" for name, version in manifest.software.items()),
        "shares": f"{info.partial} only: this is one node's part" if info.partial is not None else "",
        "size": f"{units.size(info.nbytes)} in {count(len(manifest.entries), 'entry')}",
        "stored": _stored(info.nbytes, stored["written_bytes"], stored["referred_bytes"]),
        "needed by": units.first(stored["needed_by"], SHOWN_IDS),
    }
    rows = [(name, text) for name, text in facts.items() if text]
    rows += _files(manifest.files)
    if run.is_tiered:
        rows += [("copy", f"{url}, damaged: {why}" if why else url) for url, why in copies.items()]
    for name, text in rows:
        print_beside(f"{name:<14}", text)
    print_away(run.away)
    _print_components(manifest)
    print_text("", "state", bold=True)
    for key, node in manifest.tree.items():
        print_text(*_outline(manifest, key or "(state)", node, 0))
    _print_entries(manifest, everything=everything)


def _print_components(manifest: Manifest) -> None:
    total = max(1, sum(manifest.info.components.values()))
    ranks = f"own of {manifest.world_size:,} ranks" if manifest.world_size > 1 else RANKS
    rows = [
        (ranks if name == RANKS else name or "(state)", units.size(nbytes), units.share(nbytes / total))
        for name, nbytes in sorted(manifest.info.components.items(), key=lambda item: -item[1])
    ]
    print_text("")
    print_table(("component", "size", "share"), rows, numbers=("size", "share"))


def _files(files: Sequence[DataFile]) -> list[tuple[str, str]]:
    """A row for each, and for the shares of many ranks the first ones and what the others come to."""
    if len(rows := [("file", f"{file.name} ({units.size(file.nbytes)})") for file in files]) <= SHOWN_FILES:
        return rows
    rest = files[SHOWN_IDS:]
    smallest, largest = min(file.nbytes for file in rest), max(file.nbytes for file in rest)
    return [*rows[:SHOWN_IDS], ("", f"{len(rest):,} more of {units.size(smallest)} to {units.size(largest)}")]


def _print_entries(manifest: Manifest, *, everything: bool) -> None:
    sized = [(name, entry, entry.nbytes) for name, entry in manifest.entries.items()]
    if not everything:
        sized = sorted(sized, key=lambda item: -item[2])[:LARGEST]
    rows = [
        (name, entry.dtype, " x ".join(map(str, entry.shape)) or "scalar", units.size(nbytes))
        for name, entry, nbytes in sized
    ]
    print_text("")
    print_table(("entry", "dtype", "shape", "size"), rows, numbers=("size",))
    if hidden := len(manifest.entries) - len(sized):
        print_text(f"... {count(hidden, 'entry')} more; --all lists them")


def _stored(nbytes: int, written: int, referred: int) -> str:
    share = units.share(written / max(1, nbytes))
    more = f" ({share} of its size), {units.size(referred)} in files of older snapshots" if referred else ""
    return f"{units.size(written)} written{more}"


def _outline(manifest: Manifest, key: str, node: Any, depth: int) -> Iterator[str]:
    """The first levels of a part of the tree, a line each, long ones cut. Tied arrays count each time, bytes once."""
    below, arrays = children(node), [leaf for _, leaf in array_leaves(node)]
    # Of a snapshot of some ranks only the tree is whole.
    there = (manifest.entries.get(name) for name in {leaf["entry"] for leaf in arrays if not own_nbytes(leaf)})
    nbytes = sum(entry.nbytes for entry in there if entry is not None) + sum(map(own_nbytes, arrays))
    sizes = f"{count(len(arrays), 'array')}, {units.size(nbytes)}" if arrays else ""
    values = sum(not any(array_leaves(leaf)) for leaf in leaves(node))
    others = count(values, "value") if values else ""
    yield f"{'  ' * depth}{key}: {', '.join(filter(None, (_kind(node), sizes, others)))}"
    if below is None or depth == MAX_DEPTH or not any(children(child) for _, child in below):
        return
    for child_key, child in below[:MAX_CHILDREN]:
        yield from _outline(manifest, child_key, child, depth + 1)
    if len(below) > MAX_CHILDREN:
        yield f"{'  ' * (depth + 1)}... {len(below) - MAX_CHILDREN:,} more"


def _kind(node: Any) -> str:
    below = children(node)
    if isinstance(node, dict) and "$" in node:
        name = str(node.get("type", node["$"])).rpartition(":")[2]
    else:
        name = type(node).__name__
    return name if below is None else f"{'OrderedDict' if name == 'odict' else name} ({len(below):,})"
