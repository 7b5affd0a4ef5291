"""Which engine of this process writes which run: a newer one takes the run over, and the older one is closed first.

A notebook's cell that has failed and is run again leaves its engine open, with the run's lease: that is no stranger to
wait for. Engines of other processes are, also of the one that this one was forked from.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable

from ckpt_engine.errors import CkptError, ClosedError
from ckpt_engine.observe.log import LOGGER_NAME

SETTLE_SECONDS = 60.0
_log = logging.getLogger(LOGGER_NAME)


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
    """

    def __init__(self, url: str, rank: int, close: Callable[[], object], drain: Callable[[float], object]) -> None:
        self._url = url
        self._key = (url.removeprefix("file://").rstrip("/"), rank)
        self._close = close
        self._drain = drain
        self.release: Callable[[], object] = _nothing
        self.closed = self._replaced = self._leaving = False
        self._thread = threading.current_thread()
        self._pid = os.getpid()

    def require_open(self) -> None:
        """Raises ClosedError if the engine is closed, or gives way to a newer one now."""
        if self._leaving:
            return
        if self._replaced and not self.closed:
            self._give_way()
        if self._replaced:
            raise ClosedError(
                f"a newer Checkpointer of this process writes {self._url} now",
                hint="go on with the newer one; two runs at the same time need two folders",
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
        self._thread = threading.current_thread()
        if older is not None and older._pid == os.getpid():
            older._replace()
        _tenures[self._key] = self
        atexit.register(self._end)

    def settle_older(self) -> bool:
        """Let an older engine of this process make durable what it has in flight; whether there is one."""
        older = _tenures.get(self._key)
        if older is None or older is self or older._pid != os.getpid():
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
        self._replaced = True
        _log.warning(
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
        """What fails in the older engine does not stop the newer one."""
        try:
            work()
        except CkptError as err:
            _log.error("the earlier Checkpointer of %s: %s", self._url, err)

    def _end(self) -> None:
        """The interpreter ends: a snapshot that is being staged would be lost, though not those with the writer."""
        if self._pid == os.getpid():
            self._quietly(self.release)  # nobody knows why it ends: this is no place for a snapshot of the final state
            self._close()


_tenures: dict[tuple[str, int], Tenure] = {}


def _nothing() -> None:
    """Nobody uses the engine but its caller."""
