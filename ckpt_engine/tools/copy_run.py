"""Copies snapshots of a run to another place, byte for byte, verified on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ckpt_engine.config import Tier
from ckpt_engine.copy.add_parity import add_parity, parts_of
from ckpt_engine.copy.make_room import catalogue
from ckpt_engine.copy.transfer import (
    Copied,
    CopySourceError,
    Put,
    RunText,
    adopt_run,
    copy_data,
    copy_snapshot,
    reading_source,
    scratch_of,
)
from ckpt_engine.errors import CkptError, FormatError, PartialError, StorageMissingError
from ckpt_engine.restore import ask_tiers
from ckpt_engine.restore.origin import note_of_fork
from ckpt_engine.store import names, pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import Manifest, Partial
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import SLICE_BYTES, metered
from ckpt_engine.store.storage.disk import Meter
from ckpt_engine.tools.check_run import Counting
from ckpt_engine.tools.stored_run import Run
from ckpt_engine.writer import part_records
from ckpt_engine.writer.commit_of_ranks import give
from ckpt_engine.writer.part_records import complete


@dataclass(frozen=True, slots=True)
class FailedCopy:
    """A snapshot that could not be copied: it is damaged where it comes from."""

    id: str
    code: str
    why: str


@dataclass(slots=True)
class CopiedRun:
    """What has been copied so far; `present` counts what TARGET had already.

    `partial` are those of which it has the shares of some ranks by now, and which.
    """

    source: str
    target: str
    copied: list[str] = field(default_factory=list)
    present: int = 0
    sent_bytes: int = 0
    partial: dict[str, str] = field(default_factory=dict)
    failed: list[FailedCopy] = field(default_factory=list)


@dataclass(slots=True)
class ForkedRun:
    """The run that copies are of, and the bytes of those files that the storage has duplicated without sending them."""

    record: RunText
    linked_bytes: int = 0


def copy_run(
    run: Run,
    tier: Tier,
    wanted: Sequence[str],
    say: Callable[[str], object],
    counting: Counting,
    fork: ForkedRun | None = None,
) -> CopiedRun:
    """Copy snapshots of a run to a place, newest first.

    Args:
        wanted: which ones; none: all.
        say: takes the line about a wait of some seconds.
        counting: follows the bytes.
        fork: the run whose snapshots the copies are; its storage duplicates files, if it can.

    Raises:
        CkptError: from the target; or the only places that may have a snapshot whole do not answer any more.
    """
    storage = open_storage(tier.url, tier.for_storage())
    ask_tiers.ask([Repository(storage)], Repository.record, ask_tiers.at_most, say)
    ids = {run.find(one)[0] for one in wanted} or {parsed.id for parsed in run.holders}
    with acquire(storage) as lease:
        far = adopt_run(_record_of(run) if fork is None else fork.record, storage)
        missing = dict.fromkeys(sorted(ids - {parsed.id for parsed in far.ids()}, reverse=True))
        done = CopiedRun(run.tiers[0], storage.url, present=len(ids) - len(missing))
        holders = {parsed.id: found for parsed, found in run.holders.items() if parsed.id in missing}
        with counting(_data_bytes(run.places, holders)) as advance:
            counted = Repository(metered(open_storage(tier.url, tier.for_storage()), lambda _: _Counting(advance)))
            for snapshot in missing:
                _copy(holders[snapshot], counted, snapshot, done, advance, fork)
        if done.partial:
            _complete(far, done)
        for place in run.places:
            _copy_pins(place, far)
        if done.failed:
            storage.sweep()  # what it has of them is of no use
        catalogue(far)
        parts = next(filter(None, map(parts_of, run.places)), None)
        if parts is not None:
            far.copy_manifests()
            add_parity(far, parts, lease.check)
    return done


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
    done: CopiedRun,
    advance: Callable[[int], object],
    fork: ForkedRun | None,
) -> None:
    """Copy one snapshot from the nearest place that has it whole, and note in `done` how that went.

    Raises:
        CkptError: from the target; or the only places that may have it whole do not answer any more.
    """
    error: CkptError | None = None
    away = False
    for near in holders:
        try:
            copied = _send(near, far, snapshot, done, fork)
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
        done.failed.append(FailedCopy(snapshot, error.code, error.message))


def _send(near: Repository, far: Repository, snapshot: str, done: CopiedRun, fork: ForkedRun | None) -> Copied:
    put = partial(copy_data, near, far, scratch=scratch_of(near.storage) or scratch_of(far.storage))

    try:
        return copy_snapshot(near, far, snapshot, put if fork is None else partial(_put_fork, near, far, fork, put))
    except CopySourceError as err:
        if not isinstance(err.error, PartialError):
            raise
    manifest, copied = give(near, far, snapshot, put)
    done.partial[snapshot] = str(manifest.info.partial)
    return copied


def _put_fork(
    near: Repository, far: Repository, fork: ForkedRun, put: Put, manifest: Manifest
) -> tuple[Manifest, Copied]:
    duplicate = far.storage.capabilities.duplicate(near.storage)
    for file in manifest.files:
        with reading_source():
            fork.linked_bytes += file.nbytes if duplicate is not None and duplicate(file.name) else 0
    stored, copied = put(manifest)
    noted = replace(stored, run=fork.record.run, notes={**stored.notes, **note_of_fork(near.storage.url, manifest)})
    return noted, copied


def _complete(far: Repository, done: CopiedRun) -> None:
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


@dataclass(eq=False)
class _Counting(Meter):
    """Tells a progress bar what is sent."""

    slice_bytes = SLICE_BYTES
    _advance: Callable[[int], object]

    def wait(self, nbytes: int) -> float:
        self._advance(nbytes)
        return 0.0


def _data_bytes(places: Sequence[Repository], holders: Mapping[str, Sequence[Repository]]) -> int:
    """Of all data files that snapshots need, each once, as far as their manifests can be read: for the bar."""
    needed: set[str] = set()
    for snapshot, (nearest, *_) in holders.items():
        with suppress(CkptError):
            needed.update(nearest.files_of(snapshot))
    sizes = {item.name: item.nbytes for place in places for item in place.storage.list(names.DATA)}
    return sum(nbytes for name, nbytes in sizes.items() if name in needed)


def _copy_pins(near: Repository, far: Repository) -> None:
    """What is kept on purpose stays so at the copy."""
    pinned = pins.pinned_ids(far.storage)
    there = {parsed.id for parsed in far.ids()}
    for pin in pins.pins(near.storage):
        if pin.id in there and pin.id not in pinned:
            pins.pin(far, pin.id, pin.note, created=pin.created)
