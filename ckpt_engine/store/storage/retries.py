"""When a request to an object store is tried again.

The pauses are exponential backoff with full jitter, bounded in time. "Full jitter" is what spreads many clients best
(Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog 2015).
"""

from __future__ import annotations

import errno
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from ckpt_engine.errors import led_to

T = TypeVar("T")
BASE_SECONDS = 0.1
CAP_SECONDS = 8.0
SLOWEST_BYTES_PER_SECOND = 50_000
"""A request slower than this has failed, even if it moves."""
# Never the global stream of `random`: training draws from it, and a server that dies must not change a training run.
_uniform = random.SystemRandom().uniform
_NOBODY = frozenset(
    {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, int(socket.EAI_NONAME), int(socket.EAI_NODATA)}
)
_asking: ContextVar[bool] = ContextVar("ckpt_asking", default=False)


@contextmanager
def asking() -> Iterator[None]:
    """Within it a request to where no server listens is not tried again.

    For those who have other places to ask, or who come back later by themselves.
    """
    token = _asking.set(True)
    try:
        yield
    finally:
        _asking.reset(token)


def ask_apart(question: Callable[[], T], name: str) -> Future[T]:
    """The answer to a question, asked at once within `asking` on a thread of that name, which may hang for ever."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            with asking():
                answer.set_result(question())
        except BaseException as err:  # noqa: BLE001 - raised where the answer is looked at
            answer.set_exception(err)

    threading.Thread(target=ask, name=name, daemon=True).start()
    return answer


def is_asking() -> bool:
    """Whether this is within `asking`."""
    return _asking.get()


def is_hopeless(error: BaseException) -> bool:
    """Whether no server listens there, and the caller does not wait for one: see `asking`."""
    return _asking.get() and any(isinstance(one, OSError) and one.errno in _NOBODY for one in led_to(error))


@dataclass(frozen=True, slots=True)
class GrowingPauses:
    """Pauses between attempts or looks: each one is `factor` times as long as the one before, up to the longest."""

    first_seconds: float
    most_seconds: float
    factor: float = 2.0

    def seconds(self, number: int) -> float:
        """The pause with this number; the first one has 0."""
        return min(self.most_seconds, self.first_seconds * self.factor ** max(0, min(number, 30)))

    def after(self, seconds: float) -> float:
        """The pause that follows one of so many seconds."""
        return min(self.most_seconds, seconds * self.factor)


_PAUSES = GrowingPauses(BASE_SECONDS, CAP_SECONDS)


@dataclass(eq=False)
class Backoff:
    """The waits of one operation, until it has failed for `retry_seconds`.

    Args:
        retry_seconds: no new attempt begins later than this after the first failure.
        clock: monotonic seconds.
        uniform: a random number between its two arguments.
    """

    _retry_seconds: float
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)
    uniform: Callable[[float, float], float] = field(default=_uniform, kw_only=True)
    _failed_since: float | None = field(default=None, init=False)
    failures: int = field(default=0, init=False)

    def began(self) -> None:
        """The time runs from now on: what is done has a patience of its own, and fails late."""
        self._failed_since = self.clock()

    def progressed(self) -> None:
        """Part of the work was done: the time starts again."""
        self._failed_since = None
        self.failures = 0

    def next_wait(self, told_seconds: float = 0.0) -> float | None:
        """After a failure: seconds to wait before the next attempt, or None to give up.

        Args:
            told_seconds: the least wait that the server asked for.
        """
        now = self.clock()
        if self._failed_since is None:
            self._failed_since = now
        self.failures += 1
        wait = max(told_seconds, self.uniform(0.0, _PAUSES.seconds(self.failures)))
        return wait if now + wait - self._failed_since <= self._retry_seconds else None
