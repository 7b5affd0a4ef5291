"""Notices calls to a tier that hang.

It tells them from slow ones, and leaves them behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar, cast

from ckpt_engine.errors import StorageStalledError
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Capabilities, ObjectInfo, Storage, Versions, WrapperStorage, metered
from ckpt_engine.store.storage.disk import Meter

STALL_SECONDS = 30.0
"""A tier that makes no progress for so long counts as unreachable. An S3 request that moves nothing fails before."""
SLOWEST_BYTES_PER_SECOND = 1 << 20
"""What a call whose progress cannot be seen from outside is given time for, on top."""
_LOOK_SECONDS = 1.0

T = TypeVar("T")
_DELETE_SECONDS = 1.0
_ROWS = 100
"""Of a listing come together, or soon one after another."""


class AbandonedError(Exception):
    """The call was left behind: it must not continue."""


class CallProgress:
    """When what was asked of a place has given a sign last. Any thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open = 0
        """Requests without an answer."""
        self._last = clock()
        """The last sign, or the end of a rest that was announced with it."""
        self.abandoned = False
        """Whether the caller has stopped waiting."""

    def begin(self) -> None:
        """A new call begins."""
        self.abandoned = False
        self.moved()

    def moved(self, rest_seconds: float = 0.0) -> None:
        """It got on, and may now rest for so long before its time begins to count."""
        self._last = self._clock() + rest_seconds

    def stopped(self, seconds: float) -> None:
        """The whole process stood still for so long, as by SIGSTOP or in a frozen container: that is no call's time."""
        self._last += seconds

    def during(self, request: Callable[[], T], rest_seconds: float = 0.0) -> T:
        """The answer to a request, which may take so long without a sign."""
        with self._lock:
            if not self._open or rest_seconds:
                self._last = self._clock() + rest_seconds
            self._open += 1
        try:
            return request()
        finally:
            with self._lock:
                self._open -= 1
                self._last = self._clock()

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
        return self._last + STALL_SECONDS - self._clock()

    @property
    def silent_seconds(self) -> float:
        """How long it has left a request without a sign; 0: there is none."""
        return max(0.0, self._clock() - self._last) if self._open else 0.0


class ResponsivenessProbe(CallProgress):
    """Whether a place has anything to say to what it is asked now: another try is no sign of it. Any thread."""

    def tried(self) -> None:
        """No sign."""


@dataclass(slots=True)
class _Call:
    """One call and what became of it. `left`: called with its end once the caller waits no more."""

    left: Callable[[BaseException | None], object] | None = None
    abandoned: bool = False
    done: bool = False
    value: Any = None
    error: BaseException | None = None
    since: float = field(default_factory=time.time)


@dataclass(eq=False)
class StuckCallRunner:
    """Calls to one tier, one at a time, each on a thread that is left behind if it hangs.

    There is at most one such thread: while it hangs every other call fails at once. Any thread may call.

    Args:
        url: the tier, for messages.
        keeps: False: a call that was left behind does not bar others, because it hangs in another place.
        ended: called on the hanging thread when it has ended after all.
    """

    url: str
    keeps: bool = field(default=True, kw_only=True)
    ended: Callable[[], object] = field(default=lambda: None, kw_only=True)
    progress: CallProgress = field(default_factory=CallProgress, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _call: _Call | None = field(default=None, init=False)
    _last: Callable[[], object] | None = field(default=None, init=False)

    @property
    def stuck(self) -> bool:
        """Whether an abandoned call hangs."""
        call = self._call
        return call is not None and call.abandoned

    def refuse_if_stuck(self) -> None:
        """Raises `StorageStalledError` if an abandoned call hangs."""
        call = self._call
        if call is not None and call.abandoned:
            raise self._error(call)

    def call(
        self,
        work: Callable[[], T],
        *,
        left: Callable[[BaseException | None], object] | None = None,
        give_up: Callable[[StorageStalledError], Exception | None] = lambda error: error,
    ) -> T:
        """The result of `work`, which runs on a thread of its own.

        Args:
            left: called once, if this call is left behind, when it has ended after all; on its thread, with its error.
            give_up: asked again and again while `work` hangs what to raise and so to leave it behind; None: nothing.

        Raises:
            StorageStalledError: `work` made no progress for `STALL_SECONDS` and still runs, or an earlier call does.
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
            call.error = None  # it refers to this frame

    def last(self, work: Callable[[], object]) -> bool:
        """Run `work`, which raises nothing, at the end of the hanging call, if there is one; whether there is."""
        with self._changed:
            if self._call is None:
                return False
            self._last = work
            return True

    def look(self) -> None:
        """Have `give_up` asked again."""
        with self._changed:
            self._changed.notify_all()

    def _wait(self, call: _Call, give_up: Callable[[StorageStalledError], Exception | None]) -> None:
        while True:
            with self._changed:
                if call.done:
                    return
                left = self.progress.left()
                if left > 0:
                    began, seconds = time.monotonic(), min(left, _LOOK_SECONDS)
                    self._changed.wait(seconds)
                    late = time.monotonic() - began - seconds
                    if late > _LOOK_SECONDS:
                        self.progress.stopped(late)
                    continue
            error = give_up(self._error(call))  # without the lock: it may emit events
            if error is not None:
                if not self._leave(call):
                    return
                try:
                    raise error
                finally:
                    del error  # it refers to this frame
            with self._changed:
                if not call.done:
                    self._changed.wait(min(_LOOK_SECONDS, STALL_SECONDS))

    def _leave(self, call: _Call) -> bool:
        """Stop waiting, unless it has just ended; whether it continues without us."""
        with self._changed:
            if call.done:
                return False
            call.abandoned = True
            if self.keeps:
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
            self.ended()

    def _error(self, call: _Call) -> StorageStalledError:
        seconds = max(STALL_SECONDS, time.time() - call.since)
        return StorageStalledError(
            f"{self.url} made no progress for {seconds:.0f} s; the request is still blocked",
            hint="check the disk, the mount or the network; it is used again as soon as it answers",
        )


class WatchedStorage(WrapperStorage):
    """Tells `progress` of each byte that is sent and of each call; puts end once `progress` is abandoned."""

    def __init__(self, inner: Storage, progress: CallProgress) -> None:
        super().__init__(metered(inner, lambda meter: _WatchingMeter(meter, progress)))
        self._progress = progress

    @cached_property
    def capabilities(self) -> Capabilities:
        own = super().capabilities
        return replace(
            own,
            free_bytes=partial(self._progress.during, own.free_bytes),
            versions=own.versions and _WatchedVersions(own.versions, self._progress),
        )

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        self._progress.check()
        self._progress.during(partial(self.inner.put, name, blocks, exclusive=exclusive))

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        return self._progress.during(partial(self.inner.get, name, start, nbytes))

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        self._progress.during(partial(self.inner.get_into, name, start, out), out.nbytes / SLOWEST_BYTES_PER_SECOND)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._progress.during(partial(self._rows, prefix)))

    def delete(self, *names: str) -> None:
        self._progress.during(partial(self.inner.delete, *names), _DELETE_SECONDS * len(names))

    def sweep(self) -> int:
        return self._progress.during(self.inner.sweep)

    def _rows(self, prefix: str) -> Sequence[ObjectInfo]:
        found: MutableSequence[ObjectInfo] = []
        for item in self.inner.list(prefix):
            found.append(item)
            if len(found) % _ROWS == 1:  # a long listing makes progress
                self._progress.moved()
        return found


@dataclass(eq=False)
class _WatchedVersions:
    """Conditional writes of a watched storage."""

    _inner: Versions
    _progress: CallProgress

    def read_versioned(self, name: str) -> tuple[bytes, str] | None:
        return self._progress.during(partial(self._inner.read_versioned, name))

    def replace(self, name: str, data: bytes, version: str | None) -> None:
        self._progress.during(partial(self._inner.replace, name, data, version))


class _WatchingMeter(Meter):
    """Tells of each slice: it may wait for its turn, and then take as long as a slow network would."""

    def __init__(self, inner: Meter, progress: CallProgress) -> None:
        self._inner = inner
        self._progress = progress
        self.slice_bytes = inner.slice_bytes

    def wait(self, nbytes: int) -> float:
        self._progress.check()
        seconds = self._inner.wait(nbytes)
        if nbytes or seconds:
            self._progress.moved(seconds + nbytes / SLOWEST_BYTES_PER_SECOND)
        else:
            self._progress.tried()
        return seconds

    def pause(self, seconds: float) -> None:
        self._inner.pause(seconds)

    def moved(self) -> None:
        self._inner.moved()
        self._progress.moved()

    def listener(self) -> Callable[[], object]:
        return self._progress.moved if type(self._inner) is Meter else self.moved


class WatchedSource(CallProgress):
    """A nearer tier as one further tier reads it: a call that hangs in it is left there for good.

    Args:
        progress: of the tier that is copied to.
    """

    def __init__(self, storage: Storage, progress: CallProgress) -> None:
        super().__init__()
        self._reads = set[object]()
        self._left = set[object]()
        """Those of the reads that were left behind."""
        self.storage: Storage = WatchedStorage(WatchedStorage(storage, progress), self)
        self.repository = Repository(self.storage)

    def leave(self) -> bool:
        """If reads are under way that were not left before: they end with `AbandonedError`; whether there are any."""
        with self._lock:
            hanging = self._reads - self._left
            self._left |= hanging
        return bool(hanging)

    def usable(self) -> bool:
        """Whether no read hangs that was left behind."""
        return not self._left

    def during(self, request: Callable[[], T], rest_seconds: float = 0.0) -> T:  # noqa: ARG002 - `progress` counts
        """The answer to a read.

        Raises:
            AbandonedError: it was left behind meanwhile.
        """
        read = object()
        self._reads.add(read)
        try:
            return request()
        finally:
            with self._lock:
                self._reads.remove(read)
                left = read in self._left
                self._left.discard(read)
            if left:
                raise AbandonedError


@dataclass(eq=False)
class GuardedReader:
    """Reads at one tier while a call to it is under way.

    There is at most one read that hangs: until it ends, others are refused at once.

    Args:
        repository: at the tier; watched by `lane`, and of no other use.
        lane: that the reads run in.
        waiting: progress of the call that asks, which must not look as if it hung while a read does.
    """

    _repository: Repository
    _lane: StuckCallRunner
    waiting: CallProgress

    def read(self, work: Callable[[Repository], T], nbytes: int = 0) -> T:
        """The result of `work`, which reads at most so many bytes in one call, and into nothing that others need.

        Raises:
            StorageStalledError: it hangs, or one before still does.
        """
        self.waiting.moved(STALL_SECONDS + nbytes / SLOWEST_BYTES_PER_SECOND)
        try:
            return self._lane.call(lambda: work(self._repository))
        finally:
            self.waiting.moved()
