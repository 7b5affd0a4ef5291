"""What a writer records beside snapshots: the attempts of a run, and how its tiers are.

`attempts.json` says who trained, how long, what the time went into, and how it ended: evidence of how often the run
fails, and how much of its time was of use. The writer of the nearest tier keeps it, because it outlives the trainer: an
attempt whose end it has written lost no more than a process, one without an end lost the writer too, and what was in
memory. `ckpt status` reads the status file. `TierHealth` knows whether a tier works, and says when that changes.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from ckpt_engine.copy.job import ErrorRecord
from ckpt_engine.errors import CkptError, LeaseHeldError, StorageMissingError, StorageStalledError
from ckpt_engine.observe.events import (
    CLOSED,
    ENDS,
    MACHINE,
    PROCESS,
    UNKNOWN,
    AttemptsFound,
    Event,
    Notice,
    TierDegraded,
    TierRecovered,
)
from ckpt_engine.observe.metrics import RunSpent
from ckpt_engine.observe.units import size
from ckpt_engine.store import container, names
from ckpt_engine.store.container import parsed, seal
from ckpt_engine.store.lease import LeaseHolder, ProcessIdentity
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.object_requests import asking
from ckpt_engine.writer.channel import SpentTimes

BEAT_SECONDS = 60.0
MOST_INTERVALS = 8
CHANGED = 1.5
"""An interval is recorded again when it has changed by this factor."""
_WHY_LETTERS = 200
_END_SECONDS = 1.0
"""A heartbeat that hangs in a call to the storage is left behind."""
MOST = 256
"""Of older attempts only the sum of their times is kept: nothing is believed of failures that long ago."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process that trained.

    Args:
        host: its machine, for people.
        process: equal for the same process only; empty where the system does not tell.
        began: wall-clock seconds at which its writer opened.
        seconds: that it was known to live from then on, by a clock that is never set.
        end: one of `ENDS`; None: it trains, or the writer was lost with it.
        ranks: that trained together.
        started: wall-clock seconds at which its process started; 0.0: not known.
        step: the last one that was complete; -1: not known.
        times: what its seconds since then went into, see `metrics.TIMES`, and `metrics.MEASURED`. The rest came
            after its last boundary.
        intervals: how often it took snapshots: since which second after `began` each how many steps, and why; the
            newest `MOST_INTERVALS`.
    """

    host: str
    process: str
    began: float
    seconds: float = 0.0
    end: str | None = None
    ranks: int = 1
    started: float = 0.0
    step: int = -1
    times: Mapping[str, float] = field(default_factory=dict)
    intervals: tuple[tuple[float, int, str], ...] = ()

    @property
    def lasted(self) -> float:
        """Seconds from the start of its process until it was last known to live."""
        return self.seconds + max(0.0, self.began - self.started if self.started else 0.0)

    @property
    def failure(self) -> str:
        """The class of the failure that has ended it; "": none has. Of one that trains it means nothing.

        Of several ranks all end when one is lost: which machine that was on is not known.
        """
        if self.end is None:
            return MACHINE
        if self.end == CLOSED:
            return ""
        return PROCESS if self.ranks == 1 else UNKNOWN


def after(spent: RunSpent, one: Attempt, following: Attempt | None) -> RunSpent:
    """With one more attempt, and what came until the one that follows it."""
    failed = one.failure != "" and (one.end is not None or following is not None)
    rest = "unknown" if not one.times else "replay" if failed else "productive" if one.end is None else "end"
    down = 0.0 if following is None else (following.started or following.began) - one.began - one.seconds
    return spent.plus(one.lasted, one.times, rest, down)


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """All attempts of a run.

    Args:
        rows: the newest, oldest first.
        before: what went into those before them.
    """

    rows: tuple[Attempt, ...] = ()
    before: RunSpent = field(default_factory=RunSpent)

    def bounded(self) -> AttemptHistory:
        """With `MOST` rows at most."""
        before, many = self.before, len(self.rows) - MOST
        for one, following in pairwise(self.rows[: max(0, many) + 1]):
            before = after(before, one, following)
        return AttemptHistory(self.rows[max(0, many) :], before)

    @property
    def spent(self) -> RunSpent:
        """What the time of the run went into until its newest heartbeat."""
        spent = self.before
        for one, following in zip_longest(self.rows, self.rows[1:]):
            spent = after(spent, one, following)
        return spent

    @property
    def over(self) -> tuple[RunSpent, float]:
        """The same where none of them trains any more, and when the last one was known to live; 0.0: there is none."""
        if not self.rows:
            return self.before, 0.0
        until = self.rows[-1].began + self.rows[-1].seconds
        spent = self.before
        for one, following in pairwise((*self.rows, Attempt("", "", until))):
            spent = after(spent, one, following)
        return spent, until


def encode_attempts(history: AttemptHistory) -> bytes:
    """The bytes of the record."""
    kept = history.bounded()
    return seal({"attempts": [asdict(one) for one in kept.rows], "before": asdict(kept.before)}) + b"\n"


def parse_attempts(text: bytes, where: str) -> AttemptHistory:
    """The attempts that a record with this text has.

    Raises:
        CorruptError: it is none.
    """

    def made(body: dict[str, Any]) -> AttemptHistory:
        return AttemptHistory(tuple(_attempt(row) for row in body["attempts"]), _spent(body.get("before", {})))

    return parsed(text, where, made, "remove it: how often the run fails is learned again")


def _spent(row: object) -> RunSpent:
    container.require(isinstance(row, dict), "what was before is no object")
    assert isinstance(row, dict)
    values = {name: row.get(name, 0.0) for name in asdict(RunSpent())}
    container.require(all(map(container.is_time, values.values())), "times before that are none")
    return RunSpent(**values)


def _attempt(row: dict[str, Any]) -> Attempt:
    container.require(type(row) is dict, "a row that is no object")
    one = Attempt(**_known(Attempt, row) | {"intervals": tuple(map(_interval, row.get("intervals", ())))})
    container.require(type(one.host) is str and type(one.process) is str, "a name that is no text")
    container.require(container.is_time(one.began) and container.is_time(one.seconds), "a time that is none")
    container.require(one.end in (None, *ENDS) and container.is_whole(one.ranks, 1), "an end or ranks that are none")
    container.require(container.is_time(one.started) and container.is_whole(one.step, -1), "a start or a step")
    container.require(
        type(one.times) is dict and all(map(container.is_time, one.times.values())), "times that are none"
    )
    return one


def _interval(row: Sequence[Any]) -> tuple[float, int, str]:
    since, steps, why = row
    good = container.is_time(since) and container.is_whole(steps, 1) and type(why) is str
    container.require(good, "an interval that is none")
    return since, steps, why


def read_attempts(storage: Storage) -> AttemptHistory:
    """The attempts of the run at a root; none where there is no record.

    Raises:
        CorruptError: the record is damaged.
        StorageError
    """
    try:
        text = storage.get(names.ATTEMPTS)
    except StorageMissingError:
        return AttemptHistory()
    return parse_attempts(text, f"{storage.url}/{names.ATTEMPTS}")


class AttemptRecord:
    """Writes the row of one trainer, while its writer holds the run's lease. What goes wrong is said once, not raised.

    Args:
        storage: the nearest tier; calls may hang, but not `begin` longer than any other of the start.
        trainer: that the lease is taken for.
        ranks: that train together.
        check: raises LeaseHeldError if the lease was lost.
        emit: takes events; any thread.
    """

    def __init__(
        self,
        storage: Storage,
        trainer: LeaseHolder,
        ranks: int,
        check: Callable[[], None],
        emit: Callable[[Event], object],
    ) -> None:
        self._storage = storage
        self._check = check
        self._emit = emit
        process = ProcessIdentity.of(trainer.pid)
        name = "" if process is None else f"{process.boot}/{process.namespace}/{process.pid}/{process.ticks}"
        self._mine = Attempt(trainer.host, name, time.time(), ranks=ranks)
        self._opened = time.monotonic()
        self._earlier = AttemptHistory()
        self.spent: Callable[[], SpentTimes | None] = lambda: None
        """What the trainer says of its time; None: nothing."""
        self._said = self._gone = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ckpt-attempt", daemon=True)

    def begin(self) -> None:
        """Read what earlier attempts have left, tell it, and add this one; from now on it is known to live."""
        try:
            self._earlier = read_attempts(self._storage)
        except CkptError as err:
            self._say(err)
        rows = self._earlier.rows
        if rows and self._mine.process and rows[-1].process == self._mine.process:
            *earlier, before = rows  # the writer of this very trainer was lost, or closed
            self._opened -= max(before.seconds, self._mine.began - before.began)
            self._earlier, self._mine = replace(self._earlier, rows=tuple(earlier)), replace(before, end=None)
        rows = self._earlier.rows
        lasted, failures = tuple(one.seconds for one in rows), tuple(one.failure for one in rows)
        seconds = time.monotonic() - self._opened
        if lasted or self._mine.seconds:
            reached = max((one.step for one in rows), default=-1)
            spent, until = self._earlier.over
            self._emit(AttemptsFound(lasted, failures, seconds, reached, asdict(spent), until))
        self._write()
        self._thread.start()

    def end(self, how: str | None) -> None:
        """How the attempt has ended; call it before the lease is given back. None: the trainer goes on, or is lost."""
        self._over.set()
        if how is not None:
            with self._lock:
                self._mine = replace(self._mine, end=how)
            self._write()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def paced(self, pace: Mapping[str, Any]) -> None:
        """The trainer takes snapshots so often, see `Cadence.pace`; recorded with the next heartbeat. Any thread."""
        steps, why = pace.get("interval_steps"), str(pace.get("why", ""))[:_WHY_LETTERS]
        with self._lock:
            known = self._mine.intervals
            if not steps or (known and 1 / CHANGED < steps / known[-1][1] < CHANGED):
                return
            row = (round(time.monotonic() - self._opened, 3), int(steps), why)
            self._mine = replace(self._mine, intervals=(*known, row)[-MOST_INTERVALS:])

    def note(self, *, gone: bool = False) -> None:
        """Remember what the trainer says of its time, before its memory is given back. Any thread.

        Args:
            gone: it says no more: what its writer still does is not its time.
        """
        with self._lock:
            self._look()
            self._gone = self._gone or gone

    def _look(self) -> None:
        if self._gone:
            return
        self._mine = replace(self._mine, seconds=time.monotonic() - self._opened)
        if (spent := self.spent()) is not None:
            self._mine = replace(self._mine, started=spent.started, step=spent.step, times=spent.times)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with asking():  # the next beat asks again
                self._write()

    def _write(self) -> None:
        with self._lock:
            self._look()
            text = encode_attempts(replace(self._earlier, rows=(*self._earlier.rows, self._mine)))
            try:
                self._check()
                self._storage.put(names.ATTEMPTS, [memoryview(text)], exclusive=False)
            except LeaseHeldError:
                self._over.set()
            except CkptError as err:
                self._say(err)

    def _say(self, err: CkptError) -> None:
        if not self._said:
            self._said = True
            self._emit(Notice("WARNING", f"how long this run lasts is not recorded: {err.message}"))


WORKING = "working"
AWAY = "away"
HANGS = "hangs"


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier at one moment.

    Args:
        state: `working`, `away` since it failed, or `hangs`: away, and what was asked of it never came back.
        newest: id of the newest snapshot there, as far as is known.
        copying: id of the snapshot on its way.
        waiting: snapshots that it still wants.
        waiting_bytes: their bytes.
        sent_bytes: since the writer started.
        code, message: of the error that made it away.
        since: wall-clock seconds at which `state` began.
        encoding: how its codec did last, in one line; None: it has none.
    """

    url: str
    state: str
    newest: str | None = None
    copying: str | None = None
    waiting: int = 0
    waiting_bytes: int = 0
    sent_bytes: int = 0
    code: str | None = None
    message: str | None = None
    since: float = 0.0
    encoding: str | None = None


class TierHealth:
    """Whether a tier works, and since when. Any thread.

    Args:
        emit: hears when it begins to fail, and when it works again.
        fatal: see `TierConfig`.
    """

    def __init__(self, url: str, emit: Callable[[Event], object], *, fatal: bool = False) -> None:
        self._url = url
        self._emit = emit
        self._fatal = fatal
        self.error: ErrorRecord | None = None
        """What it fails with; None: it works."""
        self._since = time.time()
        self._away_from = 0.0

    @property
    def hangs(self) -> bool:
        """Whether what was asked of it last has not come back."""
        return self.error is not None and self.error.code == StorageStalledError.code

    def failed(self, error: BaseException, *, silent: bool = False) -> None:
        """Note that it failed; says so unless that is known."""
        before, record = self.error, ErrorRecord.of(error)
        if before is None:
            self._away_from, self._since = time.monotonic(), time.time()
        self.error = record
        if not silent and (before is None or before.code != record.code):
            self._emit(TierDegraded(self._url, record.code, record.message, self._fatal))

    def worked(self) -> None:
        """Note that it worked; says so if it was away."""
        if self.error is not None:
            self.error, self._since = None, time.time()
            self._emit(TierRecovered(self._url, time.monotonic() - self._away_from))

    def status(self, **more: Any) -> TierStatus:
        """How it is; `more`: what else is known of it."""
        error = self.error
        state = WORKING if error is None else HANGS if self.hangs else AWAY
        code, message = (None, None) if error is None else (error.code, error.message)
        return TierStatus(self._url, state, code=code, message=message, since=self._since, **more)


_NAMED = 3
_IDLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A tier that a writer leaves without all it should have.

    Args:
        lacks: ids of the snapshots that are not there, as far as is known.
        why: what is wrong with it.
        nbytes: of those snapshots.
    """

    url: str
    lacks: tuple[str, ...]
    why: str | None
    nbytes: int = 0

    def text(self) -> str:
        """For people."""
        named = ", ".join(self.lacks[:_NAMED]) + (f" and {len(self.lacks) - _NAMED} more" * (len(self.lacks) > _NAMED))
        said = [f"lacks {named}" if named else "", self.why or ""]
        about = "; ".join(part for part in said if part)
        return f"{self.url} ({about})" if about else self.url

    def amount(self) -> str:
        """How much is left to copy, for people."""
        count = len(self.lacks)
        many = f"{count} snapshots" if count != 1 else "1 snapshot"
        much = f", {size(self.nbytes)}" if self.nbytes else ""
        return f"{self.url} ({many} left{much})" if count else self.url


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """A writer and its tiers, nearest first. `written` is wall-clock seconds; `ended`: it is no longer there."""

    pid: int
    host: str
    written: float
    ended: bool
    tiers: tuple[TierStatus, ...]


def write_status(storage: Storage, status: WriterStatus) -> None:
    """Say how things are, in the place of what was said before.

    Raises:
        StorageError: the earlier status stays.
    """
    storage.put(names.STATUS, [memoryview(seal(asdict(status)) + b"\n")], exclusive=False)


class StatusWriter:
    """Writes the status on a thread of its own whenever something has changed: its disk may hang like any other.

    Args:
        nearest: where it is written, if that is a local disk.
        now: the status of all tiers.
        emit: called once if it cannot be written.
    """

    def __init__(
        self,
        nearest: Storage,
        holder: LeaseHolder,
        now: Callable[[], Sequence[TierStatus]],
        emit: Callable[[Event], object],
    ) -> None:
        self._nearest = nearest
        self._folder = nearest.capabilities.folder
        self._holder = holder
        self._now = now
        self._emit = emit
        self._changed = threading.Condition()
        self._news = self._ending = self._failed = False
        self._thread: threading.Thread | None = None

    def note(self) -> None:
        """Something has changed. Any thread; never waits."""
        if self._folder is None:
            return
        with self._changed:
            self._news = True
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-status", daemon=True)
                self._thread.start()

    def end(self, timeout: float) -> None:
        """Say that the writer has ended; waits at most `timeout` seconds until that is written. Idempotent."""
        self._ending = True
        self.note()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        ended = False
        while not ended:
            with self._changed:
                self._changed.wait_for(lambda: self._news, _IDLE_SECONDS)
                self._news, ended = False, self._ending
            self._write(ended)

    def _write(self, ended: bool) -> None:
        assert self._folder is not None
        if not Path(self._folder.root).is_dir():
            return  # it was removed, or is not mounted now: it is not for this to make it
        holder = self._holder
        try:
            write_status(self._nearest, WriterStatus(holder.pid, holder.host, time.time(), ended, tuple(self._now())))
            self._failed = False
        except CkptError as err:
            if not self._failed:
                self._failed = True
                self._emit(Notice("WARNING", f"the status for `ckpt status` cannot be written: {err.message}"))


def read_status(storage: Storage) -> WriterStatus | None:
    """The last status written at a run's root, or None.

    Raises:
        CorruptError: it is no status.
        StorageError
    """
    try:
        text = storage.get(names.STATUS)
    except StorageMissingError:
        return None
    return parse_status(text, f"{storage.url}/{names.STATUS}")


def parse_status(text: bytes, where: str) -> WriterStatus:
    """The status that a file with this text has.

    Raises:
        CorruptError: it is none.
    """

    def made(row: dict[str, Any]) -> WriterStatus:
        tiers = tuple(_checked(TierStatus(**_known(TierStatus, tier))) for tier in row.pop("tiers"))
        return _checked(WriterStatus(**_known(WriterStatus, row), tiers=tiers))

    return parsed(text, where, made, "remove it: a running writer writes it again")


def _known(kind: type, row: dict[str, Any]) -> dict[str, Any]:
    """What this version knows of `row`: a newer writer may say more."""
    names = {one.name for one in dataclasses.fields(kind)}
    return {name: value for name, value in row.items() if name in names}


_Row = TypeVar("_Row", TierStatus, WriterStatus)


def _checked(row: _Row) -> _Row:
    """The same, if every field is of its type; they have those of JSON."""
    for one in dataclasses.fields(row):
        value, kind = getattr(row, one.name), str(one.type)
        fits = {
            "str": type(value) is str,
            "str | None": value is None or type(value) is str,
            "int": container.is_whole(value),
            "float": container.is_time(value),
            "bool": type(value) is bool,
        }
        container.require(fits.get(kind, True), f"{one.name!r} is of another type, or out of range")
    return row
