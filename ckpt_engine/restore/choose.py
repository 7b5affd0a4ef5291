"""Chooses what to resume from: the newest snapshot that is whole and fits, over all places that have a copy, or a part.

Whether it fits what its user expects is read from the manifest alone, before any data is: as the rank that asks sees
it, with the components of its own.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from types import MappingProxyType

import zstandard

from ckpt_engine.errors import (
    CkptError,
    FormatError,
    MismatchError,
    NoUsableSnapshotError,
    ResumeError,
    SnapshotFailedError,
    SnapshotSkippedError,
    StorageError,
    StorageMissingError,
)
from ckpt_engine.restore import ask_tiers
from ckpt_engine.restore.ask_tiers import Repair
from ckpt_engine.restore.memory import URL
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.store.decode import decoder_of
from ckpt_engine.store.manifest import DataFile, Manifest, Partial, SnapshotInfo, require_whole
from ckpt_engine.store.names import ParsedId
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.tree import unpacked
from ckpt_engine.writer import part_records

Check = Callable[[Manifest], None]
"""Raises if a snapshot does not fit its user (for example a model with other keys); asked before data is read."""


@dataclass(frozen=True, slots=True)
class RejectedCandidate:
    """A snapshot that was not used, and why."""

    snapshot: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Away:
    """A place that could not be asked, and why."""

    url: str
    code: str
    reason: str


@dataclass(slots=True)
class Search:
    """What was passed over on the way to a snapshot: filled while `candidates` is used.

    Args:
        known: manifests by their bytes, which are not decoded again; may be of an earlier search.
    """

    known: dict[bytes, Manifest] = field(default_factory=dict)
    rejected: list[RejectedCandidate] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    """Those among the rejected that never were snapshots of all nodes: they do not keep a run from starting again."""
    away: list[Away] = field(default_factory=list)
    newest_seq: int = 0
    """The highest number of all snapshots that were there, usable or not."""

    def missed(self, where: Sequence[Repository]) -> tuple[Away, ...]:
        """The places that are away. Some nodes that do not answer are only found out about when they are asked."""
        found = {one.url: one for one in self.away}
        for place in where:
            nodes = place.storage.capabilities.nodes
            for url, why in nodes.silent.items() if nodes is not None else ():
                found.setdefault(url, Away(url, StorageError.code, why))
        return tuple(found.values())

    def reject(self, snapshot: str, error: CkptError) -> None:
        """Note why a snapshot is not used."""
        self.rejected.append(RejectedCandidate(snapshot, error.code, error.message))


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
        decoder = partial(decoder_of, self.sources[0].storage)
        return replace(self, manifest=unpacked(self.manifest, decoder))


def candidates(
    where: Sequence[Repository],
    search: Search,
    *,
    step: int | None = None,
    check: Check | None = None,
    only: str | None = None,
    refused: Mapping[str, CkptError] = MappingProxyType({}),
) -> Iterator[Candidate]:
    """Usable snapshots, newest first; what is skipped is noted in `search`.

    One that is stored differently at several places comes several times in a row, the nearest first.

    One that retention has taken components from cannot resume a run: it is skipped, or the last resort where its step
    is asked for.

    Args:
        where: all places of the run, nearest first.
        step: only snapshots of this step.
        only: no other snapshot than this one.
        refused: snapshots that are known to be unusable, and why.

    Raises:
        CkptError: whatever `check` raises, and the storage's if no place can be read at all.
    """
    holders: dict[ParsedId, list[Repository]] = {}
    question = ask_tiers.ids if len(where) > 1 else Repository.ids
    silence = ask_tiers.SILENT_SECONDS if only is None else math.inf
    for answer in ask_tiers.of_one_run(ask_tiers.ask(where, question, ask_tiers.until_one_has_some, silence=silence)):
        if answer.error is not None:
            search.away.append(Away(answer.place.storage.url, answer.error.code, answer.error.message))
        for parsed in answer.value or ():
            holders.setdefault(parsed, []).append(answer.place)
    newest_first = sorted(holders, key=attrgetter("seq", "id"), reverse=True)
    search.newest_seq = newest_first[0].seq if newest_first else 0
    sizes = cache(_sizes_at)  # of a place only if it is asked for a snapshot
    slimmed: list[Candidate] = []
    for parsed in newest_first:
        if (step is not None and parsed.step != step) or only not in (None, parsed.id):
            continue
        if parsed.id in refused:
            search.reject(parsed.id, refused[parsed.id])
            continue
        copies = _nearest_first(parsed.id, holders[parsed], sizes, search.known)
        try:
            first = next(copies)
        except (FormatError, StorageError) as err:
            if len(where) == 1 and not isinstance(err, FormatError | StorageMissingError):
                raise
            search.reject(parsed.id, err)
            if all(_is_unfinished(parsed.id, one) for one in holders[parsed]):
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


def _passing(found: Iterable[Candidate], check: Check | None, search: Search) -> Iterator[Candidate]:
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
    snapshot: str, holders: Sequence[Repository], sizes: _Sizes, known: dict[bytes, Manifest]
) -> Iterator[Candidate]:
    """The snapshot as it is stored, nearest first.

    Where near places have it whole, object stores are only asked for what cannot be read from these, and for how they
    store it themselves once the first candidate has turned out to be of no use.
    """
    far, near = list[Repository](), list[Repository]()
    for place in holders:
        (far if place.storage.capabilities.slow_answers else near).append(place)
    first = None
    if far and near:
        with suppress(FormatError, StorageError):
            first = _assemble(snapshot, near, sizes, known)[0]
            first = replace(first, sources=(*first.sources, *far))
    if first is not None:
        yield first
    for one in _assemble(snapshot, holders, sizes, known):
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


def _is_unfinished(snapshot: str, place: Repository) -> bool:
    nodes = place.storage.capabilities.nodes
    return nodes is not None and snapshot in nodes.unfinished


def assemble(snapshot: str, holders: Sequence[Repository]) -> Candidate:
    """One snapshot from all its copies, with a node for each of its leaves.

    Args:
        holders: the places that have a manifest of it, nearest first.

    Raises:
        CkptError: that of the nearest copy; together the copies do not make one whole snapshot.
    """
    return _assemble(snapshot, holders, _sizes_at, {})[0].unpacked()


_Sizes = Callable[[Repository], Mapping[str, int]]


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
        near, far = list[Repository](), list[Repository]()
        for place in self.parts:
            (far if place.storage.capabilities.nodes is None else near).append(place)
        return (*near, *self.whole, *far)


def _assemble(
    snapshot: str, holders: Sequence[Repository], sizes: _Sizes, known: dict[bytes, Manifest]
) -> list[Candidate]:
    """The snapshot as it is stored, nearest first: more than one only where places store it differently."""
    kinds: list[_Copies] = []
    errors: list[CkptError] = []
    notes: list[str] = []
    for place in holders:
        try:
            manifest, text = place.read_text(snapshot, known)
            require_whole(manifest.info, place.storage.url)
            known[text] = manifest
            there = sizes(place)
            lacking = [file for file in manifest.files if there.get(file.name) != file.nbytes]
            for kind in kinds:
                if kind.manifest == manifest:
                    kind.lacking.intersection_update(lacking)
                    break
            else:
                kinds.append(kind := _Copies(manifest, set(lacking)))
            if not lacking:
                kind.whole.append(place)
                continue
            kind.parts.append(place)
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


def require_none(where: Sequence[Repository], search: Search, step: int | None) -> None:
    """Where no snapshot was chosen: that there were none at all. Raises as `choose` otherwise."""
    named = [place.storage.url for place in where if place.storage.url != URL] or [URL]
    urls = ", ".join(named)
    missed = search.missed(where)
    away = [f"  {one.url}: [{one.code}] {one.reason}" for one in missed]
    if any(one.snapshot not in search.unfinished for one in search.rejected):
        lines = [f"  {r.snapshot}: [{r.code}] {r.reason}" for r in search.rejected]
        instead = "start a new run in another folder"
        if any(place.storage.capabilities.nodes is not None for place in where):
            instead = f"remove {named[0]} on every node to start a new run"
        raise NoUsableSnapshotError(
            f"none of the {len(search.rejected)} snapshots in {urls} is usable:",
            *lines,
            *away,
            "",
            hint=f"look closer with `ckpt verify {named[0]}`, or {instead}",
        )
    if away:
        missing = " and ".join(one.url for one in missed)
        raise NoUsableSnapshotError(
            f"there is no snapshot in {urls} that is visible, but not every place answers:",
            *away,
            "",
            hint=f"start it again when {missing} answers; to begin a new run without it, remove it from `tiers`",
        )
    if step is not None:
        raise ResumeError(f"no snapshot of step {step} in {urls}", hint=f"`ckpt ls {urls}` shows what there is")


@dataclass(frozen=True, slots=True)
class JointSnapshot:
    """A snapshot that the places have together.

    Args:
        text: its whole manifest.
        homes: the place, by its number, that has each data file; what is in none is not in it.
        sizes: of these data files.
    """

    text: bytes
    homes: Mapping[str, int]
    sizes: Mapping[str, int] = field(repr=False)

    @classmethod
    def of(cls, manifest: Manifest, homes: Mapping[str, int]) -> JointSnapshot:
        """Of a whole manifest."""
        sizes = {file.name: file.nbytes for file in manifest.files if file.name in homes}
        return cls(manifest_codec.encode(manifest), homes, sizes)

    def packed(self) -> str:
        """As text, small enough for the ranks' store."""
        text = json.dumps([self.text.decode(), dict(self.homes)])
        return base64.b85encode(zstandard.ZstdCompressor().compress(text.encode())).decode()

    @classmethod
    def unpacked(cls, packed: str) -> JointSnapshot:
        """The inverse of `packed`."""
        text, homes = json.loads(zstandard.ZstdDecompressor().decompress(base64.b85decode(packed)))
        return cls.of(manifest_codec.decode(text.encode()), homes)


Began = Callable[[SnapshotInfo, Sequence[int]], bool]
"""Whether a snapshot is the first one that was ever begun, and the nodes of these ranks had not finished it."""
Ask = Callable[[int, str], tuple[bytes, dict[str, int]]]
"""The manifest that a place (its number) has of a snapshot, and the sizes of its data files; as `manifest_at`.
"""


def gather(snapshot: str, holders: Collection[int], ask: Ask, silent: Mapping[str, str], began: Began) -> JointSnapshot:
    """What the manifests of these places are together.

    Args:
        holders: the places that have one.
        silent: why places do not answer, for messages; `ask` may find out more.
        began: tells a snapshot that was never finished from one of which something was lost.

    Raises:
        FormatError: they are not the whole snapshot; says what is missing.
    """
    wrong: list[str] = []
    found: list[tuple[int, part_records.PartRecord]] = []
    for place in holders:
        try:
            text, sizes = ask(place, snapshot)
            manifest = manifest_codec.decode(text)
            for file in manifest.files:
                if sizes.get(file.name) != file.nbytes:
                    raise FormatError(f"data file {file.name} is not there whole")
        except CkptError as err:
            wrong.append(err.message)
            continue
        if manifest.info.partial is None:
            return JointSnapshot.of(manifest, {file.name: place for file in manifest.files})
        part = part_records.of_manifest(manifest)
        if all(set(part.ranks).isdisjoint(other.ranks) for _, other in found):
            found.append((place, part))
    size = found[0][1].size if found else 0
    lacking = sorted(set(range(size)) - {rank for _, part in found for rank in part.ranks})
    if lacking or not found:
        what = f"the shares of {Partial(tuple(lacking), size)}" if found else "its shares"
        if found and not wrong and not silent and began(found[0][1].manifest.info, lacking):
            raise FormatError(f"it was never finished: {what} were not written")
        why = "; ".join(dict.fromkeys((*silent.values(), *wrong)))
        if silent:
            raise FormatError(f"{what} cannot be had: {why}")
        raise FormatError(f"{what} are in the folder of no node{f': {why}' if why else ' that takes part'}")
    try:
        whole = part_records.merge([part for _, part in found])
    except (SnapshotFailedError, SnapshotSkippedError) as err:
        raise FormatError(f"the shares of the places are not one snapshot: {err.message}") from err
    homes = {file.name: place for place, part in found for file in part.manifest.files}
    return JointSnapshot.of(whole, {file.name: homes[file.name] for file in whole.files})


def choose(
    where: Sequence[Repository],
    step: int | None = None,
    check: Check | None = None,
    *,
    only: str | None = None,
    search: Search | None = None,
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
    search = search or Search()
    found = next(candidates(where, search, step=step, check=check, only=only, refused=refused), None)
    if found is None:
        require_none(where, search, step)
    return found


MAX_TOLD = 20
"""Repaired tensors that the notes name; `Loaded.repairs` has all."""


def notes_about(
    where: Sequence[Repository], candidate: Candidate, repairs: Sequence[Repair], search: Search
) -> Iterator[str]:
    """What is worth knowing about the places, in sentences; nothing if all is as it should be."""
    if len(where) == 1:
        return
    served = candidate.sources[0].storage.url
    if served != where[0].storage.url:
        yield f"restored from {served}: {where[0].storage.url} does not have this snapshot whole"
    yield from candidate.notes
    for one in search.rejected:
        if one.snapshot == candidate.info.id:
            yield f"another copy of {one.snapshot} is damaged: [{one.code}] {one.reason}"
    yield from _notes_of_repairs(repairs)


def _notes_of_repairs(repairs: Sequence[Repair]) -> Iterator[str]:
    """Tensors by name, and what came in thousands of requests from another place as one sum."""
    named = [repair for repair in repairs if repair.entry is not None]
    yield from map(str, named[:MAX_TOLD])
    if len(named) > MAX_TOLD:
        yield f"{len(named) - MAX_TOLD:,} more tensors came from other copies"
    sums: dict[tuple[str, str, str], Repair] = {}
    for repair in repairs:
        if repair.entry is None:
            key = (repair.file, repair.bad, repair.good)
            before = sums.get(key)
            sums[key] = repair if before is None else replace(before, nbytes=before.nbytes + repair.nbytes)
    yield from map(str, sums.values())
