"""The numbers of a run that its board, its loggers and the handling of a stop rely on: times, costs, what is durable
where, what work is at risk.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ckpt_engine.observe.events import (
    AttemptsFound,
    Clock,
    Event,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotFound,
    SnapshotReplicated,
    SnapshotSkipped,
    SnapshotStaged,
    TierDegraded,
    TierRecovered,
    WriterLost,
)
from ckpt_engine.observe.units import place

TIMES = ("startup", "restore", "training", "replay", "stall", "fence", "validation", "end")
"""What the seconds of a process go into; docs/cli.md, `ckpt goodput`, says what each means."""


MEASURED = (
    "slowdown",
    "slowdown_error",
    "step",
    "stall_each",
    "slowdown_each",
    "persist_each",
    "memory_each",
    "megabytes",
    "idle",
)
"""What a cadence measures, in seconds: by how much all snapshots made steps longer, and its standard error; one step;
of one snapshot the stall, the slowdown, the time until it is durable, that of one in memory; 10^6 bytes written;
how long a rank has waited, on average, for others that snapshots blocked longer."""


@dataclass(frozen=True, slots=True)
class RunSpent:
    """What the time of a run went into, in seconds, of all its attempts and between them. The sum is wall time.

    Args:
        productive: training that was not lost, less `slowdown`; a step under way counts.
        slowdown: by which steps next to snapshots were longer, as estimated.
        stall: that snapshots blocked training.
        fence: that training waited for a copy before it changed what is copied.
        replay: work that was done before a failure already, and steps that a failure has cut off.
        restore: reading a snapshot.
        startup: from the start of a process until it trains, `restore` not included.
        validation: evaluation.
        end: after the last step, until the last snapshot was durable.
        down: no process trained.
        unknown: of attempts that have recorded no more than how long they lasted.
        slowdown_error: standard error of `slowdown`; no part of the sum.
        idle: that a rank waited, on average, for others that a snapshot blocked longer; in other parts already.
    """

    productive: float = 0.0
    slowdown: float = 0.0
    stall: float = 0.0
    fence: float = 0.0
    replay: float = 0.0
    restore: float = 0.0
    startup: float = 0.0
    validation: float = 0.0
    end: float = 0.0
    down: float = 0.0
    unknown: float = 0.0
    slowdown_error: float = 0.0
    idle: float = 0.0

    @property
    def wall(self) -> float:
        """Since the first process started."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by name that make up the sum."""
        every = asdict(self)
        del every["slowdown_error"], every["idle"]
        return every

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they waited for each other because of snapshots."""
        wall = self.wall
        return self.idle / wall if wall > 0.0 else 0.0

    @property
    def goodput(self) -> float:
        """Productive by wall time; 0.0 of nothing."""
        wall = self.wall
        return self.productive / wall if wall > 0.0 else 0.0

    def plus(self, lasted: float, times: Mapping[str, float], rest: str, down: float = 0.0) -> RunSpent:
        """With one more process, and what came until the one that follows it.

        Args:
            lasted: seconds that it lived.
            times: what went into them, see `TIMES` and `MEASURED`.
            rest: the name of what that leaves out.
            down: seconds; negative ones count as none.
        """
        new = dict.fromkeys(self.parts, 0.0) | {name: times.get(name, 0.0) for name in TIMES}
        training = new.pop("training")
        share = training / (training + new["replay"]) if training > 0.0 else 0.0
        new["slowdown"] = min(share * times.get("slowdown", 0.0), training)
        new["productive"] = training - new["slowdown"]
        new[rest] += max(0.0, lasted - sum(times.get(name, 0.0) for name in TIMES))
        new["down"] = max(0.0, down)
        error = math.hypot(self.slowdown_error, times.get("slowdown_error", 0.0))
        sums = {name: was + new[name] for name, was in self.parts.items()}
        return RunSpent(**sums, slowdown_error=error, idle=self.idle + times.get("idle", 0.0))

    def numbers(self) -> dict[str, float]:
        """All of it for loggers and monitors: `run_stall_seconds` and so on, whose sum is wall time."""
        found = {f"run_{name}_seconds": seconds for name, seconds in self.parts.items()}
        found["run_slowdown_error_seconds"] = self.slowdown_error
        return found | {"goodput_percent": 100.0 * self.goodput, "idle_percent": 100.0 * self.idle_share}


class RunTimes:
    """What the time of this process goes into, of one run that it trains. Training thread only.

    Args:
        clock: the source of durations.
        age: seconds for which the process has lived already.
    """

    def __init__(self, clock: Clock, age: float = 0.0) -> None:
        self._now = clock.monotonic
        self.started = clock.wall() - age
        self.seconds = dict.fromkeys(TIMES, 0.0)
        self.measured: Callable[[], Mapping[str, float]] = dict
        """What the cadence has measured, see `MEASURED`."""
        self.resume_exact: float | None = None
        """1.0: the resume is proved exact, 0.0: a repeated step was different; None: not known, or not compared."""
        self.step = -1
        """The last one that is complete."""
        self._until = self._now() - age
        self._waited = 0.0
        self._reached = -1
        self._fresh = self._trains = self._stepped = False
        self._earlier, self._ended = RunSpent(), 0.0

    def begin(self) -> None:
        """Training begins here: what came before was preparation, as long as no step was complete."""
        if not self._stepped:
            self._account("startup")
            self._trains = True

    def boundary(self, step: int) -> None:
        """Step `step` is complete."""
        again = step <= self._reached
        self._account("startup" if not self._trains else "replay" if again else "training")
        self._trains = self._stepped = True
        self.step = step

    def waited(self, name: str, seconds: float) -> None:
        """Training did not go on for so long, for a reason of `TIMES`."""
        self.seconds[name] += seconds
        self._waited += seconds

    def blocked(self) -> float:
        """Seconds that snapshots have blocked training."""
        return self.seconds["stall"] + self.seconds["fence"]

    def over(self) -> None:
        """Training has ended; the process may begin again."""
        self._account("end")
        self._trains = self._stepped = False

    def found(self, earlier: AttemptsFound) -> None:
        """What earlier attempts were: as far as they were work is done again."""
        self._reached = -1 if self._fresh else earlier.reached
        self._earlier, self._ended = RunSpent(**earlier.spent), earlier.until

    def fresh(self) -> None:
        """Training does not go on from what is there: nothing is done again."""
        self._fresh, self._reached = True, -1

    @property
    def spent(self) -> RunSpent:
        """What the time of the run went into, of earlier attempts and of this one until its last boundary."""
        down = self.started - self._ended if self._ended else 0.0
        times = self.seconds | dict(self.measured())
        return self._earlier.plus(sum(self.seconds.values()), times, "end", down)

    def _account(self, name: str) -> None:
        now = self._now()
        self.seconds[name] += now - self._until - self._waited
        self._until, self._waited = now, 0.0


_of_runs: dict[str, RunTimes] = {}


def times_of(root_url: str, clock: Clock) -> RunTimes:
    """Those of this process and that run: one after another may train it here."""
    if root_url not in _of_runs:
        _of_runs[root_url] = RunTimes(clock, _age_of_process())
    return _of_runs[root_url]


def _age_of_process() -> float:
    """Seconds since this process was started to train; 0.0 where that is not known, or people sit before it."""
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return 0.0
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


class CadenceReading(Protocol):
    """What is read from the cadence of the run (`ckpt_engine.frequency.cadence.Cadence` is one)."""

    @property
    def interval_steps(self) -> int | None:
        """Steps between snapshots; None: not known yet."""

    @property
    def overhead_fraction(self) -> float:
        """What snapshots cost, as a share of the training time without them."""

    def age_of_last_durable(self) -> float:
        """Seconds since the instant of the newest durable snapshot."""


class RunMetrics:
    """An event sink that counts, and a mapping of names to numbers for the loggers of a trainer.

    Args:
        cadence: where interval, overhead and age come from; None leaves them out.
        times: where goodput comes from; None leaves it out.
    """

    def __init__(self, cadence: CadenceReading | None = None, times: RunTimes | None = None) -> None:
        self._cadence = cadence
        self._times = times
        self.stall_seconds = 0.0
        self.snapshot_bytes = 0
        self.durable_step: int | None = None
        """Of the newest durable snapshot."""
        self.committed = 0
        self._latency_seconds = 0.0
        self._counted: Counter[str] = Counter()
        """Since the start, by name in `numbers`."""
        self._tiers: dict[str, bool] = {}
        """Further tiers heard of, and whether they are away."""

    def emit(self, event: Event) -> None:
        match event:
            case SnapshotStaged():
                self.snapshot_bytes = event.nbytes
            case SnapshotCommitted():
                self.committed += 1
                self.durable_step = event.step
                self._counted["written_bytes"] += event.written_bytes
                self._latency_seconds = event.latency_seconds
            case SnapshotFailed():
                self._counted["failed"] += 1
            case SnapshotSkipped():
                self._counted["skipped"] += 1
            case SnapshotReplicated():
                self._counted.update(replicated=1, sent_bytes=event.sent_bytes)
                self._tiers[event.tier] = False
            case TierDegraded() | TierRecovered():
                self._tiers[event.tier] = isinstance(event, TierDegraded)

    def stalled(self, seconds: float) -> None:
        """The newest snapshot has blocked training for so long until now, its fence included."""
        self.stall_seconds = seconds

    def numbers(self) -> dict[str, float]:
        """The current values, without a prefix. Any thread: each is right, all of them may be of two moments.

        `stall_seconds`, `snapshot_bytes` and `latency_seconds` are those of the newest snapshot; `written_bytes`,
        `committed`, `skipped` and `failed` count since the start; `interval_steps` is missing while there is none.
        `resume_exact` is there once the repeated steps were compared: 1 is equal, and 0 is different.
        `replicated`, `sent_bytes` (to further tiers) and `tiers_away` are there once a tier was heard of.
        """
        numbers: dict[str, float] = {
            "stall_seconds": self.stall_seconds,
            "snapshot_bytes": float(self.snapshot_bytes),
            "latency_seconds": self._latency_seconds,
            "written_bytes": float(self._counted["written_bytes"]),
            "committed": float(self.committed),
            "skipped": float(self._counted["skipped"]),
            "failed": float(self._counted["failed"]),
        }
        if self._tiers:
            numbers |= {name: float(self._counted[name]) for name in ("replicated", "sent_bytes")}
            numbers["tiers_away"] = float(sum(self._tiers.values()))
        if self._times is not None:
            numbers |= self._times.spent.numbers()
            if (exact := self._times.resume_exact) is not None:
                numbers["resume_exact"] = exact
        if self._cadence is not None:
            if (interval := self._cadence.interval_steps) is not None:
                numbers["interval_steps"] = float(interval)
            numbers["overhead_percent"] = 100.0 * self._cadence.overhead_fraction
            numbers["age_of_last_durable_seconds"] = self._cadence.age_of_last_durable()
        return numbers


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
class Flying:
    """A snapshot that was taken and is not durable on the nearest tier. `since`: monotonic seconds of its instant."""

    step: int
    nbytes: int
    since: float


@dataclass(frozen=True, slots=True)
class Standing:
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
    in_flight: tuple[Flying, ...] = ()
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
        self._resumed: Flying | None = None
        self._found: SnapshotFound | None = None
        self.standing = Standing(tuple(self._tiers.values()))

    def resumed(self, step: int, url: str) -> None:
        """Training goes on from the snapshot of `step` that came from `url`.

        If that was memory, the nearest tier counts as soon as its writer tells what it has.
        """
        self._resumed = Flying(step, 0, self._now())
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
                        Flying(event.step, event.nbytes, self._now() - event.stall_seconds),
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
        """What the rescue has made durable of what training goes on from; the instant of an older one is not known."""
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
