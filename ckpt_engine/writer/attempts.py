"""The record of a run's attempts: who trained, how long, and how it ended. Evidence of how often the run fails.

The writer of the nearest tier keeps it in one small file, because it outlives the trainer: an attempt whose end it
has written lost no more than a process, one without an end lost the writer too, and what was in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace

from ckpt_engine.errors import CkptError, CorruptError, FormatError, LeaseHeldError, StorageMissingError
from ckpt_engine.observe.events import CLOSED, ENDS, MACHINE, PROCESS, UNKNOWN, AttemptsFound, Event, Notice
from ckpt_engine.store import container, names
from ckpt_engine.store.container import seal, unseal
from ckpt_engine.store.lease import LeaseHolder
from ckpt_engine.store.lease_objects import ProcessIdentity
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.object_requests import asking

BEAT_SECONDS = 60.0
MOST = 256
"""Older attempts are dropped: after so many failures nothing is believed of what was before."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process that trained.

    Args:
        host: its machine, for people.
        process: equal for the same process only; empty where the system does not tell.
        began: wall-clock seconds at which its writer opened.
        seconds: that it was known to live from then on, by a clock that nobody sets.
        end: one of `ENDS`; None: it trains, or the writer was lost with it.
        ranks: that trained together.
    """

    host: str
    process: str
    began: float
    seconds: float = 0.0
    end: str | None = None
    ranks: int = 1

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


def encode_attempts(attempts: Sequence[Attempt]) -> bytes:
    """The bytes of the record."""
    return seal({"attempts": [asdict(one) for one in attempts[-MOST:]]}) + b"\n"


def parse_attempts(text: bytes, where: str) -> tuple[Attempt, ...]:
    """The attempts that a record with this text has, the oldest first.

    Raises:
        CorruptError: it is none.
    """
    hint = "remove it: how often the run fails is learned again"
    try:
        return tuple(_attempt(row) for row in unseal(text, where)["attempts"])
    except FormatError as err:
        raise CorruptError(err.message, hint=hint) from err
    except (ValueError, LookupError, TypeError) as err:
        raise CorruptError(f"{where} is damaged: {err}", hint=hint) from err


def _attempt(row: dict[str, object]) -> Attempt:
    container.require(type(row) is dict, "a row that is no object")
    known = {one.name for one in fields(Attempt)}
    one = Attempt(**{name: value for name, value in row.items() if name in known})  # type: ignore[arg-type]
    container.require(type(one.host) is str and type(one.process) is str, "a name that is no text")
    container.require(container.is_time(one.began) and container.is_time(one.seconds), "a time that is none")
    container.require(one.end in (None, *ENDS) and container.is_whole(one.ranks, 1), "an end or ranks that are none")
    return one


def read_attempts(storage: Storage) -> tuple[Attempt, ...]:
    """The attempts of the run at a root, the oldest first; none where there is no record.

    Raises:
        CorruptError: the record is damaged.
        StorageError
    """
    try:
        text = storage.get(names.ATTEMPTS)
    except StorageMissingError:
        return ()
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
        self._earlier: tuple[Attempt, ...] = ()
        self._said = False
        self._lock = threading.Lock()
        self._over = threading.Event()

    def begin(self) -> None:
        """Read what earlier attempts have left, tell it, and add this one; from now on it is known to live."""
        try:
            self._earlier = read_attempts(self._storage)
        except CkptError as err:
            self._say(err)
        if self._earlier and self._mine.process and self._earlier[-1].process == self._mine.process:
            *earlier, before = self._earlier  # the writer of this very trainer was lost, or closed
            self._opened -= max(before.seconds, self._mine.began - before.began)
            self._earlier, self._mine = tuple(earlier), replace(before, end=None)
        lasted, failures = [one.seconds for one in self._earlier], [one.failure for one in self._earlier]
        seconds = time.monotonic() - self._opened
        if lasted or self._mine.seconds:
            self._emit(AttemptsFound(tuple(lasted), tuple(failures), seconds))
        self._write()
        threading.Thread(target=self._beat, name="ckpt-attempt", daemon=True).start()

    def end(self, how: str | None) -> None:
        """How the attempt has ended; call it before the lease is given back. None: the trainer goes on, or is lost."""
        self._over.set()
        if how is None:
            return
        with self._lock:
            self._mine = replace(self._mine, end=how)
        self._write()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with asking():  # the next beat asks again
                self._write()

    def _write(self) -> None:
        with self._lock:
            self._mine = replace(self._mine, seconds=time.monotonic() - self._opened)
            text = encode_attempts([*self._earlier, self._mine])
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
