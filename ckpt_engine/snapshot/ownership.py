"""Which engine of this process writes which run: a newer one takes the run over, and the older one is closed first.

A notebook's cell that has failed and is run again leaves its engine open, with the run's lease: that is no stranger to
wait for. Engines of other processes are, also of the one that this one was forked from.

Which line of history the snapshots of this process belong to, and whether another job has overtaken it.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - see `_end_all`
import hashlib
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from ckpt_engine.copy.job import History
from ckpt_engine.errors import CkptError, ClosedError, OvertakenError
from ckpt_engine.observe.events import LOG
from ckpt_engine.observe.units import place
from ckpt_engine.ranks.session import Session
from ckpt_engine.store.branches import branch_id
from ckpt_engine.store.manifest import Line, SnapshotInfo
from ckpt_engine.writer.client import WriterClient

SETTLE_SECONDS = 60.0
_tenures: dict[tuple[str, int], Tenure] = {}
leavers: weakref.WeakSet[Leaver] = weakref.WeakSet()
"""Those that are asked to leave where the process forks."""
CLOSE_SECONDS = 60.0
_ATTEMPT_DIGITS = 16


def _open_standard_descriptors() -> None:
    """Those that are closed would be ours next, such as the arena's, and what libraries print would go there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


class Tenure:
    """The time in which one engine writes a run: from `claim` until it is closed, or a newer one claims the run.

    All methods belong to the engine's thread, but for those of a newer one that is on another.

    Args:
        url: of the run.
        rank: several ranks write one run together, each its part.
        close: closes the engine, and calls `over` last.
        drain: makes durable what is in flight, waiting at most so many seconds.

    Attributes:
        release: called before a newer engine takes over: whatever uses this one leaves the loop's objects alone.
        replaced: a newer engine of this process has taken the run over.
        forked: this process is a fork of the one that claimed the run: it has none of the engine's threads.
    """

    def __init__(self, url: str, rank: int, close: Callable[[], object], drain: Callable[[float], object]) -> None:
        self._url = url
        self._key = (place(url), rank)
        self._close = close
        self._drain = drain
        self.release: Callable[[], object] = lambda: None
        self.closed = self.replaced = self._leaving = False
        self._thread = threading.current_thread()
        self.forked = False

    def require_open(self) -> None:
        """Raises ClosedError if the engine is closed, of another process, or gives way to a newer one now."""
        if self.forked:
            raise ClosedError(
                f"this process is a fork of the one that takes the snapshots of {self._url}",
                hint="take them in that process, or make a Checkpointer of another folder here",
            )
        if self._leaving:
            return
        if self.replaced and not self.closed:
            self._give_way()
        if self.replaced:
            raise ClosedError(
                f"a newer Checkpointer of this process writes {self._url} now",
                hint="use the newer one; two runs at the same time need two folders",
            )
        if self.closed:
            raise ClosedError(f"this Checkpointer of {self._url} is closed", hint="make a new one")

    def claim(self) -> None:
        """Write the run from now on. An older engine of this process is closed first.

        Raises:
            ClosedError: as `require_open`.
        """
        self.require_open()
        older = _tenures.get(self._key)
        if older is self:
            return
        _open_standard_descriptors()
        self._thread = threading.current_thread()
        if older is not None and not older.forked:
            older._replace()
        _tenures[self._key] = self
        leavers.add(self)
        atexit.register(self._end)

    def leave_fork(self) -> None:
        """See `Leaver`."""
        self.forked = True

    def settle_older(self) -> bool:
        """Let an older engine of this process make durable what it has in flight; whether there is one."""
        older = _tenures.get(self._key)
        if older is None or older is self or older.forked:
            return False
        if older._is_idle:
            older._quietly(lambda: older._drain(SETTLE_SECONDS))
        return True

    def over(self) -> None:
        """The engine is closed."""
        self.closed = True
        atexit.unregister(self._end)
        if _tenures.get(self._key) is self:
            del _tenures[self._key]

    @property
    def _is_idle(self) -> bool:
        """Whether no other thread can be in one of the engine's methods: all of them belong to one."""
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def _replace(self) -> None:
        self.replaced = True
        LOG.warning(
            "%s: an earlier Checkpointer of this process was not closed; what it has in flight becomes durable now, "
            "and it takes no more snapshots",
            self._url,
        )
        if self._is_idle:
            self._give_way()

    def _give_way(self) -> None:
        self._leaving = True  # it may still save what an exception has left
        self._quietly(self.release)
        self._leaving = False
        self._quietly(self._close)
        self.over()

    def _quietly(self, work: Callable[[], object]) -> None:
        """What fails as this engine ends stops nothing that follows: a newer one, or the end of the interpreter."""
        try:
            work()
        except CkptError as err:
            LOG.error("the Checkpointer of %s, as it ended: %s", self._url, err)

    def _end(self) -> None:
        """The interpreter ends: a snapshot that is being staged would be lost, though not those with the writer."""
        if not self.forked:
            self._quietly(self.release)  # why it ends is not known: no place for a snapshot of the final state
            self._close()

    def end_before_executors(self) -> None:
        """The same while executors take work: `atexit` comes later, and requests to S3 of a writer thread need some."""
        if self._is_idle and multiprocessing.parent_process() is None:
            self._quietly(self._end)  # what is raised here keeps Python from joining the threads of the user


def _end_all() -> None:
    for one in tuple(_tenures.values()):
        one.end_before_executors()


# What registers last is called first: `concurrent.futures` has registered. Python has no public name for it.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]


class Leaver(Protocol):
    """What follows training, and is of no use in a fork of the process, which has none of its threads."""

    def leave_fork(self) -> None:
        """In a fork: follow nothing any more, and take no lock."""


def _in_fork() -> None:
    for one in tuple(leavers):
        one.leave_fork()


os.register_at_fork(after_in_child=_in_fork)


class Lineage:
    """Of one process. Training thread only, but for `checked`.

    Args:
        session: of several ranks, which have one line together.
        url: of the run, for people.
    """

    def __init__(self, session: Session | None, url: str) -> None:
        self._session, self._url = session, url
        self._attempt = "" if session is not None else _random()
        self._begun = 0
        self._before: tuple[tuple[str, int], ...] = ()
        self._resumed: SnapshotInfo | None = None
        self._seen: int | None = None
        self._how = "call load() before the first save()"
        self._unsaid: History | None = None
        self._found: History | None = None
        self.damaged = frozenset[str]()
        """Data files that a load has found damaged: no snapshot from here on refers to them."""

    @property
    def parent(self) -> str | None:
        """The snapshot that this process goes on from."""
        return None if self._resumed is None else self._resumed.id

    def line(self) -> Line:
        """That of the next snapshot."""
        if not self._attempt and self._session is not None and self._session.is_open:
            text = f"{self._session.name} {self._begun}"
            self._attempt = hashlib.sha256(text.encode()).hexdigest()[:_ATTEMPT_DIGITS]
        return Line(self._attempt, self._before)

    def looked(self, newest_seq: int = 0) -> None:
        """The snapshots were looked at, up to the one of this number."""
        self._seen = newest_seq

    def go_on(self, resumed: SnapshotInfo, before: tuple[tuple[str, int], ...]) -> None:
        """What is trained from here on comes after `resumed`; `before`: see `restore.load.before_of`."""
        own = resumed.line.attempt == self._attempt and bool(before)
        self._resumed = resumed
        if not own:
            self._begin()
            self._before = before

    def _begin(self) -> None:
        """What follows is of another attempt than what was before."""
        self._begun += 1
        self._attempt = "" if self._session is not None else _random()

    def checked(self, client: WriterClient) -> WriterClient:
        """A writer that has just taken the lease, unless others have written since this process has looked.

        Raises:
            OvertakenError: they have; the lease is given back.
        """
        history = client.started.history
        if history is None or (self._session is not None and not self._session.coordinates):
            return client
        if self._seen is not None and history.seq > self._seen and not self._is_ours(history):
            client.close(CLOSE_SECONDS)
            had = "there was nothing" if self._resumed is None else f"it had step {self._resumed.step:,}"
            raise OvertakenError(
                f"another job made snapshots up to step {history.step:,} ({history.newest}) at {self._url} after this "
                f"one looked there: {had}. Nothing was written, and nothing is lost",
                hint="start the script again, or call load() again: it resumes from the newest snapshot",
            )
        if self._seen is None and (not self._attempt or history.attempt != self._attempt):
            self._unsaid = history  # else a writer was lost, and this is what it has made
        self._found = history
        self._seen = max(self._seen or 0, history.seq)
        return client

    def fresh(self, how: str) -> None:
        """Training starts fresh, whatever is there; `how`: what the user does to go on from that."""
        self._how = how
        if self._resumed is not None:
            self._resumed, self._before, self._unsaid = None, (), self._found
            self._begin()

    def news(self) -> str | None:
        """Once, if training starts fresh at a place with a history: what becomes of that, for people."""
        history, self._unsaid = self._unsaid, None
        if history is None or self._resumed is not None:
            return None
        remove = ""
        if history.attempt is not None:
            remove = f" until `ckpt prune {self._url} --branch {branch_id(Line(history.attempt))}` removes them"
        many = f"{history.snapshots:,} snapshot{'s' if history.snapshots > 1 else ''}"
        return (
            f"{self._url} has {many} of earlier training, up to step {history.step:,}, and this run starts fresh "
            f"beside them: they stay{remove} (`ckpt ls {self._url}` shows all). To resume from them: {self._how}"
        )

    def _is_ours(self, history: History) -> bool:
        """Whether this process, or the writer of what it goes on from, has made the newest one."""
        if history.attempt is not None and history.attempt == self._attempt:
            return True
        resumed = self._resumed
        if resumed is None or (resumed.step, resumed.created) != (history.step, history.created):
            return False
        # The writer of a dead trainer has made durable what was loaded from its memory, under another number.
        self._before = ((resumed.line.attempt, history.seq), *self._before[1:])
        return True


def _random() -> str:
    return os.urandom(_ATTEMPT_DIGITS // 2).hex()
