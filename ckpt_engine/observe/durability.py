"""Which work of a run is not durable yet, on each tier."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.events import (
    Event,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotFound,
    SnapshotReplicated,
    SnapshotStaged,
    TierDegraded,
    TierRecovered,
    WriterLost,
)
from ckpt_engine.observe.units import place

_SAMPLES = 5
_LEAST_LEFT = 0.1
"""Of a snapshot in flight, as long as it is not committed: sync and commit come last."""


@dataclass(frozen=True, slots=True)
class TierStanding:
    """One tier.

    Args:
        bytes_per_second: median of the newest writes there, committing included; None before the first.
        newest_step: of the newest snapshot that became durable there during this run.
        newest_instant: monotonic seconds at which that snapshot was taken.
        away: it failed, and did not recover yet.
    """

    url: str
    bytes_per_second: float | None = None
    newest_step: int | None = None
    newest_instant: float | None = None
    away: bool = False


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """A snapshot that was taken and is not durable on the nearest tier. `since`: monotonic seconds of its instant."""

    step: int
    nbytes: float
    since: float


@dataclass(frozen=True, slots=True)
class DurabilityStatus:
    """Everything at one moment.

    Args:
        tiers: nearest first.
        in_flight: oldest first.
        state_bytes, stall_seconds: of the newest snapshot; 0 before the first.
        busy_since: monotonic seconds from which the writer has had the oldest of those in flight.
        held_step: of the newest snapshot, if it stays in memory and is durable nowhere.
        committed, failed: snapshots of this run, on the nearest tier.
        longest_stall_seconds: of all that were to become durable.
    """

    tiers: tuple[TierStanding, ...]
    in_flight: tuple[PendingCommit, ...] = ()
    state_bytes: int = 0
    stall_seconds: float = 0.0
    busy_since: float = 0.0
    held_step: int | None = None
    committed: int = 0
    failed: int = 0
    longest_stall_seconds: float = 0.0

    @property
    def safest(self) -> TierStanding:
        """The nearest tier that has the newest durable snapshot: another than the first while that is full or away."""
        return max(self.tiers, key=lambda tier: -1 if tier.newest_step is None else tier.newest_step)

    def left_bytes(self, now: float) -> tuple[float, ...]:
        """For each in flight what is left to write, as the measured speed of the nearest tier lets expect."""
        speed = self.tiers[0].bytes_per_second or 0.0
        left = [float(one.nbytes) for one in self.in_flight]
        if left:
            left[0] = max(left[0] - speed * max(0.0, now - self.busy_since), _LEAST_LEFT * left[0])
        return tuple(left)


class Ledger:
    """An event sink. Events are taken on the training thread; `standing` may be read on any.

    Args:
        urls: of the tiers, nearest first; a folder may be a path here and a file URL in events.
        clock: the source of moments.
    """

    def __init__(self, urls: Sequence[str], clock: Clock) -> None:
        self._now = clock.monotonic
        self._tiers = {url: TierStanding(url) for url in map(place, urls)}
        self._rates: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_SAMPLES))
        self._resumed: PendingCommit | None = None
        self._found: SnapshotFound | None = None
        self.standing = DurabilityStatus(tuple(self._tiers.values()))

    def resumed(self, step: int, url: str) -> None:
        """Training resumes from the snapshot of `step` that came from `url`.

        If that was memory, the nearest tier counts as soon as its writer tells what it has.
        """
        self._resumed = PendingCommit(step, 0, self._now())
        if (where := place(url)) in self._tiers:
            self._tiers[where] = TierStanding(where, newest_step=step, newest_instant=self._now())
        self._take_up()
        self._publish()

    def emit(self, event: Event) -> None:
        now = self.standing
        match event:
            case SnapshotStaged(durable=False):
                self._publish(state_bytes=event.nbytes, stall_seconds=event.stall_seconds, held_step=event.step)
            case SnapshotStaged():
                self._publish(
                    in_flight=(
                        *now.in_flight,
                        PendingCommit(event.step, event.nbytes, self._now() - event.stall_seconds),
                    ),
                    state_bytes=event.nbytes,
                    stall_seconds=event.stall_seconds,
                    busy_since=now.busy_since if now.in_flight else self._now(),
                    held_step=None,
                    longest_stall_seconds=max(now.longest_stall_seconds, event.stall_seconds),
                )
            case SnapshotCommitted():
                instant = next((one.since for one in now.in_flight if one.step == event.step), None)
                instant = self._now() - event.latency_seconds if instant is None else instant
                self._durable(event.tier, event.step, instant, event.written_bytes, event.write_seconds)
                held_step = None if event.step == now.held_step else now.held_step
                self._publish(**self._settled(event.step), committed=now.committed + 1, held_step=held_step)
            case SnapshotFound():
                self._found = event
                self._take_up()
                self._publish()
            case SnapshotFailed():
                self._publish(**self._settled(event.step), failed=now.failed + 1)
            case SnapshotReplicated():
                instant = self._now() - event.latency_seconds
                self._durable(event.tier, event.step, instant, event.sent_bytes, event.copy_seconds)
                self._publish()
            case WriterLost():
                self._publish(in_flight=(), held_step=None)
            case TierDegraded() | TierRecovered():
                self._change(event.tier, away=isinstance(event, TierDegraded))
                self._publish()

    def _take_up(self) -> None:
        """What the rescue has made durable of what training resumes from; the instant of an older one is not known."""
        resumed, found = self._resumed, self._found
        if resumed is None or found is None:
            return
        known = self._tiers.get(place(found.tier))
        if known is None or known.newest_step is None:
            instant = resumed.since if found.step >= resumed.step else None
            self._change(found.tier, newest_step=min(found.step, resumed.step), newest_instant=instant)

    def _settled(self, step: int) -> dict[str, Any]:
        """What changes because the outcome of a snapshot is known."""
        flying = self.standing.in_flight
        found = next((one for one in flying if one.step == step), None)
        if found is None:
            return {}
        return {"in_flight": tuple(one for one in flying if one is not found), "busy_since": self._now()}

    def _durable(self, url: str, step: int, instant: float, nbytes: int, seconds: float) -> None:
        rates = self._rates[place(url)]
        if nbytes > 0 and seconds > 0.0:
            rates.append(nbytes / seconds)
        self._change(url, bytes_per_second=statistics.median_low(rates) if rates else None, away=False)
        newest = self._tiers[place(url)].newest_step
        if newest is None or step >= newest:
            self._change(url, newest_step=step, newest_instant=instant)

    def _change(self, url: str, **what: Any) -> None:
        where = place(url)
        self._tiers[where] = replace(self._tiers.get(where) or TierStanding(where), **what)

    def _publish(self, **what: Any) -> None:
        # One assignment: a reader on another thread sees the old value or the new one.
        self.standing = replace(self.standing, tiers=tuple(self._tiers.values()), **what)
