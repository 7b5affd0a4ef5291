"""One thread per further tier, which copies what the tier wants."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

from ckpt_engine.copy.transfer import CopySourceError
from ckpt_engine.errors import ForeignError, LeaseHeldError, NewerFormatError, StorageStalledError
from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.store.storage.base import SLICE_BYTES, Throttle
from ckpt_engine.store.storage.disk import Meter
from ckpt_engine.store.storage.retries import GrowingPauses, asking
from ckpt_engine.store.storage.watchdog import AbandonedError
from ckpt_engine.writer.copy_target import CopyTarget
from ckpt_engine.writer.run_records import TierHealth, TierStatus, Unfinished

_uniform = random.SystemRandom().uniform
PAUSES = GrowingPauses(1.0, 60.0)
"""Between attempts at a tier that fails; up to half of each is left out, at random."""
SILENT_SECONDS = 3.0
"""A trainer that ends does not wait for a tier that has given no sign for so long; its writer continues."""
RECENT_SECONDS = 1.0
"""Of a tier that has given a sign since then it is said that it is waited for."""
PATIENCE_SECONDS = 60.0
"""How long a trainer that ends waits for the part of other nodes in a copy; its writer continues."""


class CopyStoppedError(Exception):
    """The copy under way is not wanted any more."""


class SourceLeftError(CopySourceError):
    """The attempt hung in a nearer tier and was left behind there: others may do."""


class TierLeftError(StorageStalledError):
    """The attempt hung in the tier itself while all ended, and was left behind."""


@dataclass(eq=False)
class CopyThrottle(Meter):
    """Where the bytes of one tier pass: at its bandwidth, and not after `stop` or `drop`.

    Args:
        throttle: the tier's limit; None: none.
    """

    slice_bytes = SLICE_BYTES

    _throttle: Throttle | None
    shut: threading.Event = field(default_factory=threading.Event, init=False)
    is_stopped: bool = field(default=False, init=False)
    """Whether `stop` was called."""

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
        if self.shut.wait(seconds):
            raise CopyStoppedError

    def drop(self) -> None:
        """Stop the copy under way."""
        self.shut.set()

    def stop(self) -> None:
        """Stop all copies, now and later."""
        self.is_stopped = True
        self.shut.set()

    def reopen(self) -> None:
        """Before a new copy: forget `drop`."""
        self.shut.clear()
        if self.is_stopped:
            self.shut.set()


class TierState(Enum):
    """What is done about one further tier; docs/tiers.md has a picture of it."""

    COPYING = auto()
    """An attempt is under way, or about to be."""
    RESTING = auto()
    """The last attempt did what there was to do; the next one needs a reason, or a time to look again."""
    FAILED = auto()
    """The last attempt failed; the next one comes after a pause."""
    HUNG = auto()
    """The attempt under way gives no sign; it is waited for."""
    LEFT = auto()
    """All has ended but an attempt that hung: if it ends, it gives back the lease."""
    ENDED = auto()


NEXT: Mapping[TierState, frozenset[TierState]] = {
    TierState.COPYING: frozenset(TierState) - {TierState.LEFT},
    TierState.RESTING: frozenset({TierState.COPYING, TierState.ENDED}),
    TierState.FAILED: frozenset({TierState.COPYING, TierState.ENDED}),
    TierState.HUNG: frozenset(TierState),
    TierState.LEFT: frozenset(),
    TierState.ENDED: frozenset(),
}
"""The states that may follow each."""


class Replicator(threading.Thread):
    """Works on one tier until it is stopped. All methods may be called from any thread and return at once.

    What it asks of storages runs on another thread, which it watches: a tier that hangs counts as failed, and is waited
    for; a nearer tier that hangs is gone without.

    Args:
        emit: takes events; called on several threads.
        changed: called whenever `status` has changed.
    """

    def __init__(
        self,
        tier: CopyTarget,
        gate: CopyThrottle,
        emit: Callable[[Event], object],
        changed: Callable[[], object],
    ) -> None:
        super().__init__(name="ckpt-replicate", daemon=True)
        self.tier = tier
        self._gate = gate
        self._emit = emit
        self._tell = changed
        # Never the program's own random stream: this may run in the trainer's process.
        self._changed = threading.Condition()
        self._woken = False
        self._finishing_at = math.inf
        """When `finish` was called last, in monotonic seconds."""
        self._failures = 0
        self.health = TierHealth(tier.url, emit)
        self.state = TierState.COPYING
        self.idle = False
        """Nothing was wanted when it was looked at last, and nothing new has come since."""
        self.settled = False
        """Since `finish`: nothing is wanted, or an attempt has failed."""

    def wake(self) -> None:
        """A nearer tier has something new."""
        with self._changed:
            self._woken = True
            self.idle = False
            self._changed.notify_all()

    def finish(self) -> None:
        """Nothing new will come: try at once what is still wanted."""
        with self._changed:
            self._finishing_at = time.monotonic()
            self._changed.notify_all()
        self.tier.place.copy_lane.look()

    def stop(self) -> None:
        """End, leaving a copy under way unfinished."""
        self._gate.stop()
        with self._changed:
            self._changed.notify_all()
        self.tier.place.copy_lane.look()

    def drop(self, snapshots: Collection[str]) -> None:
        """These snapshots are gone where they were copied from: stop, so that their memory and disk are freed."""
        copying = self.tier.progress.copying
        if copying is not None and copying.id in snapshots:
            self._gate.drop()

    @property
    def _finishing(self) -> bool:
        return self._finishing_at < math.inf

    @property
    def ended(self) -> bool:
        """Whether nothing more is begun."""
        return not NEXT[self.state]

    @property
    def works(self) -> bool:
        """Whether the tier is open, and did not fail last time or hangs only in what is copied there."""
        return (
            self.tier.is_open
            and not self.tier.place.direct_lane.stuck
            and (self.health.error is None or self.health.hangs)
        )

    @property
    def silent(self) -> bool:
        """Whether it leaves what it is asked without a sign, for longer than a trainer that ends waits."""
        return self.tier.place.signs.silent_seconds >= SILENT_SECONDS

    @property
    def hopeless(self) -> bool:
        """Whether it fails in a way that waiting does not mend: the place is not one of this run."""
        error = self.health.error
        return error is not None and error.code in (ForeignError.code, NewerFormatError.code)

    def failed(self, error: BaseException) -> None:
        """Note that the tier failed."""
        with self._changed:
            self._failures += 1
        is_silent = self._finishing and not self.tier.config.fatal  # the end says it
        self.health.failed(error, fatal=self.tier.config.fatal, silent=is_silent)
        self._tell()

    def status(self) -> TierStatus:
        """How the tier is."""
        progress, why = self.tier.progress, self.tier.encoding.why
        waiting, newest, copying = progress.waiting, progress.newest, progress.copying
        return self.health.status(
            newest=newest.id if newest else None,
            copying=copying.id if copying else None,
            waiting=len(waiting),
            waiting_bytes=sum(info.nbytes for info in waiting),
            sent_bytes=progress.sent_bytes,
            encoding=why or None,
        )

    def unfinished(self, newest: str | None) -> Unfinished:
        """What the tier is left without; `newest` is that of the nearest one, which may not have been looked at yet."""
        error, there, waiting = self.health.error, self.tier.progress.newest, self.tier.progress.waiting
        lacks = tuple(info.id for info in waiting)
        seen = newest in lacks or (lacks and not self._woken) or (there is not None and there.id == newest)
        if newest is not None and not seen:
            lacks = (newest, *lacks)
        silent = "it does not answer" if self.silent else None
        why = silent if error is None else f"[{error.code}] {error.message}"
        return Unfinished(self.tier.url, lacks, why, sum(info.nbytes for info in waiting))

    def run(self) -> None:
        """The thread: begins at once with whatever nearer tiers have."""
        try:
            while not self._gate.is_stopped:
                finishing_at = self._finishing_at
                self._sleep(self._turn(), finishing_at)
        finally:
            if self.state is not TierState.LEFT:
                self._release()
                self._go(TierState.ENDED, settled=True)

    def _go(self, state: TierState, *, settled: bool) -> None:
        with self._changed:
            assert state in NEXT[self.state], f"{state} after {self.state}"
            self.state = state
            if state in (TierState.RESTING, TierState.FAILED):
                self.idle = state is TierState.RESTING and not self.tier.progress.waiting and not self._woken
            self.settled = self.settled or settled
        self._tell()

    def _turn(self) -> float | None:
        """One attempt. Seconds to the next one; None: when there is something new."""
        finishing = self._finishing
        self._gate.reopen()
        advance = asking()(self.tier.advance)  # it is tried again anyway
        try:
            delay = self.tier.place.copy_lane.call(advance, left=self._came_back, give_up=self._give_up)
        except (CopyStoppedError, AbandonedError):
            return 0.0
        except TierLeftError:
            self._go(TierState.LEFT, settled=True)
            return 0.0
        except CopySourceError as err:
            self._source_failed(err)
            if isinstance(err, SourceLeftError):
                return 0.0
        except Exception as err:  # noqa: BLE001 - whatever it is, it is this tier's alone, and reported
            if self._gate.shut.is_set():
                return 0.0  # libraries wrap what they were stopped with
            self.failed(err)
            if isinstance(err, LeaseHeldError):
                self._release()
        else:
            self._failures = 0
            self.health.worked()
            if delay == 0.0:
                self._tell()
                return delay
            if delay is not None and self.tier.progress.waiting:  # for what others have to do first
                finishing = finishing and time.monotonic() > self._finishing_at + PATIENCE_SECONDS
            self._go(TierState.RESTING, settled=finishing)
            return delay
        self._go(TierState.FAILED, settled=finishing)
        return PAUSES.seconds(self._failures - 1) * _uniform(0.5, 1.0)

    def _give_up(self, error: StorageStalledError) -> Exception | None:
        """The attempt hangs: whether to leave it behind, and as what that counts."""
        source, finishing = self.tier.leave_source(), self._finishing
        if source is not None:
            return SourceLeftError(StorageStalledError(f"{source} hangs", hint=error.hint))
        if not self.health.hangs:
            self.failed(error)
        stopped = self._gate.is_stopped
        self._go(TierState.HUNG, settled=finishing or stopped)
        return TierLeftError(error.message, hint=error.hint) if stopped else None

    def _came_back(self, _: BaseException | None) -> None:
        """An attempt that was left behind has ended. At the end of all it may be back before `state` is LEFT."""
        if self._gate.is_stopped and self.state in (TierState.HUNG, TierState.LEFT):
            self.tier.release()
        else:
            self.wake()

    def _release(self) -> None:
        """Give back the lease; a tier that hangs does so when it has ended."""
        with suppress(StorageStalledError):  # reported as hanging, or in no hurry
            self.tier.place.copy_lane.call(asking()(self.tier.release))

    def _sleep(self, seconds: float | None, finishing_at: float) -> None:
        """Wait for the next attempt; `finishing_at`: as it was when the last one began."""
        with self._changed:
            # What is new does not shorten the pause after a failure.
            rests = self.state is TierState.RESTING
            self._changed.wait_for(
                lambda: self._gate.is_stopped or self._finishing_at != finishing_at or (rests and self._woken), seconds
            )
            self._woken = False
            if not self._gate.is_stopped:
                self.state = TierState.COPYING

    def _source_failed(self, err: CopySourceError) -> None:
        """No nearer tier can be read: not this tier's fault."""
        with self._changed:
            self._failures += 1
            first = self._failures == 1
        if first:
            self._emit(Notice("WARNING", f"nothing can be copied to {self.tier.url} now: {err.error.message}"))
