"""One thread per further tier: copies what the tier wants, backs off when it fails, and catches up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from ckpt_engine.copy.transfer import CopySourceError
from ckpt_engine.errors import CkptError, ForeignError, LeaseHeldError, NewerFormatError, StorageStalledError
from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.store.storage.base import SLICE_BYTES, Throttle
from ckpt_engine.store.storage.disk import Meter
from ckpt_engine.store.storage.object_requests import GrowingPauses, asking
from ckpt_engine.store.storage.watchdog import AbandonedError
from ckpt_engine.writer.run_records import TierHealth, TierStatus, Unfinished
from ckpt_engine.writer.secondary_tier import SecondaryTier


class CopyStoppedError(Exception):
    """The copy under way is not wanted any more."""


class Gate(Meter):
    """Where the bytes of one tier pass: at its bandwidth, and not after `stop` or `drop`.

    Args:
        throttle: the tier's limit; None: none.
    """

    slice_bytes = SLICE_BYTES

    def __init__(self, throttle: Throttle | None) -> None:
        self._throttle = throttle
        self._shut = threading.Event()
        self._stopped = False

    @property
    def is_shut(self) -> bool:
        """Whether the copy under way is to end."""
        return self._shut.is_set()

    def wait(self, nbytes: int) -> float:
        """See `Meter`.

        Raises:
            CopyStoppedError
        """
        self.pause(0.0)
        return self._throttle(nbytes) if self._throttle is not None else 0.0

    def pause(self, seconds: float) -> None:
        """See `Meter`.

        Raises:
            CopyStoppedError
        """
        if self._shut.wait(seconds):
            raise CopyStoppedError

    def drop(self) -> None:
        """Stop the copy under way."""
        self._shut.set()

    def stop(self) -> None:
        """Stop all copies, now and later."""
        self._stopped = True
        self._shut.set()

    def reopen(self) -> None:
        """Before a new copy: forget `drop`."""
        self._shut.clear()
        if self._stopped:
            self._shut.set()


PAUSES = GrowingPauses(1.0, 60.0)
"""Between attempts at a tier that fails; up to half of each is left out, at random."""
SILENT_SECONDS = 3.0
"""A trainer that ends does not wait for a tier that has given no sign for so long; its writer goes on."""
RECENT_SECONDS = 1.0
"""Of a tier that has given a sign since then it is said that it is waited for."""
PATIENCE_SECONDS = 60.0
"""How long a trainer that ends waits for the part of other nodes in a copy; its writer goes on."""


class Replicator:
    """Works on one tier until it is stopped. All methods may be called from any thread and return at once.

    What it asks of storages runs on another thread, which it watches: a tier that hangs counts as failed, and is waited
    for; a nearer tier that hangs is gone without.

    Args:
        emit: takes events; called on several threads.
        changed: called whenever `status` has changed.
    """

    def __init__(
        self,
        tier: SecondaryTier,
        gate: Gate,
        emit: Callable[[Event], object],
        changed: Callable[[], object],
    ) -> None:
        self.tier = tier
        self._gate = gate
        self._emit = emit
        self._tell = changed
        # Never the program's own random stream: this may run in the trainer's process.
        self._random = random.SystemRandom()
        self._state = threading.Condition()
        self._woken = self._hurried = self._finishing = self._stopping = False
        self._finishing_at = 0.0
        self._rests = False
        """The last attempt has not failed, and there is no next one without a reason."""
        self._failures = 0
        self._health = TierHealth(tier.url, emit, fatal=tier.config.fatal)
        self._hung_in: str | None = None
        """The nearer tier in which the last attempt hung."""
        self._lingers = False
        """An attempt was left behind at the end."""
        self.idle = False
        """Nothing is wanted."""
        self.settled = False
        """Since `finish`: nothing is wanted, or an attempt has failed."""
        self.ended = False
        self._thread = threading.Thread(target=self._run, name="ckpt-replicate", daemon=True)

    def start(self) -> None:
        """Start, at once with whatever nearer tiers have."""
        self._thread.start()

    def wake(self) -> None:
        """A nearer tier has something new."""
        with self._state:
            self._woken = True
            self.idle = False
            self._state.notify_all()

    def finish(self) -> None:
        """Nothing new will come: try at once what is still wanted."""
        with self._state:
            self._finishing_at = time.monotonic()
            self._finishing = self._hurried = True
            self._state.notify_all()
        self.tier.copies.look()

    def stop(self) -> None:
        """End, leaving a copy under way unfinished."""
        with self._state:
            self._stopping = self._hurried = True
            self._state.notify_all()
        self._gate.stop()
        self.tier.copies.look()

    def drop(self, snapshots: Collection[str]) -> None:
        """These snapshots are gone where they were copied from: stop, so that their memory and disk are freed."""
        copying = self.tier.copying
        if copying is not None and copying.id in snapshots:
            self._gate.drop()

    def join(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the end of the thread; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def works(self) -> bool:
        """Whether the tier is open, and did not fail last time or hangs only in what is copied there."""
        return self.tier.is_open and not self.tier.direct.stuck and (self._health.error is None or self.hangs)

    @property
    def silent(self) -> bool:
        """Whether it leaves what it is asked without a sign, for longer than a trainer that ends waits."""
        return self.tier.signs.silent_seconds >= SILENT_SECONDS

    @property
    def gets_on(self) -> bool:
        """Whether it has given a sign a moment ago, or nothing is asked of it."""
        return self.tier.signs.silent_seconds < RECENT_SECONDS

    @property
    def hangs(self) -> bool:
        """Whether what was asked of the tier last has not come back."""
        return self._health.hangs

    @property
    def hopeless(self) -> bool:
        """Whether it fails in a way that waiting does not mend: the place is not one of this run."""
        error = self._health.error
        return error is not None and error.code in (ForeignError.code, NewerFormatError.code)

    def failed(self, error: BaseException) -> None:
        """Note that the tier failed."""
        with self._state:
            self._failures += 1
        silent = self._finishing and not self.tier.config.fatal  # the end says it
        self._health.failed(error, silent=silent)
        self._tell()

    def status(self) -> TierStatus:
        """How the tier is."""
        tier = self.tier
        waiting, newest, copying = tier.waiting, tier.newest, tier.copying
        return self._health.status(
            newest=newest.id if newest else None,
            copying=copying.id if copying else None,
            waiting=len(waiting),
            waiting_bytes=sum(info.nbytes for info in waiting),
            sent_bytes=tier.sent_bytes,
            encoding=tier.encoding.why or None,
        )

    def unfinished(self, newest: str | None) -> Unfinished:
        """What the tier is left without; `newest` is that of the nearest one, which may not have been looked at yet."""
        error, there, waiting = self._health.error, self.tier.newest, self.tier.waiting
        lacks = tuple(info.id for info in waiting)
        seen = newest in lacks or (lacks and not self._woken) or (there is not None and there.id == newest)
        if newest is not None and not seen:
            lacks = (newest, *lacks)
        silent = "it does not answer" if self.silent else None
        why = silent if error is None else f"[{error.code}] {error.message}"
        return Unfinished(self.tier.url, lacks, why, sum(info.nbytes for info in waiting))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._sleep(self._turn())
        finally:
            self._release()
            with self._state:
                self.ended = self.settled = True
            self._tell()

    def _turn(self) -> float | None:
        """One attempt. Seconds to the next one; None: when there is something new."""
        finishing = self._finishing
        self._rests = False
        self._hung_in = None
        self._gate.reopen()
        try:
            more = self.tier.copies.call(self._advance, left=self._came_back, give_up=self._give_up)
        except (CopyStoppedError, AbandonedError):
            return 0.0
        except StorageStalledError as err:
            if self._left_a_source(err):
                return 0.0  # other nearer tiers may do
            self.failed(err)
            delay: float | None = self._pause()
        except CopySourceError as err:
            self._source_failed(err)
            delay = self._pause()
        except Exception as err:  # noqa: BLE001 - whatever it is, it is this tier's alone, and reported
            if self._gate.is_shut:
                return 0.0  # libraries wrap what they were stopped with
            self.failed(err)
            if isinstance(err, LeaseHeldError):
                self._release()
            delay = self._pause()
        else:
            self._failures = 0
            self._health.worked()
            if more:
                self._tell()
                return 0.0
            delay, self._rests = self.tier.next_look_seconds, True
            if delay is not None and self.tier.waiting:  # for what others have to do first
                finishing = finishing and time.monotonic() > self._finishing_at + PATIENCE_SECONDS
        with self._state:
            self.idle = self._rests and not self.tier.waiting and not self._woken
            self.settled = self.settled or finishing
        self._tell()
        return delay

    def _pause(self) -> float:
        """Before the next attempt after those that have failed in a row."""
        return PAUSES.seconds(self._failures - 1) * (0.5 + 0.5 * self._random.random())

    def _advance(self) -> bool:
        with asking():  # it is tried again anyway
            return self.tier.advance()

    def _give_up(self, error: StorageStalledError) -> bool:
        """The attempt hangs: whether to leave it behind."""
        self._hung_in = self.tier.leave_source()
        if self._hung_in is not None:
            return True
        finishing = self._finishing
        if not self.hangs:
            self.failed(error)
        with self._state:
            self._lingers = self._stopping
            self.settled = self.settled or finishing
        self._tell()
        return self._lingers

    def _left_a_source(self, err: StorageStalledError) -> bool:
        """Whether it was a nearer tier in which the attempt hung; says so."""
        if self._hung_in is None:
            return False
        self._source_failed(CopySourceError(StorageStalledError(f"{self._hung_in} hangs", hint=err.hint)))
        return True

    def _came_back(self, _: BaseException | None) -> None:
        """An attempt that was left behind has ended."""
        if self._lingers:
            self.tier.release()
        else:
            self.wake()

    def _release(self) -> None:
        """Give back the lease, unless the tier hangs: then that is done when it has ended."""
        if not self._lingers:
            with suppress(StorageStalledError):  # reported as hanging, or in no hurry
                self.tier.copies.call(self._give_back, give_up=lambda _: True)

    def _give_back(self) -> None:
        with asking():
            self.tier.release()

    def _sleep(self, seconds: float | None) -> None:
        with self._state:
            # What is new does not shorten the pause after a failure.
            self._state.wait_for(lambda: self._hurried or (self._rests and self._woken), seconds)
            self._woken = self._hurried = False

    def _source_failed(self, err: CopySourceError) -> None:
        """No nearer tier can be read: not this tier's fault."""
        with self._state:
            self._failures += 1
            first = self._failures == 1
        if first:
            error: CkptError = err.error
            self._emit(Notice("WARNING", f"nothing can be copied to {self.tier.url} now: {error.message}"))
