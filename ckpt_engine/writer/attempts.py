"""The record of the attempts of a run.

`attempts.json` is evidence of how often the run fails, and how much of its time was of use. The writer of the nearest
tier keeps it, because it outlives the trainer: an attempt whose end it has written lost no more than a process, one
without an end lost the writer too, and what was in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any

from msgspec import Meta

from ckpt_engine.errors import CkptError, LeaseHeldError
from ckpt_engine.observe.events import (
    CLOSED,
    ENDS,
    MACHINE,
    PROCESS,
    UNKNOWN,
    AttemptsFound,
    Event,
)
from ckpt_engine.observe.number_types import OptionalSize, Positive, Seconds, SignedSeconds
from ckpt_engine.observe.reporter import Reporter
from ckpt_engine.observe.run_times import RunSpent
from ckpt_engine.store import names
from ckpt_engine.store.lease_holder import LeaseHolder, ProcessIdentity
from ckpt_engine.store.sealed_json import parsed, seal, stored
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.retries import asking
from ckpt_engine.writer.pulse import SpentTimes

BEAT_SECONDS = 60.0
MOST_INTERVALS = 8
CHANGED = 1.5
"""An interval is recorded again when it has changed by this factor."""
_WHY_LETTERS = 200
_END_SECONDS = 1.0
"""A heartbeat that hangs in a call to the storage is left behind."""
AttemptEnd = Annotated[str, Meta(pattern=rf"^({'|'.join(ENDS)})\Z")]
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
        times: what its seconds since then went into, see `run_times.TIMES`, and `run_times.MEASURED`. The rest came
            after its last boundary.
        intervals: how often it took snapshots: since which second after `began` each how many steps, and why; the
            newest `MOST_INTERVALS`.
        resumed_at: the step of the snapshot that it resumed from; 0: it began fresh; -1: not known, or it made no step.
        proof: whether its resume is exact, for people; empty: not known, or not asked.
    """

    host: str
    process: str
    began: Seconds
    seconds: Seconds = 0.0
    end: AttemptEnd | None = None
    ranks: Positive = 1
    started: Seconds = 0.0
    step: OptionalSize = -1
    times: Mapping[str, SignedSeconds] = field(default_factory=dict)
    intervals: tuple[tuple[Seconds, Positive, str], ...] = ()
    resumed_at: OptionalSize = -1
    proof: str = ""

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
        attempts: the newest, oldest first.
        before: what went into those before them.
    """

    attempts: tuple[Attempt, ...]
    before: RunSpent = field(default_factory=RunSpent)

    def bounded(self) -> AttemptHistory:
        """With `MOST` rows at most."""
        many = max(0, len(self.attempts) - MOST)
        return AttemptHistory(self.attempts[many:], self._spent_until(self.attempts[: many + 1]))

    @property
    def spent(self) -> RunSpent:
        """What the time of the run went into until its newest heartbeat."""
        spent = self._spent_until(self.attempts)
        return after(spent, self.attempts[-1], None) if self.attempts else spent

    @property
    def over(self) -> tuple[RunSpent, float]:
        """The same where none of them trains any more, and when the last one was known to live; 0.0: there is none."""
        if not self.attempts:
            return self.before, 0.0
        until = self.attempts[-1].began + self.attempts[-1].seconds
        return self._spent_until((*self.attempts, Attempt("", "", until))), until

    def _spent_until(self, rows: Sequence[Attempt]) -> RunSpent:
        """What the time until the last of these rows went into, which are its oldest, one after another."""
        spent = self.before
        for one, following in pairwise(rows):
            spent = after(spent, one, following)
        return spent


def encode_attempts(history: AttemptHistory) -> bytes:
    """The bytes of the record."""
    return seal(asdict(history.bounded())) + b"\n"


def parse_attempts(text: bytes, where: str) -> AttemptHistory:
    """The attempts that a record with this text has.

    Raises:
        CorruptError: it is none.
    """
    return parsed(text, where, AttemptHistory, "remove it: how often the run fails is learned again")


def read_attempts(storage: Storage) -> AttemptHistory:
    """The attempts of the run at a root; none where there is no record.

    Raises:
        CorruptError: the record is damaged.
        StorageError
    """
    return stored(storage, names.ATTEMPTS, parse_attempts) or AttemptHistory(())


def copy_attempts(source: Storage, target: Storage, copied: dict[str, tuple[int, str]]) -> None:
    """Copy the record to a further place, if it is new: what reads there knows whether the run has ended.

    Args:
        copied: by name, size and version of what was copied.

    Raises:
        StorageError
    """
    for one in source.list(names.ATTEMPTS):
        content = one.nbytes, one.version
        if copied.get(one.name) != content:
            target.put(names.ATTEMPTS, [memoryview(source.get(names.ATTEMPTS))], exclusive=False)
            copied[one.name] = content


class AttemptRecord:
    """Writes the row of one trainer, while its writer holds the run's lease. What goes wrong is said once, not raised.

    Args:
        storage: the nearest tier; calls may hang, but not `begin` longer than any other of the start.
        trainer: that the lease is taken for.
        ranks: that train together.
        check: raises LeaseHeldError if the lease was lost.
        emit: takes events; any thread.
        spent: what the trainer says of its time; None: nothing.
    """

    def __init__(
        self,
        storage: Storage,
        trainer: LeaseHolder,
        ranks: int,
        check: Callable[[], None],
        emit: Callable[[Event], object],
        spent: Callable[[], SpentTimes | None] = lambda: None,
    ) -> None:
        self._storage = storage
        self._check = check
        self._report = Reporter(emit)
        self.spent = spent
        process = ProcessIdentity.of(trainer.pid)
        name = "" if process is None else f"{process.boot}/{process.namespace}/{process.pid}/{process.ticks}"
        self._mine = Attempt(trainer.host, name, time.time(), ranks=ranks)
        self._opened = time.monotonic()
        self._earlier = AttemptHistory(())
        self._gone = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ckpt-attempt", daemon=True)

    def begin(self) -> None:
        """Read what earlier attempts have left, tell it, and add this one; from now on it is known to live."""
        try:
            self._earlier = read_attempts(self._storage)
        except CkptError as err:
            self._say(err)
        rows = self._earlier.attempts
        if rows and self._mine.process and rows[-1].process == self._mine.process:
            *earlier, before = rows  # the writer of this very trainer was lost, or closed
            self._opened -= max(before.seconds, self._mine.began - before.began)
            self._earlier, self._mine = replace(self._earlier, attempts=tuple(earlier)), replace(before, end=None)
        rows = self._earlier.attempts
        lasted, failures = tuple(one.seconds for one in rows), tuple(one.failure for one in rows)
        seconds = time.monotonic() - self._opened
        if lasted or self._mine.seconds:
            reached = max((one.step for one in rows), default=-1)
            spent, until = self._earlier.over
            self._report.emit(AttemptsFound(lasted, failures, seconds, reached, asdict(spent), until))
        self._write()
        self._thread.start()

    def end(self, how: str | None) -> None:
        """How the attempt has ended; call it before the lease is given back. None: it continues, or is lost."""
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
            self._mine = replace(self._mine, **asdict(spent))

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with asking():  # the next beat asks again
                self._write()

    def _write(self) -> None:
        with self._lock:
            self._look()
            text = encode_attempts(replace(self._earlier, attempts=(*self._earlier.attempts, self._mine)))
            try:
                self._check()
                self._storage.put(names.ATTEMPTS, [memoryview(text)], exclusive=False)
            except LeaseHeldError:
                self._over.set()
            except CkptError as err:
                self._say(err)

    def _say(self, err: CkptError) -> None:
        self._report.failed("attempts", f"how long this run lasts is not recorded: {err.message}")
