"""Simulates a run under several policies.

Each run pays for its snapshots and restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

from ckpt_engine.config import Config
from ckpt_engine.frequency.policy import Costs, FrequencySettings
from ckpt_engine.frequency.triggers import SnapshotTimer
from ckpt_engine.observe import units
from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.events import MACHINE, PROCESS, SITE, UNKNOWN, EventSink
from ckpt_engine.tools.failure_plan import DAY, FailurePlan
from ckpt_engine.tools.simulate import FurtherTier, Restart, Rule, Ruled, SimulatedJob
from ckpt_engine.writer.attempts import BEAT_SECONDS, Attempt

FAR_BYTES_PER_SECOND = 200e6
ASSUMED = Costs(step_seconds=1.0, stall_seconds=0.5, latency_seconds=10.0, written_bytes=10e9)
RESTART = Restart({PROCESS: 10.0, MACHINE: 280.0, SITE: 280.0}, startup=15.0, restore=5.0)
DAYS = 30.0
MOST_OURS = 100_000
"""Boundaries that are looked at where no days are asked for."""
MOST_RULED = 400_000
"""The same where a rule decides: one takes a tenth of the time."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What became of one policy.

    Args:
        lost_seconds, worst_seconds: of one failure; None: there was none.
        interval_seconds: between snapshots; None: none was taken.
        spread: the standard deviation of `goodput`; None: too few failures to say.
        tiers: bytes written per day to each durable tier, nearest first.
    """

    name: str
    goodput: float
    spread: float | None
    lost_seconds: float | None
    worst_seconds: float | None
    overhead: float
    interval_seconds: float | None
    failures: int
    tiers: tuple[float, ...]


def costs_of(rows: Sequence[Attempt]) -> tuple[Costs, float, bool]:
    """What one snapshot costs, and one in memory; whether that was measured by the run."""
    seen = next((one.times for one in reversed(rows) if one.times.get("persist_each") and one.times.get("step")), None)
    if seen is None:
        return ASSUMED, ASSUMED.stall_seconds / 4.0, False
    costs = Costs(
        step_seconds=seen["step"],
        stall_seconds=seen.get("stall_each", 0.0),
        slowdown_seconds=seen.get("slowdown_each", 0.0),
        latency_seconds=seen["persist_each"],
        written_bytes=1e6 * seen.get("megabytes", 0.0),
    )
    return costs, seen.get("memory_each", 0.0) or costs.stall_seconds, True


def restart_of(rows: Sequence[Attempt]) -> Restart:
    """What restarts usually took in this run; what it had none of is assumed."""
    down = dict(RESTART.down)
    for kind in down:
        late = 0.0 if kind == PROCESS else BEAT_SECONDS / 2.0  # that a lost machine lived after its last heartbeat
        gaps = [
            max(0.0, (following.started or following.began) - one.began - one.seconds - late)
            for one, following in pairwise(rows)
            if one.failure in (kind, UNKNOWN)
        ]
        down[kind] = median(gaps) if gaps else down[kind]
    startup, restore = (
        median([one.times[name] for one in rows if one.times.get(name)] or [assumed])
        for name, assumed in (("startup", RESTART.startup), ("restore", RESTART.restore))
    )
    return Restart(down, startup, restore)


def jobs_of(
    config: Config,
    costs: Costs,
    memory: float,
    restart: Restart,
    per_second: float,
    rules: Mapping[str, Rule | type[SnapshotTimer]],
) -> dict[str, Callable[..., SimulatedJob]]:
    """A job of these options for our policy, first, and for each rule.

    Args:
        costs, memory: of a snapshot, and the stall of one in memory.
        restart: what a failure is followed by.
        per_second: failures, as the rules know it.
        rules: by name.
    """
    settings = FrequencySettings.of(config)
    speeds = [(tier, tier.bandwidth or FAR_BYTES_PER_SECOND) for tier in config.tiers[1:]]
    far = [FurtherTier(max(1e-3, costs.written_bytes / speed), tier.every or 0.0) for tier, speed in speeds]
    persist = max(costs.latency_seconds - costs.stall_seconds, 1e-3)
    training = {
        "settings": settings,
        "step_seconds": max(costs.step_seconds, 1e-3),
        "stall": costs.stall_seconds,
        "persist": persist,
        "slowdown": 1.0 / (1.0 - min(costs.slowdown_seconds / persist, 0.9)),
        "memory_stall": memory,
        "nbytes": int(costs.written_bytes),
    }
    ruled: dict[str, Callable[[Clock, EventSink], SnapshotTimer]] = {
        name: partial(rule, settings)
        if isinstance(rule, type)
        else partial(Ruled, max(costs.step_seconds, rule(costs, per_second)))
        for name, rule in rules.items()
    }
    same = partial(SimulatedJob, restart=restart, training=training, tiers=far)
    return {"ckpt-engine": same, **{name: partial(same, rhythm=rhythm) for name, rhythm in ruled.items()}}


def simulate(
    jobs: Mapping[str, Callable[..., SimulatedJob]],
    wanted: FailurePlan,
    days: float | None,
    shows: Callable[[Callable[[], str]], AbstractContextManager[None]],
) -> tuple[float, dict[str, SimulatedJob], list[str]]:
    """The days that were simulated, the policies for as long as that, and the names of those that need too long.

    Without `days` the first policy, ours, says how many: its work is bounded, and that of each of the others.

    Args:
        shows: in the block that it makes, the text of the function that it takes is what is simulated.
    """
    seconds, found, left = (days or DAYS) * DAY, dict[str, SimulatedJob](), list[str]()
    most = math.inf if days else float(MOST_OURS)
    for name, made in jobs.items():
        job = made(failures=wanted.make(), seconds=seconds, most=most)
        with shows(partial(_far, f"{name}, policy {1 + len(found) + len(left)} of {len(jobs)}", job)):
            job.run()
        if not found:
            seconds, most = job.seconds, math.inf if days else float(MOST_RULED)
        if job.seconds < seconds:
            left.append(name)
        else:
            found[name] = job
    return seconds / DAY, found, left


def _far(what: str, job: SimulatedJob) -> str:
    return (
        f"ckpt plan: simulating {job.seconds / DAY:.3g} days: {what} … "
        f"{units.share((job.clock.now - job.clock.BEGIN) / job.seconds)}"
    )


def planned_run(name: str, job: SimulatedJob, costs: Costs) -> PlannedRun:
    """What became of a simulated job."""
    lost = [seconds for _, seconds in job.lost]
    per_day = DAY / job.seconds * costs.written_bytes
    return PlannedRun(
        name=name,
        goodput=job.goodput,
        spread=spread(job.cycles),
        lost_seconds=sum(lost) / len(lost) if lost else None,
        worst_seconds=max(lost, default=None),
        overhead=(job.stalled + job.slowed) / job.seconds,
        interval_seconds=job.seconds / job.taken if job.taken else None,
        failures=len(lost),
        tiers=(per_day * job.written, *(per_day * tier.copied for tier in job.tiers)),
    )


def spread(cycles: Sequence[tuple[float, float]]) -> float | None:
    """The standard deviation of goodput, from how unlike the times between failures were; None: too few were.

    Args:
        cycles: when each failure was over, and what was useful until then.
    """
    if len(cycles) < 3:
        return None
    gains = [(now - time, done - useful) for (time, useful), (now, done) in pairwise(cycles)]
    time, useful = sum(each for each, _ in gains), sum(gain for _, gain in gains)
    return math.hypot(*(gain - useful / time * each for each, gain in gains)) / time
