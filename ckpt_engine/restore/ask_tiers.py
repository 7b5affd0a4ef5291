"""Asks all tiers of a run at once.

For bytes it asks the next tier where one fails.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from ckpt_engine.copy.file_parity import restored
from ckpt_engine.errors import (
    CkptError,
    CorruptError,
    ForeignError,
    FormatError,
    StorageError,
    StorageMissingError,
    led_to,
)
from ckpt_engine.observe.events import LOG, TELL_SECONDS, announce
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import BufferPool, Decoder, FetchPiece, KnownBytes, ReadLimiter
from ckpt_engine.store.manifest import Manifest, Piece, SnapshotInfo, by_age
from ckpt_engine.store.names import ParsedId
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import ObjectInfo, Storage
from ckpt_engine.store.storage.retries import ask_apart

ANSWER_SECONDS = 20.0
"""How long a place may take to answer, if another one has what is needed."""
LONGER_SECONDS = 120.0
"""The same where no other place has it."""
SILENT_SECONDS = 2.0
"""How long a place may leave a request without a sign, if a nearer one has a snapshot."""
RECENT_SECONDS = 0.5
"""A place that has given a sign since then makes progress."""
_CORES = len(os.sched_getaffinity(0))
READS_ON_MACHINE = max(4, min(16, _CORES))
"""Digests of one core keep up with no bus."""
READS_FROM_SERVER = 16
"""Requests under way to a storage that is neither a disk nor memory: it is latency that they hide."""
AT_WORK = min(4, _CORES)
"""Threads beside those that read from a storage. More than there are cores only wait for each other."""
_LOOK_SECONDS = 0.1
"""For a place that is not watched for signs."""
_SAY = partial(announce, LOG)

T = TypeVar("T")
FindPlaces = Callable[[], Sequence[Repository]]
"""All places of a run as they can be reached now, nearest first."""
_left: dict[str, tuple[Future[Any], str]] = {}
"""By URL the question that a place has left unanswered, and for how long: it gets no other one before it has answered
that."""


@dataclass(slots=True)
class TierReply(Generic[T]):
    """What one place answered: `value`, or `error`. Neither: nothing yet."""

    place: Repository
    value: T | None = None
    error: CkptError | None = None


WaitPolicy = Callable[[Sequence[TierReply[T]]], float]
"""How many seconds are waited for those that have not answered yet, given all answers so far."""


def until_one_answers(answers: Sequence[TierReply[T]]) -> float:
    """Longer until one place has answered."""
    return ANSWER_SECONDS if any(answer.value is not None for answer in answers) else LONGER_SECONDS


def until_one_has_some(answers: Sequence[TierReply[T]]) -> float:
    """Longer until one place has snapshots: a run must not begin again because of a place that is slow."""
    return ANSWER_SECONDS if any(answer.value for answer in answers) else LONGER_SECONDS


def at_most(_: Sequence[TierReply[T]]) -> float:
    """Not longer, also where not all have answered."""
    return ANSWER_SECONDS


class ListedOnce(Repository):
    """A place for one who chooses a snapshot and then loads it: its listing is as it was when it was first asked."""

    _listed: Sequence[tuple[ParsedId, ObjectInfo]] | None = None

    def _manifests(self) -> Sequence[tuple[ParsedId, ObjectInfo]]:
        if self._listed is None:
            self._listed = super()._manifests()
        return self._listed


def ask(
    places: Sequence[Repository],
    question: Callable[[Repository], T],
    patience: WaitPolicy[T] = until_one_answers,
    say: Callable[[str], object] = _SAY,
    *,
    silence: float = math.inf,
) -> list[TierReply[T]]:
    """The answers of all places, in their order, asked at once. A place where no server listens is unreachable.

    Args:
        say: takes the line about a wait of some seconds.
        silence: where a nearer place has something, one that gives no sign for so many seconds is not waited for.

    Raises:
        CkptError: no place answered; the error of the nearest.
    """
    answers: list[TierReply[T]] = [TierReply(place) for place in places]
    _wait(answers, question, patience, say, silence)
    if all(answer.error is not None for answer in answers):
        assert answers[0].error is not None
        raise answers[0].error
    return answers


def _wait(
    answers: Sequence[TierReply[T]],
    question: Callable[[Repository], T],
    patience: WaitPolicy[T],
    say: Callable[[str], object],
    silence: float,
) -> None:
    """Ask each place on a thread of its own, a daemon as it may hang for ever, and wait for as long as it makes sense.

    Afterwards each answer has a value or an error.

    Raises:
        BaseException: of the question, if it is not of this project.
    """
    waiting: dict[int, Future[T]] = {}
    began, said = time.monotonic(), 0.0
    for number, answer in enumerate(answers):
        url = answer.place.storage.url
        before = _left.get(url)
        if before is not None and not before[0].done():
            answer.error = StorageError(before[1])
            continue
        _left.pop(url, None)
        waiting[number] = ask_apart(partial(question, answer.place), "ckpt-places")
    while True:
        waited = time.monotonic() - began
        for number, come in list(waiting.items()):
            if come.done():
                del waiting[number]
                try:
                    answers[number].value = come.result()
                except CkptError as err:
                    answers[number].error = err
        if not waiting:
            return
        limit = patience(answers)
        overdue = dict.fromkeys(_silent(answers, waiting, waited, silence), silence)
        if waited >= limit:
            overdue = dict.fromkeys(waiting, limit) | overdue
        for number, seconds in overdue.items():
            url = answers[number].place.storage.url
            why = f"{url} did not answer within {seconds:.0f} s"
            answers[number].error = StorageError(why)
            _left[url] = waiting.pop(number), why
        late = set[int]()
        if waited >= TELL_SECONDS and said != limit:  # what is about to be left out is said then
            late = set(waiting) - set(_silent(answers, waiting, waited, min(silence, RECENT_SECONDS)))
        if not late:
            left = (TELL_SECONDS if waited < TELL_SECONDS else limit) - waited
            most = _LOOK_SECONDS if silence < math.inf else math.inf
            futures.wait(waiting.values(), min(left, most), futures.FIRST_COMPLETED)
            continue
        said = limit
        urls = ", ".join(answers[number].place.storage.url for number in sorted(late))
        others = any(answer.value is not None for answer in answers)
        why = ": no other place has a snapshot" if others and limit > ANSWER_SECONDS else ""
        say(f"waiting for {urls}, up to {limit:.0f} s{why}")


def _silent(answers: Sequence[TierReply[T]], waiting: Container[int], waited: float, seconds: float) -> Iterator[int]:
    """Those still asked that have given no sign for so long, behind one that has something."""
    behind = False
    for number, answer in enumerate(answers):
        if behind and number in waiting:
            silent_seconds = answer.place.storage.capabilities.silent_seconds
            if (silent_seconds() if silent_seconds is not None else waited) >= seconds:
                yield number
        behind = behind or bool(answer.value)


def of_one_run(answers: Sequence[TierReply[T]]) -> Sequence[TierReply[T]]:
    """The same answers, in which a place with snapshots of another run than the nearest one's counts as an error.

    A snapshot in memory is left out, as if it was not there, if it is of a run that no other place knows and all of
    them answer: it outlives a folder that was removed to start again.

    Args:
        answers: to a question that has `run_of` among it: nothing is asked here any more.
    """
    if len(answers) == 1:
        return answers
    answers = _without_memory_of_other_runs(answers)
    ours: str | None = None
    for answer in answers:
        if not answer.value:
            continue  # away, or a record that was never used: such a place joins the run
        found = run_of(answer.place)
        if found is not None and ours is not None and found != ours:
            answer.value = None
            answer.error = ForeignError(
                f"{answer.place.storage.url} holds another run ({found[:8]}…, this one is {ours[:8]}…)",
                hint="give this run a place of its own",
            )
        ours = ours or found
    return answers


def _without_memory_of_other_runs(answers: Sequence[TierReply[T]]) -> Sequence[TierReply[T]]:
    others = [answer for answer in answers if not _in_memory(answer)]
    known = {run_of(answer.place) for answer in others if answer.error is None}
    if known <= {None} and any(answer.error is not None for answer in others):
        return answers  # a place that is unreachable may know it
    return [answer for answer in answers if not _in_memory(answer) or not others or run_of(answer.place) in known]


def _in_memory(answer: TierReply[T]) -> bool:
    return answer.place.storage.capabilities.view is not None


def run_of(place: Repository) -> str | None:
    """The run that a place's record names. Where it is missing or damaged the snapshots may be good all the same."""
    try:
        record = place.record()
    except CkptError:
        return None
    return record.run if record is not None else None


def _ask_with_run(question: Callable[[], T], place: Repository) -> T:
    """The answer of a place, whose record is read with it: of an object store side by side, as it may take a second."""
    if not place.storage.capabilities.slow_answers:
        run_of(place)
        return question()
    looked = ask_apart(partial(run_of, place), "ckpt-places-run")
    try:
        found = question()
    finally:
        futures.wait([looked], LONGER_SECONDS)
    if looked.done():
        looked.result()
    return found


def ids(place: Repository) -> Sequence[ParsedId]:
    """All snapshots of a place by name."""
    return _ask_with_run(place.ids, place)


def infos(place: Repository) -> Sequence[SnapshotInfo]:
    """All snapshots of a place."""
    return _ask_with_run(place.list, place)


def snapshots(places: Sequence[Repository]) -> list[SnapshotInfo]:
    """The snapshots that any place has, oldest first.

    Raises:
        CkptError: no place answers.
    """
    nearest_last = reversed(of_one_run(ask(places, infos)))
    found = {info.id: info for answer in nearest_last for info in answer.value or ()}
    return sorted(found.values(), key=by_age)


@dataclass(frozen=True, slots=True)
class Repair:
    """Bytes that came from another place than the rest.

    Args:
        entry: the entry whose digest did not fit; None: the first place could not be read.
        file: data file.
        nbytes: how many.
        bad, good: URLs of the place that failed and of the one that served.
        why: what was wrong.
    """

    entry: str | None
    file: str
    nbytes: int
    bad: str
    good: str
    why: str

    def __str__(self) -> str:
        what = f"{self.entry!r} ({self.nbytes} bytes)" if self.entry else f"{self.nbytes} bytes of {self.file}"
        return f"{what} came from {self.good}, because of {self.bad}: {self.why}"


class Sources:
    """Storages with the same objects, the preferred one first. Thread safe.

    `repairs` tells what others than the first had to serve.

    Args:
        known: as for `Decoder`.
        damaged: takes the names of data files that some storage does not give as they were written.
    """

    def __init__(
        self, storages: Sequence[Storage], known: KnownBytes = MappingProxyType({}), damaged: set[str] | None = None
    ) -> None:
        self._storages = list(storages)
        self.known = known
        self._damaged = set[str]() if damaged is None else damaged
        self.repairs: list[Repair] = []
        self._dead: set[int] = set()
        first = self._storages[0]
        at_once = READS_ON_MACHINE if first.capabilities.cheap_reads else READS_FROM_SERVER
        self._turns = ReadLimiter(at_once, f"reading from {first.url}")
        self.threads = at_once + AT_WORK
        """How many read from here: some verify, decode and wait for a turn while others read."""

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` from the first storage that can; one that fails otherwise than by what it has is not asked again.

        As many read at once as suits the first. If all did, all would have their bytes at the same time, and while all
        decode them nothing would be read.

        Raises:
            CkptError: that of the first storage, if none can.
        """
        first: CkptError | None = None
        with self._turns.one():
            for number, storage in enumerate(self._storages):
                if number in self._dead and number < len(self._storages) - 1:
                    continue
                try:
                    storage.get_into(name, start, out)
                except CkptError as err:
                    first = first or _without_frames(err)
                    if not isinstance(err, FormatError | StorageMissingError):
                        self._damaged.add(name)  # plans see what is missing or too short
                        self._dead.add(number)
                    continue
                if number and (first is not None or self._dead):
                    why = first.message if first is not None else "it failed before"
                    self.repairs.append(Repair(None, name, out.nbytes, self._storages[0].url, storage.url, why))
                return
        assert first is not None
        if (made_by := self._by_parity(name, start, out)) is None:
            raise first
        self.repairs.append(Repair(None, name, out.nbytes, self._storages[0].url, made_by, first.message))

    def view(self, name: str, start: int, nbytes: int) -> memoryview | None:
        """The bytes where they are, to be verified and not changed; None where they have to be read."""
        view = self._storages[0].capabilities.view
        if view is None:
            return None
        try:
            return view(name, start, nbytes)
        except CkptError:
            return None  # reading says what is wrong

    def repair(self, entry: str, name: str, piece: Piece, out: memoryview) -> None:
        """Fill `out` with a piece whose bytes are not what was written.

        Raises:
            CorruptError: no other storage has it as it was written; names the entry.
        """
        what = f"bytes {piece.offset} to {piece.offset + piece.nbytes} of {name} do not match their digest"
        for storage in self._storages:
            direct = storage.capabilities.unshared or storage
            try:
                direct.get_into(name, piece.offset, out)
            except CkptError:
                continue  # it has nothing to offer here; what is wrong with the piece is said already
            if digest(out) == piece.digest:
                if storage is not self._storages[0]:  # else it was damaged on the way only
                    self.repairs.append(Repair(entry, name, piece.nbytes, self._storages[0].url, storage.url, what))
                return
            self._damaged.add(name)
        made_by = self._by_parity(name, piece.offset, out)
        if made_by is None or digest(out) != piece.digest:
            raise CorruptError(f"{entry!r}: {what}")
        self.repairs.append(Repair(entry, name, piece.nbytes, self._storages[0].url, made_by, what))

    def _by_parity(self, name: str, start: int, out: memoryview) -> str | None:
        """Fill `out` with bytes that parity makes again, to be verified; the URL of the parity, None: it cannot."""
        self._damaged.add(name)
        return next(filter(None, (restored(storage, name, start, out) for storage in self._storages)), None)

    def decoder(
        self,
        manifest: Manifest,
        glance: FetchPiece | None = None,
        there: Callable[[Piece], memoryview | None] = lambda _: None,
        rooms: BufferPool | None = None,
    ) -> Decoder:
        """Decodes pieces of a snapshot that these storages have; what it has to read is verified and repaired.

        Args:
            glance, there, rooms: as for `Decoder`.
        """

        def fetch(entry: str, piece: Piece, out: memoryview) -> None:
            name = manifest.files[piece.file].name
            self.read(name, piece.offset, out)
            if digest(out) != piece.digest:
                self.repair(entry, name, piece, out)

        return Decoder(manifest, fetch, glance, there, rooms, self.known)


def _without_frames(error: CkptError) -> CkptError:
    """The same error, whose chain of tracebacks does not keep buffers alive."""
    for one in led_to(error):
        one.__traceback__ = None
    return error
