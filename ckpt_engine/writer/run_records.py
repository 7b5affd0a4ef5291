"""How the tiers of a writer are.

`ckpt status` reads the status file. `TierHealth` knows whether a tier works, and reports when that changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckpt_engine.copy.job import ErrorRecord
from ckpt_engine.errors import CkptError, StorageStalledError
from ckpt_engine.observe.events import (
    Event,
    TierDegraded,
    TierRecovered,
)
from ckpt_engine.observe.number_types import Seconds, Size
from ckpt_engine.observe.reporter import Reporter
from ckpt_engine.observe.units import count, first, size
from ckpt_engine.store import names
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.sealed_json import parsed, seal, stored
from ckpt_engine.store.storage.base import Storage

WORKING = "working"
AWAY = "away"
HANGS = "hangs"
_NAMED = 3
_IDLE_SECONDS = 60.0


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
    waiting: Size = 0
    waiting_bytes: Size = 0
    sent_bytes: Size = 0
    code: str | None = None
    message: str | None = None
    since: Seconds = 0.0
    encoding: str | None = None


@dataclass(eq=False)
class TierHealth:
    """Whether a tier works, and since when. Any thread.

    Args:
        emit: hears when it begins to fail, and when it works again.
    """

    _url: str
    _emit: Callable[[Event], object]
    error: ErrorRecord | None = field(default=None, init=False)
    """What it fails with; None: it works."""
    _since: float = field(default_factory=time.time, init=False)
    _away_from: float = field(default=0.0, init=False)

    @property
    def hangs(self) -> bool:
        """Whether what was asked of it last has not come back."""
        return self.error is not None and self.error.code == StorageStalledError.code

    def failed(self, error: BaseException, *, fatal: bool = False, silent: bool = False) -> None:
        """Note that it failed; says so unless that is known. `fatal`: see `TierConfig`."""
        before, record = self.error, ErrorRecord.of(error)
        if before is None:
            self._away_from, self._since = time.monotonic(), time.time()
        self.error = record
        if not silent and (before is None or before.code != record.code):
            self._emit(TierDegraded(self._url, record.code, record.message, fatal))

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
        named = first(self.lacks, _NAMED)
        about = "; ".join(filter(None, (f"lacks {named}" if named else "", self.why)))
        return f"{self.url} ({about})" if about else self.url

    def amount(self) -> str:
        """How much is left to copy, for people."""
        much = f", {size(self.nbytes)}" if self.nbytes else ""
        return f"{self.url} ({count(len(self.lacks), 'snapshot')} left{much})" if self.lacks else self.url


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """A writer and its tiers, nearest first. `written` is wall-clock seconds; `ended`: it is no longer there."""

    pid: Size
    host: str
    written: Seconds
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
        self._folder = nearest.capabilities.locks
        self._holder = holder
        self._now = now
        self._report = Reporter(emit)
        self._lock = threading.Lock()
        self._noted = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None

    def note(self) -> None:
        """Something has changed. Any thread; never waits."""
        if self._folder is None:
            return
        self._noted.set()
        with self._lock:
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
            self._noted.wait(_IDLE_SECONDS)
            self._noted.clear()
            ended = self._ending
            self._write(ended)

    def _write(self, ended: bool) -> None:
        if self._folder is None or not Path(self._folder.root).is_dir():
            return  # it was removed, or is not mounted now: it is not for this to make it
        holder = self._holder
        try:
            write_status(self._nearest, WriterStatus(holder.pid, holder.host, time.time(), ended, tuple(self._now())))
            self._report.worked("status")
        except CkptError as err:
            self._report.failed("status", f"the status for `ckpt status` cannot be written: {err.message}")


def read_status(storage: Storage) -> WriterStatus | None:
    """The last status written at a run's root, or None.

    Raises:
        CorruptError: it is no status.
        StorageError
    """
    return stored(storage, names.STATUS, parse_status)


def parse_status(text: bytes, where: str) -> WriterStatus:
    """The status that a file with this text has.

    Raises:
        CorruptError: it is none.
    """
    return parsed(text, where, WriterStatus, "remove it: a running writer writes it again")
