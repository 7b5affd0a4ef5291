"""`ckpt cp` and `ckpt compact`: write snapshots again, at another place, or each as one plain file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import click

from ckpt_engine.cli.output import fields_of, json_option, print_away, print_json, print_text, progress, say_waiting
from ckpt_engine.cli.root import LATEST, Run, open_run, options_of, storage_options
from ckpt_engine.copy.drop_components import is_compact
from ckpt_engine.copy.make_room import catalogue, compact
from ckpt_engine.copy.transfer import (
    Copied,
    CopySourceError,
    RunText,
    adopt_run,
    copy_data,
    copy_snapshot,
    scratch_of,
)
from ckpt_engine.errors import CkptError, FormatError, PartialError, StorageMissingError
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.restore import ask_tiers
from ckpt_engine.store import names, pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import Partial
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import SLICE_BYTES, metered
from ckpt_engine.store.storage.disk import Meter
from ckpt_engine.writer import part_records
from ckpt_engine.writer.commit_of_ranks import give
from ckpt_engine.writer.part_records import complete


@dataclass(frozen=True, slots=True)
class _Failed:
    """A snapshot that could not be copied: it is damaged where it comes from."""

    id: str
    code: str
    why: str


@dataclass(slots=True)
class _Done:
    """What has been copied so far; `present` counts what TARGET had already.

    `partial` are those of which it has the shares of some ranks by now, and which.
    """

    source: str
    target: str
    copied: list[str] = field(default_factory=list)
    present: int = 0
    sent_bytes: int = 0
    partial: dict[str, str] = field(default_factory=dict)
    failed: list[_Failed] = field(default_factory=list)


@click.command("cp", short_help="Copy a run, or some of its snapshots.")
@click.argument("source")
@click.argument("target")
@click.option(
    "--snapshot", "wanted", multiple=True, metavar="SNAPSHOT", help="Only this one; repeatable. Default: all of them."
)
@storage_options
@json_option
def command(source: str, target: str, wanted: tuple[str, ...], as_json: bool) -> None:
    """Copy the run at SOURCE to TARGET: a folder, a storage URL, or a ckpt.yaml that names one.

    Newest first, byte for byte, verified on the way. Of a ckpt.yaml with several tiers each snapshot comes from the
    nearest that has it whole. What TARGET has already stays as it is, so that an interrupted copy goes on with the same
    command. TARGET must be empty or hold the same run. Ends with exit code 1 if a snapshot was damaged at SOURCE.

    Where each node has a folder of its own, copy all of these folders to one TARGET, one after another: with the last
    one the snapshots exist there.
    """
    run = open_run(source)
    tier = options_of(target).tiers[0]
    storage = open_storage(tier.url, tier.for_storage())
    ask_tiers.ask([Repository(storage)], Repository.record, ask_tiers.at_most, say_waiting)
    ids = [run.find(one)[0] for one in wanted] or [parsed.id for parsed in run.holders]
    with acquire(storage):
        far = adopt_run(_record_of(run), storage)
        there = {parsed.id for parsed in far.ids()}
        missing = [one for one in sorted(set(ids), reverse=True) if one not in there]
        done = _Done(run.tiers[0], storage.url, present=len(set(ids)) - len(missing))
        with progress("copying", _data_bytes(run, missing), hidden=as_json) as advance:
            counted = Repository(metered(open_storage(tier.url, tier.for_storage()), lambda _: _Counting(advance)))
            holders = {parsed.id: found for parsed, found in run.holders.items()}
            for snapshot in missing:
                _copy(holders[snapshot], counted, snapshot, done, advance)
        if done.partial:
            _complete(far, done)
        for place in run.places:
            _copy_pins(place, far)
        if done.failed:
            storage.sweep()  # what it has of them is of no use
        catalogue(far)
    _print(done, run, as_json=as_json)
    if done.failed:
        sys.exit(1)


def _record_of(run: Run) -> RunText:
    """The run's record, from the nearest place that has it."""
    for place in run.places:
        with suppress(CkptError):
            return RunText.of(place)
    return RunText.of(run.places[0])


def _copy(
    holders: Sequence[Repository],
    far: Repository,
    snapshot: str,
    done: _Done,
    advance: Callable[[int], None],
) -> None:
    """Copy one snapshot from the nearest place that has it whole, and note in `done` how that went.

    Raises:
        CkptError: from the target; or the only places that may have it whole do not answer any more.
    """
    error: CkptError | None = None
    away = False
    for near in holders:
        try:
            copied = _send(near, far, snapshot, done)
        except CopySourceError as err:
            gone = isinstance(err.error, StorageMissingError) and snapshot not in {one.id for one in near.ids()}
            if not gone:  # by retention, meanwhile
                error = error or err.error
                away = away or not (
                    isinstance(err.error, FormatError | StorageMissingError)
                    or near.storage.capabilities.folder is not None
                )
            continue
        if snapshot not in done.partial:
            done.copied.append(snapshot)
        done.sent_bytes += copied.sent_bytes
        advance(copied.present_bytes)
        return
    if error is not None and away:
        raise error  # what has arrived stays for the next attempt; other snapshots would fail alike
    if error is not None:
        done.failed.append(_Failed(snapshot, error.code, error.message))


def _send(near: Repository, far: Repository, snapshot: str, done: _Done) -> Copied:
    put = partial(copy_data, near, far, scratch=scratch_of(near.storage) or scratch_of(far.storage))
    try:
        return copy_snapshot(near, far, snapshot, put)
    except CopySourceError as err:
        if not isinstance(err.error, PartialError):
            raise
    manifest, copied = give(near, far, snapshot, put)
    done.partial[snapshot] = str(manifest.info.partial)
    return copied


def _complete(far: Repository, done: _Done) -> None:
    """Commit what is whole at the target by now, and note whose shares it has of all else."""
    left = {snapshot: ranks for snapshot, ranks in part_records.there(far.storage).items() if snapshot in done.partial}
    for snapshot, outcome in complete(far, left):
        found = part_records.read_all(far.storage, snapshot, left[snapshot]).values()
        if outcome is False:
            ranks = tuple(sorted(rank for part in found for rank in part.ranks))
            done.partial[snapshot] = str(Partial(ranks, next(iter(found)).size))
            continue
        del done.partial[snapshot]
        done.copied.append(snapshot)
        part_records.remove(far.storage, snapshot, left[snapshot])


class _Counting(Meter):
    """Tells a progress bar what is sent."""

    slice_bytes = SLICE_BYTES

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance

    def wait(self, nbytes: int) -> float:
        self._advance(nbytes)
        return 0.0


def _data_bytes(run: Run, ids: Sequence[str]) -> int:
    """Of all data files that the snapshots need, each once, as far as their manifests can be read: for the bar."""
    wanted = set(ids)
    needed: set[str] = set()
    for parsed, holders in run.holders.items():
        if parsed.id in wanted:
            with suppress(CkptError):
                needed.update(holders[0].files_of(parsed.id))
    sizes = {item.name: item.nbytes for place in run.places for item in place.storage.list(names.DATA)}
    return sum(nbytes for name, nbytes in sizes.items() if name in needed)


def _copy_pins(near: Repository, far: Repository) -> None:
    """What is kept on purpose stays so at the copy."""
    pinned = pins.pinned_ids(far.storage)
    there = {parsed.id for parsed in far.ids()}
    for pin in pins.pins(near.storage):
        if pin.id in there and pin.id not in pinned:
            pins.pin(far, pin.id, pin.note, created=pin.created)


def _print(done: _Done, run: Run, *, as_json: bool) -> None:
    if as_json:
        print_json({**fields_of(done), "away": run.away})
        return
    for one in done.failed:
        print_text(f"{one.id}  not copied: [{one.code}] {one.why}", fg="red")
    for snapshot, shares in done.partial.items():
        print_text(f"{snapshot}  has the shares of {shares} there: copy the folders of the other nodes, too")
    before = f", {done.present:,} there already" if done.present else ""
    copied = count(len(done.copied), "snapshot")
    print_text(f"{copied} copied to {done.target}, {units.size(done.sent_bytes)} sent{before}")
    print_away(run.away)


@dataclass(frozen=True, slots=True)
class _Compacted:
    """What happened, or would happen, to one snapshot. `new` is its id now; None: nothing was done."""

    id: str
    tier: str
    nbytes: int
    is_compact: bool
    new: str | None = None


@click.command("compact", short_help="Make snapshots independent of others.")
@click.argument("root")
@click.argument("snapshots", nargs=-1, metavar="[SNAPSHOT]...")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@storage_options
@json_option
def compact_command(root: str, snapshots: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Write SNAPSHOTs (default: latest) again, each as one plain file that needs no data of others.

    It gets a new id, of the same place in the order. Data that no snapshot needs any more is removed. On every tier
    that has the snapshot; a pinned one stays as it is. No training may be writing the run meanwhile.
    """
    run = open_run(root)
    done: list[_Compacted] = []
    for name in snapshots or (LATEST,):
        snapshot, holders = run.find(name)
        for place in holders:
            manifest = place.read(snapshot)
            new, compacted = None, is_compact(manifest)
            if not dry_run and not compacted:
                with acquire(place.storage) as lease:
                    new = compact(place, lease, snapshot)
            done.append(_Compacted(snapshot, place.storage.url, manifest.info.nbytes, compacted, new))
    if as_json:
        print_json({"root": run.tiers[0], "dry_run": dry_run, "snapshots": done})
        return
    for one in done:
        print_text(f"{one.id} at {one.tier}: {_fate(one)}")


def _fate(one: _Compacted) -> str:
    if one.is_compact:
        return "needs no other already"
    return f"would write {units.size(one.nbytes)}" if one.new is None else f"is {one.new} now, {units.size(one.nbytes)}"
