"""Decides what of a run becomes durable before its time is over.

One writer writes snapshots to the nearest tier one after the other; each further tier copies them from there. So a
snapshot is durable when what is queued before it is written, it was taken, and its own bytes are written. `plan_stop`
chooses by that; `outlook` is how the run stands, for others to see.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ckpt_engine.observe.durability import DurabilityStatus, PendingCommit, TierStanding
from ckpt_engine.observe.units import count, duration, size

MARGIN = 1.25
"""Writes may take so many times as long as the measured speed says before a plan is wrong."""


class StopChoice(StrEnum):
    """What is done with the time that is left."""

    SNAPSHOT = "snapshot"
    """Take a new one at the next boundary."""
    FLUSH = "flush"
    """Write the newest one that is in memory."""
    FINISH = "finish"
    """Take no new one: let what is being written finish."""
    NOTHING = "nothing"
    """Nothing that is not durable already becomes so in time."""


@dataclass(frozen=True, slots=True)
class StopFacts:
    """A run that must stop.

    Args:
        step: of the last finished training step.
        grace_seconds: that are left.
        state_bytes: of one snapshot.
        tiers: nearest first, at least one.
        boundary_seconds: until the step that is running ends; 0 at a boundary, infinite where it ends too late.
        stall_seconds: that taking a snapshot lasts.
        in_flight: what the writer has and the nearest tier does not have yet, oldest first; `nbytes` are left.
        slots: snapshots that fit in host memory at once, those in flight included.
        held_step: of the newest snapshot that is in memory and was not given to the writer.
    """

    step: int
    grace_seconds: float
    state_bytes: float
    tiers: tuple[TierStanding, ...]
    boundary_seconds: float = 0.0
    stall_seconds: float = 0.0
    in_flight: tuple[PendingCommit, ...] = ()
    slots: int = 2
    held_step: int | None = None


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """What a tier has when the time is over: a snapshot of `step` (None: none at all), `seconds` from now."""

    url: str
    step: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class StopPlan:
    """The best that fits.

    Args:
        choice: what to do.
        step: of the newest snapshot that is durable in the end; None: none is.
        seconds: until then; infinite where nothing ever is.
        lost_steps: finished steps, the running one not counted, that a restart repeats; None: all.
        tiers: what each has in the end, nearest first.
        certain: all speeds that the choice depends on are measured.
        why: the arithmetic in one line, for the log.
    """

    choice: StopChoice
    step: int | None
    seconds: float
    lost_steps: int | None
    tiers: tuple[TierOutcome, ...]
    certain: bool
    why: str


def plan_stop(facts: StopFacts) -> StopPlan:
    """Choose the newest snapshot that becomes durable on the nearest tier in time; of two, the sooner one.

    Where no speed of the nearest tier is known a new snapshot is tried. `seconds` never exceeds the grace then, unless
    the choice is `NOTHING` or not `certain`.
    """
    candidates = list(_candidates(facts))
    nothing: tuple[StopChoice, int | None, float] = (StopChoice.NOTHING, None, math.inf)
    fitting = [one for one in candidates if one[2] <= max(0.0, facts.grace_seconds)]
    choice, step, seconds = max(fitting, key=lambda one: (one[1], -one[2]), default=nothing)
    plan = StopPlan(
        choice=choice,
        step=step,
        seconds=seconds,
        lost_steps=None if step is None else max(0, facts.step - step),
        tiers=tuple(_outcomes(facts, step, seconds)),
        certain=choice is StopChoice.NOTHING or bool(facts.tiers[0].bytes_per_second),
        why="",
    )
    return _explained(plan, facts, candidates[-1])


def write_seconds(tier: TierStanding, nbytes: float) -> float:
    """How long `nbytes` take to become durable on `tier`, with the margin; 0 where its speed is not known."""
    return MARGIN * nbytes / tier.bytes_per_second if tier.bytes_per_second else 0.0


def new_snapshot_seconds(facts: StopFacts) -> float:
    """How long a snapshot of the step that runs, or of the last one at a boundary, takes to become durable."""
    queue = _queue(facts)
    waits_for = len(queue) - facts.slots
    slot_seconds = queue[waits_for] if waits_for >= 0 else 0.0
    taken = max(facts.boundary_seconds, slot_seconds) + facts.stall_seconds
    return max(taken, queue[-1] if queue else 0.0) + write_seconds(facts.tiers[0], facts.state_bytes)


def _queue(facts: StopFacts) -> list[float]:
    """When each snapshot in flight is durable, seconds from now."""
    return list(itertools.accumulate(write_seconds(facts.tiers[0], one.nbytes) for one in facts.in_flight))


def _candidates(facts: StopFacts) -> Iterator[tuple[StopChoice, int, float]]:
    """What may be done, the step of what is durable then, and the seconds until it is; a new snapshot comes last."""
    queue = _queue(facts)
    near = facts.tiers[0]
    if near.newest_step is not None:
        yield StopChoice.NOTHING, near.newest_step, 0.0
    for one, end in zip(facts.in_flight, queue, strict=True):
        yield StopChoice.FINISH, one.step, end
    if facts.held_step is not None:
        end = (queue[-1] if queue else 0.0) + write_seconds(near, facts.state_bytes)
        yield StopChoice.FLUSH, facts.held_step, end
    reached = facts.step + (1 if facts.boundary_seconds > 0.0 else 0)
    yield StopChoice.SNAPSHOT, reached, new_snapshot_seconds(facts)


def _outcomes(facts: StopFacts, step: int | None, seconds: float) -> Iterator[TierOutcome]:
    near, *further = facts.tiers
    yield TierOutcome(near.url, step, seconds)
    for tier in further:
        copy = write_seconds(tier, facts.state_bytes) if tier.bytes_per_second else math.inf
        has = TierOutcome(tier.url, tier.newest_step, 0.0 if tier.newest_step is not None else math.inf)
        is_newer = step is not None and (tier.newest_step is None or tier.newest_step < step)
        if is_newer and seconds + copy <= facts.grace_seconds:
            has = TierOutcome(tier.url, step, seconds + copy)
        yield has


def _explained(plan: StopPlan, facts: StopFacts, newest: tuple[StopChoice, int, float]) -> StopPlan:
    parts = [f"{duration(max(0.0, facts.grace_seconds))} left: {_what(plan, facts)}"]
    _, step, seconds = newest
    if plan.choice is not StopChoice.SNAPSHOT and step > (plan.step or -1) and seconds < math.inf:
        parts.append(f"one of step {step} would need {_sum(facts, seconds)}")
    parts += [_said(tier, plan) for tier in plan.tiers[1:]]
    parts.append(_loss(plan))
    return dataclasses.replace(plan, why="; ".join(parts))


def _what(plan: StopPlan, facts: StopFacts) -> str:
    url = facts.tiers[0].url
    if plan.choice is StopChoice.NOTHING:
        what = "nothing becomes" if plan.step is None else f"the snapshot of step {plan.step} is"
        return f"{what} durable on {url}{'' if plan.step is None else ' already'}"
    which = {
        StopChoice.SNAPSHOT: f"a snapshot of step {plan.step}",
        StopChoice.FLUSH: f"the snapshot of step {plan.step} in memory",
        StopChoice.FINISH: f"the snapshot of step {plan.step} in flight",
    }[plan.choice]
    if not plan.certain:
        return f"{which} is tried on {url}, whose speed is not known yet"
    seconds = _sum(facts, plan.seconds) if plan.choice is StopChoice.SNAPSHOT else duration(plan.seconds)
    return f"{which} will be durable on {url} within {seconds}"


def _sum(facts: StopFacts, seconds: float) -> str:
    """`6.8 s (100 ms step + 200 ms stall + 4 GB at 800 MB/s with a quarter to spare)`."""
    near = facts.tiers[0]
    queued = sum(one.nbytes for one in facts.in_flight)
    terms = [
        f"{duration(facts.boundary_seconds)} to the end of the step" if facts.boundary_seconds > 0.0 else "",
        f"{duration(facts.stall_seconds)} stall" if facts.stall_seconds > 0.0 else "",
        f"{size(queued)} in flight" if queued else "",
        f"{size(facts.state_bytes)} at {size(near.bytes_per_second)}/s" if near.bytes_per_second else "",
    ]
    shown = " + ".join(term for term in terms if term)
    return f"{duration(seconds)} ({shown}, a quarter to spare)" if shown else duration(seconds)


def _said(tier: TierOutcome, plan: StopPlan) -> str:
    if tier.step is None:
        return f"{tier.url} gets nothing in time"
    if tier.step == plan.step:
        return f"on {tier.url} in {duration(tier.seconds)}" if tier.seconds > 0.0 else f"on {tier.url} already"
    return f"{tier.url} ends with step {tier.step}"


def _loss(plan: StopPlan) -> str:
    lost = plan.lost_steps
    what = "all work" if lost is None else "no step" if lost == 0 else count(lost, "step")
    return f"{what} {'are' if (lost or 0) > 1 else 'is'} lost"


def outlook(
    standing: DurabilityStatus,
    facts: StopFacts,
    *,
    now: float,
    started: float,
    step_seconds: float,
    stopping: str | None,
) -> dict[str, Any]:
    """A run at `now` (monotonic seconds) that started at `started` and whose last step took so long, as JSON values.

    Returns:
        step: of the last finished training step.
        durable_step: of the newest snapshot that is durable; None: none is.
        age_of_last_durable_seconds: since that snapshot was taken; None: none is.
        work_at_risk_seconds: what `kill -9` now would cost: that age, or the time since training started.
        work_at_risk_steps: the same in steps; None: none is durable.
        seconds_to_durable: that a stop would need now, a whole step included; None: no speed was measured yet.
        snapshots_in_flight: taken, and not durable yet.
        stopping: who has asked the run to stop, if somebody has.
        tiers: rows of what each has; see `durability.TierStanding`.
    """
    near, safe = standing.tiers[0], standing.safest
    age = None if safe.newest_instant is None else max(0.0, now - safe.newest_instant)
    measured = near.bytes_per_second is not None
    return {
        "step": facts.step,
        "durable_step": safe.newest_step,
        "age_of_last_durable_seconds": age,
        "work_at_risk_seconds": now - started if age is None else age,
        "work_at_risk_steps": None if safe.newest_step is None else max(0, facts.step - safe.newest_step),
        "seconds_to_durable": step_seconds + new_snapshot_seconds(facts) if measured else None,
        "snapshots_in_flight": len(standing.in_flight),
        "stopping": stopping,
        "tiers": [
            {
                "url": tier.url,
                "newest_step": tier.newest_step,
                "age_seconds": None if tier.newest_instant is None else max(0.0, now - tier.newest_instant),
                "bytes_per_second": tier.bytes_per_second,
                "away": tier.away,
            }
            for tier in standing.tiers
        ],
    }
