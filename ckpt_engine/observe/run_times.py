"""What the time of a run goes into."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import wraps
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ckpt_engine.observe.clock import Clock, age_of_process
from ckpt_engine.observe.events import AttemptsFound
from ckpt_engine.observe.number_types import Seconds, SignedSeconds

if TYPE_CHECKING:
    from ckpt_engine.observe.resume_report import Replay

H = TypeVar("H", bound=Callable[..., Any])
T = TypeVar("T")
TIMES = ("startup", "restore", "training", "replay", "stall", "fence", "hooks", "validation", "end")
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
    "overhead",
    "budget",
    "until_next",
)
"""What a cadence measures, in seconds: by how much all snapshots made steps longer, and its standard error; one step;
of one snapshot the stall, the slowdown, the time until it is durable, that of one in memory; 10^6 bytes written;
how long a rank has waited, on average, for others that snapshots blocked longer; the overhead of all snapshots as a
share of training, and the budget for it, 0.0 where there is none; the time until the next one is due."""


def believed(estimate: float, error: float) -> float:
    """What is believed of an estimate, given its standard error.

    What chance explains is none (up to 1.7 errors: one of 25), and what is clearly above it counts in full: of four
    errors 0.96, of ten 0.999.
    """
    return estimate * max(0.0, 1.0 - 9.0 * (error / estimate) ** 4) if estimate > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class RunSpent:
    """What the time of a run went into, in seconds, of all its attempts and between them. The sum is wall time.

    Args:
        productive: training that was not lost, less `slowdown`; a step under way counts.
        slowdown: by which steps next to snapshots were longer, as believed.
        stall: that snapshots blocked training.
        fence: that training waited for a copy before it changed what is copied.
        hooks: that training spent in the engine's own hooks at each step, whether a snapshot followed or not.
        replay: work that was done before a failure already, and steps that a failure has cut off.
        restore: reading a snapshot.
        startup: from the start of a process until it trains, `restore` not included.
        validation: evaluation.
        end: after the last step, until the last snapshot was durable.
        down: no process trained.
        unknown: of attempts that have recorded no more than how long they lasted.
        slowdown_error: standard error of `slowdown_estimate`; no part of the sum.
        idle: that a rank waited, on average, for others that a snapshot blocked longer; in other parts already.
        slowdown_estimate: the sum of all attempts, signed: chance cancels out before any of it is believed.
    """

    productive: Seconds = 0.0
    slowdown: Seconds = 0.0
    stall: Seconds = 0.0
    fence: Seconds = 0.0
    hooks: Seconds = 0.0
    replay: Seconds = 0.0
    restore: Seconds = 0.0
    startup: Seconds = 0.0
    validation: Seconds = 0.0
    end: Seconds = 0.0
    down: Seconds = 0.0
    unknown: Seconds = 0.0
    slowdown_error: Seconds = 0.0
    idle: Seconds = 0.0
    slowdown_estimate: SignedSeconds = 0.0

    @property
    def wall(self) -> float:
        """Since the first process started."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by name that make up the sum."""
        return {
            name: seconds
            for name, seconds in asdict(self).items()
            if name not in ("slowdown_error", "idle", "slowdown_estimate")
        }

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they waited for each other because of snapshots."""
        return self.idle / (self.wall or math.inf)

    @property
    def goodput(self) -> float:
        """Productive by wall time; 0.0 of nothing."""
        return self.productive / (self.wall or math.inf)

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
        estimate = self.slowdown_estimate + share * times.get("slowdown", 0.0)
        error = math.hypot(self.slowdown_error, times.get("slowdown_error", 0.0))
        trained = self.productive + self.slowdown + training
        new["slowdown"] = min(believed(estimate, error), trained) - self.slowdown
        new["productive"] = training - new["slowdown"]
        new[rest] += max(0.0, lasted - sum(times.get(name, 0.0) for name in TIMES))
        new["down"] = max(0.0, down)
        sums = {name: was + new[name] for name, was in self.parts.items()}
        idle = self.idle + times.get("idle", 0.0)
        return RunSpent(**sums, slowdown_error=error, idle=idle, slowdown_estimate=estimate)

    def numbers(self) -> dict[str, float]:
        """All of it for loggers and monitors: `run_stall_seconds` and so on, whose sum is wall time."""
        return {f"run_{name}_seconds": seconds for name, seconds in self.parts.items()} | {
            "run_slowdown_error_seconds": self.slowdown_error,
            "goodput_percent": 100.0 * self.goodput,
            "idle_percent": 100.0 * self.idle_share,
        }


class HookTime:
    """How long training spends in the engine's own code at each step, waits that are counted elsewhere not included.

    Of this process, on the training thread.

    Attributes:
        seconds: so far.
        booked: of these, what is in the times of a run.
    """

    def __init__(self) -> None:
        self.seconds = self.booked = self._left_out = 0.0

    def counted(self, hook: H) -> H:
        """`hook`, whose time counts: where one calls another, that of the outer one."""

        @wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter() - self._left_out - self.seconds
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds = perf_counter() - self._left_out - began

        return cast(H, run)

    def outside(self, call: Callable[..., T], *args: Any) -> T:
        """What a call returns that is none of the engine's work: of its time only that of hooks within counts."""
        began, left_out, seconds = perf_counter(), self._left_out, self.seconds
        try:
            return call(*args)
        finally:
            self._left_out = left_out + perf_counter() - began - (self.seconds - seconds)

    def leave_out(self, seconds: float) -> None:
        """Training has waited for so long, in a hook or outside of them, and that is counted already."""
        self._left_out += seconds


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
        self.resumed_at = 0
        """The step of the snapshot that was loaded first; 0: there was none, or training begins again."""
        self.replay: Replay | None = None
        """Whether the resume is exact; None: not known, or not asked."""
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
        hooks = hook_time.seconds - hook_time.booked
        hook_time.booked = hook_time.seconds
        self.seconds["hooks"] += hooks
        self._waited += hooks
        again = step <= self._reached
        self._account("startup" if not self._trains else "replay" if again else "training")
        self._trains = self._stepped = True
        self.step = step

    def waited(self, name: str, seconds: float) -> None:
        """Training made no progress for so long, for a reason of `TIMES`."""
        self.seconds[name] += seconds
        self._waited += seconds
        hook_time.leave_out(seconds)

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
        """Training does not resume from what exists: nothing is done again."""
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


hook_time = HookTime()
_of_runs: dict[str, RunTimes] = {}


def times_of(root_url: str, clock: Clock) -> RunTimes:
    """Those of this process and that run: one after another may train it here."""
    return _of_runs.setdefault(root_url, RunTimes(clock, _age_of_training()))


def _age_of_training() -> float:
    """Seconds since this process was started to train; 0.0 where that is not known, or people sit before it."""
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return 0.0
    with suppress(OSError, ValueError, IndexError):
        return max(0.0, age_of_process())
    return 0.0
