"""Notices calls to a tier that hang, and leaves them behind: nobody waits for a dead disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from ckpt_engine.errors import StorageStalledError

STALL_SECONDS = 30.0
"""A tier that does not get on for so long counts as away. An S3 request that moves nothing fails before."""
SLOWEST_BYTES_PER_SECOND = 1 << 20
"""What a call whose progress cannot be seen from outside is given time for, on top."""
_LOOK_SECONDS = 1.0

T = TypeVar("T")


class AbandonedError(Exception):
    """The call was left behind: it must not go on."""


class Progress:
    """When the call under way got on last. Any thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = 0.0
        self.abandoned = False
        """Whether somebody has stopped waiting for the call."""
        self.begin()

    def begin(self) -> None:
        """A new call begins."""
        self.abandoned = False
        self.moved()

    def moved(self, rest_seconds: float = 0.0) -> None:
        """It got on, and may now rest for so long before its time begins to count."""
        self._deadline = self._clock() + rest_seconds + STALL_SECONDS

    def asked(self, rest_seconds: float = 0.0) -> None:
        """A request begins, which may take so long without a sign."""
        self.moved(rest_seconds)

    def answered(self) -> None:
        """A request has ended."""
        self.moved()

    def tried(self) -> None:
        """A request is tried again, without having moved anything."""
        self.moved()

    def check(self) -> None:
        """Before anything that reads the arena or makes a snapshot exist.

        Raises:
            AbandonedError
        """
        if self.abandoned:
            raise AbandonedError

    def left(self) -> float:
        """Seconds until the call counts as hanging."""
        return self._deadline - self._clock()


class Signs(Progress):
    """Whether a place has anything to say to what it is asked now. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._open = 0
        self._last = clock()
        self._lock = threading.Lock()
        super().__init__(clock)

    def moved(self, rest_seconds: float = 0.0) -> None:
        self._last = self._clock() + rest_seconds

    def asked(self, rest_seconds: float = 0.0) -> None:
        with self._lock:
            if not self._open or rest_seconds:
                self.moved(rest_seconds)
            self._open += 1

    def answered(self) -> None:
        with self._lock:
            self._open -= 1
            self.moved()

    def tried(self) -> None:
        """That is no sign of the place."""

    @property
    def silent_seconds(self) -> float:
        """How long it has left a request without a sign; 0: there is none."""
        return max(0.0, self._clock() - self._last) if self._open else 0.0


@dataclass(slots=True)
class _Call:
    """One call and what became of it. `left`: told its end when nobody waits any more."""

    left: Callable[[BaseException | None], object] | None = None
    abandoned: bool = False
    done: bool = False
    value: Any = None
    error: BaseException | None = None
    since: float = field(default_factory=time.time)


class Lane:
    """Calls to one tier, one at a time, each on a thread that is left behind if it hangs.

    There is at most one such thread: while it hangs every other call fails at once. Any thread may call.

    Args:
        url: the tier, for messages.
        keeps: False: a call that was left behind does not bar others, because it hangs in another place.
        told: called on the hanging thread when it has ended after all.
    """

    def __init__(self, url: str, *, keeps: bool = True, told: Callable[[], object] = lambda: None) -> None:
        self.url = url
        self.progress = Progress()
        self._keeps = keeps
        self._told = told
        self._changed = threading.Condition()
        self._call: _Call | None = None
        self._last: Callable[[], object] | None = None

    @property
    def stuck(self) -> bool:
        """Whether a call hangs that nobody waits for any more."""
        call = self._call
        return call is not None and call.abandoned

    def refuse_if_stuck(self) -> None:
        """Raises `StorageStalledError` if a call hangs that nobody waits for any more."""
        call = self._call
        if call is not None and call.abandoned:
            raise self._error(call)

    def call(
        self,
        work: Callable[[], T],
        *,
        left: Callable[[BaseException | None], object] | None = None,
        give_up: Callable[[StorageStalledError], bool] = lambda _: True,
    ) -> T:
        """The result of `work`, which runs on a thread of its own.

        Args:
            left: called once, if `StorageStalledError` is raised for this call, when it has ended after all; on its
                thread, with its error.
            give_up: asked again and again while `work` hangs whether to leave it behind.

        Raises:
            StorageStalledError: `work` did not get on for `STALL_SECONDS` and still runs, or an earlier call does.
        """
        call = _Call(left)
        with self._changed:
            if self._call is not None:
                raise self._error(self._call)
            self._call = call
            self.progress.begin()
        try:
            threading.Thread(target=self._run, args=(call, work), name=f"ckpt-tier {self.url}", daemon=True).start()
        except BaseException:
            self._call = None
            raise
        self._wait(call, give_up)
        try:
            if call.error is not None:
                raise call.error
            return cast("T", call.value)
        finally:
            del call  # its error refers to this frame

    def last(self, work: Callable[[], object]) -> bool:
        """Run `work`, which raises nothing, at the end of the hanging call, if there is one; whether there is."""
        with self._changed:
            if self._call is None:
                return False
            self._last = work
            return True

    def look(self) -> None:
        """Let whoever waits ask `give_up` again."""
        with self._changed:
            self._changed.notify_all()

    def _wait(self, call: _Call, give_up: Callable[[StorageStalledError], bool]) -> None:
        while True:
            with self._changed:
                if call.done:
                    return
                left = self.progress.left()
                if left > 0:
                    self._changed.wait(min(left, STALL_SECONDS))  # a rest may end earlier than was announced
                    continue
            error = self._error(call)
            if give_up(error):  # without the lock: it may emit events
                if self._leave(call):
                    raise error
                return
            with self._changed:
                if not call.done:
                    self._changed.wait(min(_LOOK_SECONDS, STALL_SECONDS))

    def _leave(self, call: _Call) -> bool:
        """Stop waiting, unless it has just ended; whether it goes on without us."""
        with self._changed:
            if call.done:
                return False
            call.abandoned = True
            if self._keeps:
                self.progress.abandoned = True
            else:
                self._call = None
            return True

    def _run(self, call: _Call, work: Callable[[], object]) -> None:
        try:
            call.value = work()
        except BaseException as err:  # noqa: BLE001 - raised where the call was made, or handed to `left`
            call.error = err
        with self._changed:
            call.done = True
            abandoned = call.abandoned
            if not abandoned:
                self._call = None
            self._changed.notify_all()
        if abandoned:
            self._come_back(call)

    def _come_back(self, call: _Call) -> None:
        try:
            if call.left is not None:
                call.left(call.error)
        finally:
            call.error = None
            last = None
            with self._changed:
                if self._call is call:
                    self._call = None
                    last, self._last = self._last, None
            if last is not None:
                last()
            self._told()

    def _error(self, call: _Call) -> StorageStalledError:
        seconds = max(STALL_SECONDS, time.time() - call.since)
        return StorageStalledError(
            f"{self.url} has not got on for {seconds:.0f} s; what was asked of it still hangs",
            hint="look at the disk, the mount or the network; it is used again as soon as it answers",
        )
