"""Chooses the snapshot to resume from: the newest one that is whole and fits.

All places are looked at that have a copy, or a part. Whether it fits what its user expects is read from the manifest
alone, before any data is: as the rank that asks sees it, with the components of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from types import MappingProxyType

from ckpt_engine.copy.file_parity import advice_on, is_mendable
from ckpt_engine.errors import (
    CkptError,
    FormatError,
    MismatchError,
    NoUsableSnapshotError,
    ResumeError,
    StorageError,
    StorageMissingError,
)
from ckpt_engine.observe import units
from ckpt_engine.observe.resume_report import Rejected
from ckpt_engine.restore import ask_tiers
from ckpt_engine.restore.ask_tiers import Repair
from ckpt_engine.restore.memory import URL
from ckpt_engine.store import names
from ckpt_engine.store.decode import decoder_of
from ckpt_engine.store.manifest import DataFile, Manifest, SnapshotInfo, require_whole
from ckpt_engine.store.names import ParsedId
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.tree import unpacked

ManifestCheck = Callable[[Manifest], None]
"""Raises if a snapshot does not fit its user (for example a model with other keys); asked before data is read."""
_Sizes = Callable[[Repository], Mapping[str, int]]
MAX_TOLD = 20
"""Repaired tensors that the notes name; `Loaded.repairs` has all."""


@dataclass(frozen=True, slots=True)
class UnreachableTier:
    """A place that could not be asked, and why."""

    url: str
    code: str
    reason: str


def away_of(answers: Sequence[ask_tiers.TierReply[ask_tiers.T]]) -> tuple[UnreachableTier, ...]:
    """Those that did not answer, and why."""
    return tuple(
        UnreachableTier(a.place.storage.url, a.error.code, a.error.message) for a in answers if a.error is not None
    )


@dataclass(slots=True)
class SearchLog:
    """What was passed over on the way to a snapshot: filled while `candidates` is used.

    Args:
        known: manifests by their bytes, which are not decoded again; may be of an earlier search.
    """

    known: dict[bytes, Manifest] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    """Those among the rejected that never were snapshots of all nodes: they do not keep a run from starting again."""
    away: list[UnreachableTier] = field(default_factory=list)
    newest_seq: int = 0
    """The highest number of all snapshots that were there, usable or not."""
    damaged: set[str] = field(default_factory=set)
    """Data files that some place does not give as they were written."""

    def missed(self, where: Sequence[Repository]) -> tuple[UnreachableTier, ...]:
        """The places that are away. Some nodes that do not answer are only found out about when they are asked."""
        found = {one.url: one for one in self.away}
        for place in where:
            nodes = place.storage.capabilities.nodes
            for url, why in nodes.silent.items() if nodes is not None else ():
                found.setdefault(url, UnreachableTier(url, StorageError.code, why))
        return tuple(found.values())

    def reject(self, snapshot: str, error: CkptError, *, places: int = 0, sources: Sequence[Repository] = ()) -> None:
        """Note why a snapshot is not used, and what would let it be.

        Raises:
            StorageError: there is 1 place, and it does not say what it has.
        """
        if places == 1 and not isinstance(error, FormatError | StorageMissingError):
            raise error
        advice = (advice_on(one.storage, file) for one in sources for file in self.damaged)
        self.rejected.append(Rejected(snapshot, error.code, f"{error.message}{next(filter(None, advice), '')}"))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot whose manifest is whole and whose data files have their full size.

    Args:
        sources: places to read it from, all with this very manifest: those that have it whole, nearest first, then
            those that have parts of it. Folders of nodes come before all others.
        notes: copies that were passed over, and why.
    """

    info: SnapshotInfo
    manifest: Manifest
    sources: tuple[Repository, ...]
    notes: tuple[str, ...] = ()

    def unpacked(self) -> Candidate:
        """The snapshot with a node for each of its leaves, see `tree.unpacked`. Raises as that."""
        decoder = partial(decoder_of, self.sources[0].storage.get_into)
        return replace(self, manifest=unpacked(self.manifest, decoder))


def candidates(
    where: Sequence[Repository],
    search: SearchLog,
    *,
    step: int | None = None,
    check: ManifestCheck | None = None,
    only: str | None = None,
    refused: Mapping[str, CkptError] = MappingProxyType({}),
    after: tuple[int, str] = (-1, ""),
) -> Iterator[Candidate]:
    """Usable snapshots, newest first; what is skipped is noted in `search`.

    One that is stored differently at several places comes several times in a row, the nearest first.

    A copy in quarantine is the last resort, behind all other snapshots.

    One that retention has taken components from cannot resume a run: it is skipped, or the last resort where its step
    is asked for.

    Args:
        where: all places of the run, nearest first.
        step: only snapshots of this step.
        only: no other snapshot than this one.
        refused: snapshots that are known to be unusable, and why.
        after: only snapshots that are newer than that one, as of `by_age`.

    Raises:
        CkptError: whatever `check` raises, and the storage's if no place can be read at all.
    """
    question = ask_tiers.ids if len(where) > 1 else Repository.ids
    silence = ask_tiers.SILENT_SECONDS if only is None else math.inf
    answers = ask_tiers.of_one_run(ask_tiers.ask(where, question, ask_tiers.until_one_has_some, silence=silence))
    search.away += away_of(answers)
    holders: dict[ParsedId, list[Repository]] = {}
    for answer in answers:
        for parsed in answer.value or ():
            holders.setdefault(parsed, []).append(answer.place)
    newest_first = sorted(holders, key=attrgetter("seq", "id"), reverse=True)
    search.newest_seq = newest_first[0].seq if newest_first else 0
    sizes = cache(_sizes_at)  # of a place only if it is asked for a snapshot
    slimmed: list[Candidate] = []
    last: list[ParsedId] = []  # it grows until all others were tried
    for parsed in chain(newest_first, last):
        is_other = (step is not None and parsed.step != step) or only not in (None, parsed.id)
        if is_other or (parsed.seq, parsed.id) <= after:
            continue
        if parsed.id in refused:
            search.reject(parsed.id, refused[parsed.id])
            continue
        sound = [one for one in holders[parsed] if parsed.id not in one.damage.snapshots]
        if sound != holders[parsed]:
            search.damaged.update(*(one.damage.files for one in holders[parsed] if one not in sound))
        if not sound and parsed not in last:
            search.reject(parsed.id, holders[parsed][0].damage.snapshots[parsed.id].error)
            last.append(parsed)
            continue
        copies = _nearest_first(parsed.id, sound or holders[parsed], sizes, search)
        try:
            first = next(copies)
        except (FormatError, StorageError) as err:
            search.reject(parsed.id, err, places=len(where))
            nodes = [one.storage.capabilities.nodes for one in holders[parsed]]
            if all(one is not None and parsed.id in one.unfinished for one in nodes):
                search.unfinished.add(parsed.id)
            continue
        if lost := first.manifest.lacks:
            if step is None:
                why = f"retention took {', '.join(lost)} from it; it is only loaded if its step is asked for"
                search.reject(parsed.id, MismatchError(why))
            else:
                slimmed += [first, *copies]
            continue
        yield from _passing(chain((first,), copies), check, search)
    yield from _passing(slimmed, check, search)


def _passing(found: Iterable[Candidate], check: ManifestCheck | None, search: SearchLog) -> Iterator[Candidate]:
    for candidate in found:
        if check is not None:
            try:
                whole = candidate.unpacked()
            except (FormatError, StorageError) as err:
                search.reject(candidate.info.id, err)
                continue
            check(whole.manifest)
        _announce(candidate)
        yield candidate


def _nearest_first(
    snapshot: str, holders: Sequence[Repository], sizes: _Sizes, search: SearchLog
) -> Iterator[Candidate]:
    """The snapshot as it is stored, nearest first.

    Where near places have it whole, object stores are only asked for what cannot be read from these, and for how they
    store it themselves once the first candidate has turned out to be of no use.
    """
    far = [place for place in holders if place.storage.capabilities.slow_answers]
    near = [place for place in holders if place not in far]
    first = None
    if far and near:
        with suppress(FormatError, StorageError):
            first = _assemble(snapshot, near, sizes, search)[0]
            first = replace(first, sources=(*first.sources, *far))
    if first is not None:
        yield first
    for one in _assemble(snapshot, holders, sizes, search):
        if first is None or one.manifest != first.manifest:
            yield one


def _announce(candidate: Candidate) -> None:
    """Tell the ranks of this node what is read next, where they share it."""
    first, *others = [one.storage.capabilities for one in candidate.sources]
    announce, lacks = first.announce, None
    if first.nodes is not None:
        first.nodes.announce(candidate.manifest)
        lacks = {file.name for file in candidate.manifest.files} - first.nodes.sizes.keys()
        announce = next((one.announce for one in others if one.announce is not None), None)
    if announce is not None and lacks != set():
        announce(candidate.manifest, lacks)


def assemble(snapshot: str, holders: Sequence[Repository]) -> Candidate:
    """One snapshot from all its copies, with a node for each of its leaves.

    Args:
        holders: the places that have a manifest of it, nearest first.

    Raises:
        CkptError: that of the nearest copy; together the copies do not make one whole snapshot.
    """
    return _assemble(snapshot, holders, _sizes_at, SearchLog())[0].unpacked()


def _sizes_at(place: Repository) -> Mapping[str, int]:
    """The data files of a place."""
    nodes = place.storage.capabilities.nodes
    if nodes is not None:
        return nodes.sizes
    return {item.name: item.nbytes for item in place.storage.list(names.DATA)}


@dataclass(slots=True)
class _Copies:
    """The places that store a snapshot in the same way, and the data files that none of them has whole."""

    manifest: Manifest
    lacking: set[DataFile]
    whole: list[Repository] = field(default_factory=list)
    parts: list[Repository] = field(default_factory=list)

    def sources(self) -> tuple[Repository, ...]:
        """The places to read from, in this order: what nodes have themselves before what is far away."""
        near = [place for place in self.parts if place.storage.capabilities.nodes is not None]
        return (*near, *self.whole, *(place for place in self.parts if place not in near))


def _assemble(snapshot: str, holders: Sequence[Repository], sizes: _Sizes, search: SearchLog) -> list[Candidate]:
    """The snapshot as it is stored, nearest first: more than one only where places store it differently."""
    kinds: list[_Copies] = []
    errors: list[CkptError] = []
    notes: list[str] = []
    for place in holders:
        try:
            manifest, text = place.read_text(snapshot, search.known)
            require_whole(manifest.info, place.storage.url)
            search.known[text] = manifest
            there = sizes(place)
            lacking = [
                file for file in manifest.files if there.get(file.name) != file.nbytes and not is_mendable(there, file)
            ]
            kind = next((one for one in kinds if one.manifest == manifest), None)
            if kind is None:
                kinds.append(kind := _Copies(manifest, set(lacking)))
            kind.lacking.intersection_update(lacking)
            if not lacking:
                kind.whole.append(place)
                continue
            kind.parts.append(place)
            if place.storage.capabilities.nodes is None:  # else the others have them
                search.damaged.update(file.name for file in lacking)
            file, found = lacking[0], there.get(lacking[0].name)
            if found is None:
                raise StorageMissingError(f"data file {file.name} is missing")
            raise FormatError(f"data file {file.name} has {found} bytes instead of {file.nbytes}")
        except (FormatError, StorageError) as err:
            errors.append(err)
            notes.append(f"the copy of {snapshot} at {place.storage.url} is not whole: [{err.code}] {err.message}")
    usable = [one for one in kinds if not one.lacking]
    if not usable:
        raise errors[0]
    usable.sort(key=lambda one: not one.whole)
    return [Candidate(one.manifest.info, one.manifest, one.sources(), tuple(notes)) for one in usable]


def require_none(where: Sequence[Repository], search: SearchLog, step: int | None) -> None:
    """Where no snapshot was chosen: that there were none at all. Raises as `choose` otherwise."""
    named = [place.storage.url for place in where if place.storage.url != URL] or [URL]
    urls = ", ".join(named)
    missed = search.missed(where)
    away = [f"  {one.url}: [{one.code}] {one.reason}" for one in missed]
    if any(one.id not in search.unfinished for one in search.rejected):
        instead = "start a new run in another folder"
        if any(place.storage.capabilities.nodes is not None for place in where):
            instead = f"remove {named[0]} on every node to start a new run"
        raise NoUsableSnapshotError(
            f"none of the {len(search.rejected)} snapshots in {urls} is usable:",
            *[f"  {one.id}: [{one.code}] {one.reason}" for one in search.rejected],
            *away,
            "",
            hint=f"look closer with `ckpt verify {named[0]}`, or {instead}",
        )
    if away:
        raise NoUsableSnapshotError(
            f"there is no snapshot in {urls} that is visible, but not every place answers:",
            *away,
            "",
            hint=f"start it again when {' and '.join(one.url for one in missed)} answers; "
            "to begin a new run without it, remove it from `tiers`",
        )
    if step is not None:
        raise ResumeError(f"no snapshot of step {step} in {urls}", hint=f"`ckpt ls {urls}` shows what there is")
    records = [(place.storage.url, place.record()) for place in where if place.storage.url in named]
    for url, fork in [(url, record.fork) for url, record in records if record is not None and record.fork is not None]:
        raise NoUsableSnapshotError(
            f"the fork at {url} is not finished: it has no snapshot",
            hint=f"`ckpt fork {fork.url}#{fork.step} {url}` finishes it; or start a new run in another folder",
        )


def choose(
    where: Sequence[Repository],
    step: int | None = None,
    check: ManifestCheck | None = None,
    *,
    only: str | None = None,
    search: SearchLog | None = None,
    refused: Mapping[str, CkptError] = MappingProxyType({}),
) -> Candidate | None:
    """The snapshot `load` would try first, or None if there are none at all.

    Args:
        where, only, refused: as of `candidates`.
        search: takes what was passed over.

    Raises:
        NoUsableSnapshotError: there are snapshots, and none is usable; or there are none, and not every place answers.
        ResumeError: no snapshot of `step`.
    """
    search = search or SearchLog()
    found = next(candidates(where, search, step=step, check=check, only=only, refused=refused), None)
    if found is None:
        require_none(where, search, step)
    return found


def notes_about(
    where: Sequence[Repository], candidate: Candidate, repairs: Sequence[Repair], search: SearchLog
) -> Iterator[str]:
    """What is worth knowing about the places, in sentences; nothing if all is as it should be."""
    if len(where) == 1:
        return
    served = candidate.sources[0].storage.url
    if served != where[0].storage.url:
        yield f"restored from {served}: {where[0].storage.url} does not have this snapshot whole"
    yield from candidate.notes
    yield from (
        f"another copy of {one.id} is damaged: [{one.code}] {one.reason}"
        for one in search.rejected
        if one.id == candidate.info.id
    )
    yield from _notes_of_repairs(repairs, next(one.storage.url for one in where if one.storage.url != URL))


def _notes_of_repairs(repairs: Sequence[Repair], nearest: str) -> Iterator[str]:
    """Tensors by name, and what came in thousands of requests from another place as one sum."""
    named = [repair for repair in repairs if repair.entry is not None]
    yield from map(str, named[:MAX_TOLD])
    if len(named) > MAX_TOLD:
        yield f"{len(named) - MAX_TOLD:,} more tensors came from other copies"
    for bad, good in dict.fromkeys((one.bad, one.good) for one in repairs if one.bad != URL):
        mends = (
            "the next snapshot of this run mends that copy; if none is taken, run"
            if bad == nearest
            else "mend that copy when the run has ended"
        )
        yield f"{mends} `ckpt repair {units.place(bad)} --from {units.place(good)}`"
    sums: dict[tuple[str, str, str], Repair] = {}
    for repair in repairs:
        if repair.entry is None:
            key = (repair.file, repair.bad, repair.good)
            before = sums.get(key)
            sums[key] = repair if before is None else replace(before, nbytes=before.nbytes + repair.nbytes)
    yield from map(str, sums.values())
