"""Loads the newest valid snapshot.

It falls back to older ones, and remembers why it rejected each newer one. Several ranks load the same snapshot: rank 0
chooses it, and all take it if each of them can read what it needs.

`Restorer` does it for one trainer: it reaches all tiers and the memory of the writer of one that died, and knows the
line of history that a load continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from ckpt_engine.config import Config
from ckpt_engine.copy.job import ErrorRecord
from ckpt_engine.errors import (
    CkptError,
    CorruptError,
    ForeignError,
    FormatError,
    NoUsableSnapshotError,
    RanksError,
    StorageError,
    WaitTimeoutError,
)
from ckpt_engine.observe import units
from ckpt_engine.observe.events import Event, Notice, said_if_slow
from ckpt_engine.observe.resume_report import Rejected
from ckpt_engine.ranks.session import LOAD_SECONDS, START_SECONDS, Session
from ckpt_engine.restore import ask_tiers, heal, memory, memory_of_ranks
from ckpt_engine.restore.ask_tiers import FindPlaces, ListedOnce, Repair, Sources
from ckpt_engine.restore.changes import UNCHANGED, note_of, planned
from ckpt_engine.restore.choose import (
    Candidate,
    ManifestCheck,
    SearchLog,
    UnreachableTier,
    candidates,
    choose,
    notes_about,
    require_none,
)
from ckpt_engine.restore.choose_together import agree_on, choose_together
from ckpt_engine.restore.far_storage import storage_of
from ckpt_engine.restore.load_in_place import copy_into, fill_live
from ckpt_engine.restore.match import require_fit, tensor_shapes
from ckpt_engine.restore.node_roots import JointTiers
from ckpt_engine.restore.origin import look_elsewhere, note_of_fork
from ckpt_engine.restore.read import read_entries
from ckpt_engine.restore.shared_reads import read_once
from ckpt_engine.snapshot.ownership import Tenure
from ckpt_engine.snapshot.pipeline import Pipeline
from ckpt_engine.state.flatten import shapes_of
from ckpt_engine.state.rebuild import Rebuilder
from ckpt_engine.store.branches import continued
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.lease import read_holder
from ckpt_engine.store.manifest import Manifest, SnapshotInfo
from ckpt_engine.store.manifest_codec import uncollected
from ckpt_engine.store.repository import CHANGED, FORKED, Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.tree import entries_in, schemas_of
from ckpt_engine.writer.lease_wait import let_finish

_Found = TypeVar("_Found")
Live = Callable[[Manifest], Any]
"""Some of the live state, for a manifest: its tensors are filled in place, and all else is read as without it."""
ATTACH_SECONDS = FINISH_SECONDS = 60.0
TIDY_FROM = 16
"""A line that names so many attempts is looked through for those that have left nothing."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded snapshot and how it was found.

    Args:
        state: what was saved; None once it was handed over.
        notes: what came back as a plain equivalent, because its class is not imported here; and, where there are
            several places, which one served, and what was repaired.
        rejected: newer snapshots that could not be used.
        read_bytes: bytes read from storage.
        place: URL of the place that served.
        repairs: what another place had to serve.
        away: places that did not answer: there may be something newer.
        own: where another number of ranks wrote it: what each of them had of its own, by component.
        unverified_bytes: read for DTensors from pieces of which little was needed: no digest is of these bytes.
        has_wrapped: some of its tensors are `Wrapped`.
        damaged: data files that some place did not give as they were written.
        newest_seq: the highest number of all snapshots that were there when this one was chosen.
        lost_steps: steps that had begun after this snapshot when the trainer died; None where that is not known.
    """

    state: Any = field(repr=False)
    info: SnapshotInfo
    manifest: Manifest = field(repr=False)
    notes: tuple[str, ...]
    rejected: tuple[Rejected, ...]
    read_bytes: int
    seconds: float
    place: str = ""
    repairs: tuple[Repair, ...] = ()
    away: tuple[UnreachableTier, ...] = ()
    lost_steps: int | None = None
    own: Mapping[int, Any] = field(default_factory=dict, repr=False)
    unverified_bytes: int = 0
    newest_seq: int = 0
    has_wrapped: bool = False
    damaged: frozenset[str] = frozenset()

    @property
    def left_out(self) -> tuple[str, ...]:
        """A sentence about each place in `away`."""
        newer = "did not answer and may have something newer"
        return tuple(
            f"{one.url} {'is left out' if one.code == ForeignError.code else newer}: [{one.code}] {one.reason}"
            for one in self.away
        )

    @property
    def from_memory(self) -> bool:
        """Whether it came from the memory of the writer of the trainer that died."""
        return self.place == memory.URL


def load(
    where: Sequence[Repository],
    step: int | None = None,
    *,
    into: Any = None,
    live: Live | None = None,
    check: ManifestCheck | None = None,
    pickle_paths: Sequence[str] = (),
    only: str | None = None,
    rank: int = 0,
    size: int = 1,
    known: dict[bytes, Manifest] | None = None,
    damaged: set[str] | None = None,
) -> Loaded | None:
    """Read the newest valid snapshot (of `step`), or None if there are none at all.

    It comes from the nearest place that has it whole; what turns out to be damaged or gone there comes from the next
    one. An older snapshot is the last resort.

    Args:
        where: all places of the run, nearest first.
        into: live state of the same structure, or None in the place of a component that is to be made; its tensors are
            overwritten in place and returned in the state. If
            an error is raised after reading began, their content is undefined.
        live: in the place of `into`: makes, for the snapshot that is read, some of the live state.
        check: see `choose.ManifestCheck`.
        only: no other snapshot than this one.
        rank, size: as which of how many ranks.
        known: see `choose.SearchLog`.
        damaged: takes what `Loaded.damaged` will have, also where an error is raised.

    Raises:
        NoUsableSnapshotError, ResumeError: as `choose`.
        MismatchError: `into` has other tensors; raised before data is read.
    """
    began = time.perf_counter()
    search = SearchLog(known={} if known is None else known, damaged=set() if damaged is None else damaged)

    def fits(found: Manifest) -> None:
        manifest = found.as_rank(rank)
        if into is not None:
            require_fit(into, shapes_of(into), tensor_shapes(manifest), manifest.info.id)
        if check is not None:
            check(manifest)

    asks = into is not None or check is not None
    for candidate in candidates(where, search, step=step, check=fits if asks else None, only=only):
        sources = Sources(list(map(attrgetter("storage"), candidate.sources)), damaged=search.damaged)
        try:
            if live is not None:  # it looks at the leaves
                candidate = candidate.unpacked()
            manifest = candidate.manifest.as_rank(rank)
            others = candidate.manifest.own_trees if manifest.world_size != size else {}
            takes = into if live is None else live(manifest)
            nbytes = sum([piece.nbytes for _, piece in stored_pieces(manifest)])
            line = partial(_reading, candidate, nbytes)
            with said_if_slow(line) if rank == 0 else nullcontext():
                state, own, notes, unverified_bytes, has_wrapped = _read(sources, manifest, takes, others, pickle_paths)
        except (FormatError, StorageError) as err:
            search.reject(candidate.info.id, err, places=len(where), sources=candidate.sources)
            continue
        died_at = where[0].storage.capabilities.died_at_step  # what a dead trainer has left is the nearest place
        return Loaded(
            state=state if takes is None else copy_into(state, takes),
            info=candidate.info,
            manifest=manifest,
            notes=(*notes, *notes_about(where, candidate, sources.repairs, search)),
            rejected=tuple(one for one in search.rejected if one.id != candidate.info.id),
            read_bytes=nbytes,
            seconds=time.perf_counter() - began,
            place=candidate.sources[0].storage.url,
            repairs=tuple(sources.repairs),
            away=search.missed(where),
            lost_steps=None if died_at is None else max(0, died_at - candidate.info.step),
            own=own,
            unverified_bytes=unverified_bytes,
            newest_seq=search.newest_seq,
            has_wrapped=has_wrapped,
            damaged=frozenset(search.damaged),
        )
    require_none(where, search, step)
    return None


def _reading(candidate: Candidate, nbytes: int) -> str:
    return f"reading {candidate.info.id} ({units.size(nbytes)}) from {candidate.sources[0].storage.url}"


def _read(
    sources: Sources, manifest: Manifest, takes: Any, others: Mapping[int, Any], pickle_paths: Sequence[str]
) -> tuple[Any, Mapping[int, Any], tuple[str, ...], int, bool]:
    """Read a snapshot, as far as possible into the tensors of `takes`: state, own, notes, bytes and `has_wrapped`.

    Args:
        others: the trees of all ranks that saved it, where their number differs.
    """
    live: Mapping[str, torch.Tensor] = {}
    finished: Collection[str] = ()
    rest: Sequence[str] | None = None
    unverified_bytes = 0
    if takes is not None:
        live, finished, unverified_bytes = fill_live(sources, manifest, takes)
    if live or manifest.world_size > 1:
        wanted = set(entries_in([manifest.tree, *others.values()])) - live.keys()
        rest = [name for name in manifest.entries if name in wanted]
    entries = {**live, **read_entries(sources, manifest, rest)}
    with uncollected():
        schemas = schemas_of(manifest, lambda name: entries[name].numpy().tobytes())
        rebuilder = Rebuilder(entries, pickle_paths, finished=finished, schemas=schemas)
        state = rebuilder.state(manifest.tree)
        own = {number: rebuilder.state(tree) for number, tree in others.items()}
    notes = rebuilder.notes
    if unverified_bytes:
        notes.append(
            f"{units.size(unverified_bytes)} were read out of pieces of which less than half was needed: "
            "no digest is of these bytes alone (`ckpt verify` checks the pieces)"
        )
    return state, own, tuple(notes), unverified_bytes, bool(rebuilder.wrapped)


def load_together(session: Session, where: FindPlaces, step: int | None, **how: Any) -> Loaded | None:
    """As `load`, on all ranks at once: what one of them cannot read none of them takes.

    Args:
        how: as of `load`, with `into`, `live`, `check` and `known`.

    Raises:
        RanksError: a rank does not find what rank 0 has chosen.
    """
    rank, size, check, known = session.ranks.rank, session.ranks.size, how["check"], how["known"]
    seen = None if check is None else lambda manifest: check(manifest.as_rank(0))
    refused: dict[str, CkptError] = {}
    damaged = set[str]()
    with (
        JointTiers(session, where) as gathered,
        # What is filled in place by `live` is divided, too.
        read_once(session, gathered.places, how["into"], alike=how["live"] is None) as places,
    ):
        while True:
            search = SearchLog(known=known)
            look = partial(choose, step=step, check=seen, search=search, refused=refused)
            chosen, _ = agree_on(session, gathered, lambda: look(places()))  # noqa: B023
            if chosen is None:
                return None
            found, failure = None, None
            try:
                found = load(places(), only=chosen, rank=rank, size=size, damaged=damaged, **how)
                if found is None:
                    raise RanksError(
                        f"rank 0 has chosen snapshot {chosen}, and rank {rank} does not find it",
                        hint="all ranks need the same folder: a shared file system, or an object store",
                    )
            except CkptError as err:
                failure = err
            mine = {"error": failure and asdict(ErrorRecord.of(failure)), "damaged": [*damaged]}
            verdict, hurt = session.meet(lambda: mine, _judged, LOAD_SECONDS)  # noqa: B023
            damaged.update(*hurt)
            if verdict is None:
                assert found is not None
                rejected = tuple(one for one in (*search.rejected, *found.rejected) if one.id != chosen)
                return replace(found, rejected=rejected, newest_seq=search.newest_seq, damaged=frozenset(damaged))
            error = ErrorRecord(**verdict).exception()
            if not isinstance(error, NoUsableSnapshotError):
                raise failure or error
            refused[chosen] = CorruptError(error.message)


def _verdict(said: list[dict[str, Any] | None]) -> Any:
    """What went wrong on the first rank that has something to say; first of all what another snapshot does not mend."""
    wrong: list[tuple[int, dict[str, Any]]] = []
    for rank, one in enumerate(said):
        if one is None:
            raise WaitTimeoutError(f"timed out waiting for rank {rank} to report whether it has loaded the snapshot")
        if one["error"] is not None:
            wrong.append((rank, one["error"]))
    if not wrong:
        return None
    rank, first = min(wrong, key=lambda item: item[1]["code"] == NoUsableSnapshotError.code)
    return {**first, "message": f"on rank {rank}: {first['message']}"}


def _judged(said: list[dict[str, Any] | None]) -> tuple[Any, list[list[str]]]:
    """The verdict, and what each rank has found damaged."""
    return _verdict(said), [one["damaged"] for one in said if one is not None]


class Restorer:
    """What one checkpointer restores from. Training thread only.

    Args:
        session: of several ranks; None: this process is alone.
        pipeline: takes the snapshots: it learns what it resumes from.
        emit: takes events.
        owner: says whether another one of this process writes the run.
    """

    def __init__(
        self, config: Config, session: Session | None, pipeline: Pipeline, emit: Callable[[Event], None], owner: Tenure
    ) -> None:
        self._config = config
        self._session = session
        self._pipeline = pipeline
        self._emit = emit
        self._owner = owner
        self._memory = config.memory is not None
        self._attached: memory.MemoryStorage | None = None
        self._listed: list[ListedOnce] = []
        """The further tiers since a snapshot was chosen: what loads it goes by the same listings."""
        self._known: dict[bytes, Manifest] = {}
        """The manifests that were read since then."""
        self.away: set[str] = set()
        """Places that the last load has gone without, which it says."""
        self._mute = False
        """The writer of an earlier trainer does not answer."""
        self._begins_elsewhere = False
        """What was found last is of another run."""
        self.changes, self.line_note = UNCHANGED, note_of(config.resume) if config.resume is not None else {}
        """Of the snapshot that was loaded last; and the note of each snapshot from here on."""

    def choose(self, step: int | None, check: ManifestCheck | None) -> Candidate | None:
        """See `Engine.choose`."""
        self._listed.clear()
        if self._session is not None:
            self.attach()
        alone = partial(choose, check=check, search=SearchLog(known=self._known))
        return self._first(step, alone, partial(choose_together, check=check, known=self._known))

    def _first(
        self, step: int | None, alone: Callable[..., _Found | None], together: Callable[..., _Found | None]
    ) -> _Found | None:
        """What is found in the places of the run; while there is nothing, in those of the run that it begins from.

        Args:
            alone: looks, where this process is alone; `together`: of several ranks.
        """
        session, origin = self._session, getattr(self._config.resume, "from", None)

        def look(where: FindPlaces, at: int | None) -> _Found | None:
            return alone(where(), at) if session is None else together(session, where, at)

        found = look(self._listed_once, step)
        self._begins_elsewhere = found is None and origin is not None
        return look_elsewhere(str(origin), look) if self._begins_elsewhere else found

    def load(self, step: int | None, *, back: bool, **how: Any) -> Loaded | None:
        """See `Checkpointer.load`; `how`: as of `load.load`. What is saved from here on comes after it."""
        if self._memory and self._owner.settle_older():
            self._owner.claim()  # what it has in memory only becomes durable when it is closed
        self.changes = UNCHANGED
        try:
            if self._session is not None:
                self.attach()
            self._let_finish()
            how["known"] = self._known
            found = self._first(step, partial(load, **how), partial(load_together, **how))
            self._pipeline.lineage.looked(0 if found is None or self._begins_elsewhere else found.newest_seq)
            if found is not None:
                self._pipeline.lineage.damaged |= found.damaged
                if found.damaged and (self._session is None or self._session.coordinates):
                    self._pipeline.lineage.damaged -= heal.after_load(self._attached, self._tiers, found, self._emit)
                self.away = set(map(attrgetter("url"), found.away))
                restarts = self._begins_elsewhere
                fork = note_of_fork(found.place, found.manifest) if restarts else {}
                look = partial(before_of, found, self._listed_once, newest=step is None, back=back)
                if self.line_note or fork or not {CHANGED, FORKED}.isdisjoint(found.manifest.notes):
                    self.changes, manifest, line = planned(self._config.resume, found.manifest, found.state)
                    found, self.line_note = replace(found, manifest=manifest), {**line, **fork}
                    restarts |= self.changes.restarts
                self._agree(found.info, tuple if restarts else look)
        finally:
            self.detach()
        return found

    def _let_finish(self) -> None:
        """Before this process has the lease: the writer of a dead trainer may be about to make something newer."""
        if self._memory or self._pipeline.started:
            return
        session, near = self._session, self.nearest()
        if session is not None and session.ranks.rank not in [place[0] for place in session.places()]:
            return
        patience = ask_tiers.until_one_answers if len(self._config.tiers) == 1 else ask_tiers.at_most
        with suppress(CkptError):  # the load says what is wrong there
            answers = ask_tiers.ask([near], lambda place: read_holder(place.storage), patience)
            let_finish(near.storage, answers[0].value, FINISH_SECONDS, self._emit)

    def go_on_after(self, info: SnapshotInfo) -> None:
        """See `Engine.go_on_after`."""
        self._agree(info, lambda: continued(info, (), ()))

    def _agree(self, info: SnapshotInfo, look: Callable[[], tuple[tuple[str, int], ...]]) -> None:
        """All ranks resume from a snapshot in the line that rank 0 sees."""

        if self._session is None:
            before = look()
        else:
            agreed: list[list[Any]] = self._session.agree(lambda: [list(one) for one in look()], START_SECONDS)
            before = tuple((str(attempt), int(last)) for attempt, last in agreed)
        self._pipeline.lineage.go_on(info, before)

    @cached_property
    def _tiers(self) -> list[Storage]:
        """Nearest first."""
        return [storage_of(tier) for tier in self._config.tiers]

    def nearest(self) -> Repository:
        """The nearest tier."""
        self._owner.settle_older()
        return Repository(self._tiers[0])

    def open_ahead(self) -> None:
        """Have the libraries of object stores imported while something else is waited for; nothing is asked."""
        for storage in self._tiers:
            if (prepare := storage.capabilities.prepare) is not None:
                threading.Thread(target=prepare, name="ckpt-open", daemon=True).start()

    def is_further(self, url: str) -> bool:
        """Whether that is how a further tier is called in events."""
        return url in [storage.url for storage in self._tiers[1:]]

    def places(self) -> list[Repository]:
        """All of them, nearest first."""
        return [*self._near(), *map(Repository, self._tiers[1:])]

    def _listed_once(self) -> list[Repository]:
        """The same. The nearest tier is listed each time: a writer that ends may still leave a snapshot there."""
        near = self._near()
        self._listed = self._listed or list(map(ListedOnce, self._tiers[1:]))
        return [*near, *self._listed]

    def _near(self) -> list[Repository]:
        """What is in memory, and the nearest tier."""
        nearest = self.nearest()
        if self._session is None:  # of several ranks all attach at once, and one may look alone
            self.attach()
        return [nearest] if self._attached is None else [Repository(self._attached), nearest]

    def attach(self) -> None:
        """Restorer for the snapshot that the writer of a dead trainer offers, before a new writer takes its place."""
        if self._attached is not None or not self._memory or self._pipeline.started or self._owner.closed:
            return
        url = self._config.root_url
        if self._session is not None:
            self._attached, held = memory_of_ranks.attach_together(self._session, url, ATTACH_SECONDS, self._emit)
        elif not self._answers(url):
            return
        else:
            self._attached = memory.attach(url, ATTACH_SECONDS)
            self._pipeline.behind |= self._attached is not None
            held = self._attached is None and memory.is_held(url, ATTACH_SECONDS)
        if held and self._attached is None:
            self._owner.claim()
            self._pipeline.start()  # with the lease: what is there, and cannot be had from memory, is durable by then

    def _answers(self, url: str) -> bool:
        """Whether a writer can be asked. One that hangs is asked once."""
        try:
            return not self._mute and memory.answers(url)
        except WaitTimeoutError as err:
            self._mute = True
            note = f"{err.message}: what it may have in memory is not waited for; `ckpt status {url}` says how it is"
            self._emit(Notice("WARNING", note))
            return False

    def detach(self) -> None:
        """Give the memory back. The writer that offered it ends when a new one starts, or when it has lingered."""
        self._listed.clear()
        self._known.clear()
        if self._attached is not None:
            self._attached.close()
            self._attached = None


def before_of(
    found: Loaded, where: Callable[[], Sequence[Repository]], *, newest: bool, back: bool = False
) -> tuple[tuple[str, int], ...]:
    """What is `before` in the line of a process that has loaded `found`; see `branches.continued`.

    Args:
        where: all places; asked for only if it matters what else there is.
        newest: it was asked for the newest usable one: what is newer cannot be used.
        back: what is newer is to be left: the run has diverged in it.
    """
    is_newest = found.newest_seq <= found.info.seq
    if is_newest and len(found.info.line.before) < TIDY_FROM:
        return continued(found.info, (), ())
    try:
        there = ask_tiers.snapshots(where())
    except CkptError:
        return continued(found.info, (), ()) if is_newest else ()  # who knows what there is
    newer = [info for info in there if info.seq > found.info.seq]
    superseded = {info.id for info in newer} if back else heal.passed_over(found) if newest else set()
    before = continued(found.info, newer, superseded)
    left = {info.line.attempt for info in there}
    return before if found.away else tuple(one for one in before if one[0] in left)
