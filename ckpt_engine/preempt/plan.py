"""What of a run becomes durable before its time is over: a pure plan over measured speeds.

One writer writes snapshots to the nearest tier one after the other; each further tier copies them from there. So a
snapshot is durable when what is queued before it is written, it was taken, and its own bytes are written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ckpt_engine.observe.units import duration, size

MARGIN = 1.25
"""Writes may take so many times as long as the measured speed says before a plan is wrong."""


class Choice(StrEnum):
    """What is done with the time that is left."""

    SNAPSHOT = "snapshot"
    """Take a new one at the next boundary."""
    FLUSH = "flush"
    """Write the newest one that is held in memory."""
    FINISH = "finish"
    """Take no new one: let what is being written finish."""
    NOTHING = "nothing"
    """Nothing that is not durable already becomes so in time."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """A tier, as far as it is known.

    Args:
        bytes_per_second: measured, with all that committing costs; None: nothing was written there yet.
        newest_step: of the newest snapshot that is durable there.
        copying_step: of the snapshot on its way there; only of further tiers.
    """

    url: str
    bytes_per_second: float | None
    newest_step: int | None = None
    copying_step: int | None = None


@dataclass(frozen=True, slots=True)
class InFlight:
    """A snapshot that the writer has and the nearest tier does not have yet."""

    step: int
    left_bytes: float


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
        in_flight: oldest first.
        slots: snapshots that fit in host memory at once, those in flight included.
        held_step: of the newest snapshot that is held in memory and was not given to the writer.
    """

    step: int
    grace_seconds: float
    state_bytes: float
    tiers: tuple[TierFacts, ...]
    boundary_seconds: float = 0.0
    stall_seconds: float = 0.0
    in_flight: tuple[InFlight, ...] = ()
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

    choice: Choice
    step: int | None
    seconds: float
    lost_steps: int | None
    tiers: tuple[TierOutcome, ...]
    certain: bool
    why: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    choice: Choice
    step: int
    seconds: float


def plan_stop(facts: StopFacts) -> StopPlan:
    """Choose the newest snapshot that becomes durable on the nearest tier in time; of two, the sooner one.

    Where no speed of the nearest tier is known a new snapshot is tried. `seconds` never exceeds the grace then, unless
    the choice is `NOTHING` or not `certain`.
    """
    candidates = list(_candidates(facts))
    fitting = [one for one in candidates if one.seconds <= max(0.0, facts.grace_seconds)]
    best = max(fitting, key=lambda one: (one.step, -one.seconds), default=None)
    step, seconds = (best.step, best.seconds) if best is not None else (None, math.inf)
    choice = best.choice if best is not None else Choice.NOTHING
    plan = StopPlan(
        choice=choice,
        step=step,
        seconds=seconds,
        lost_steps=None if step is None else max(0, facts.step - step),
        tiers=tuple(_outcomes(facts, step, seconds)),
        certain=choice is Choice.NOTHING or bool(facts.tiers[0].bytes_per_second),
        why="",
    )
    return _explained(plan, facts, candidates)


def write_seconds(tier: TierFacts, nbytes: float) -> float:
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
    ends, end = [], 0.0
    for one in facts.in_flight:
        end += write_seconds(facts.tiers[0], one.left_bytes)
        ends.append(end)
    return ends


def _candidates(facts: StopFacts) -> Iterator[_Candidate]:
    queue = _queue(facts)
    near = facts.tiers[0]
    if near.newest_step is not None:
        yield _Candidate(Choice.NOTHING, near.newest_step, 0.0)
    for one, end in zip(facts.in_flight, queue, strict=True):
        yield _Candidate(Choice.FINISH, one.step, end)
    if facts.held_step is not None:
        end = (queue[-1] if queue else 0.0) + write_seconds(near, facts.state_bytes)
        yield _Candidate(Choice.FLUSH, facts.held_step, end)
    reached = facts.step + (1 if facts.boundary_seconds > 0.0 else 0)
    yield _Candidate(Choice.SNAPSHOT, reached, new_snapshot_seconds(facts))


def _outcomes(facts: StopFacts, step: int | None, seconds: float) -> Iterator[TierOutcome]:
    near, *further = facts.tiers
    yield TierOutcome(near.url, step, seconds)
    for tier in further:
        copy = write_seconds(tier, facts.state_bytes) if tier.bytes_per_second else math.inf
        has = TierOutcome(tier.url, tier.newest_step, 0.0 if tier.newest_step is not None else math.inf)
        if step is not None and (tier.newest_step is None or tier.newest_step < step):
            if seconds + copy <= facts.grace_seconds:
                has = TierOutcome(tier.url, step, seconds + copy)
            elif tier.copying_step is not None and copy <= facts.grace_seconds:
                has = TierOutcome(tier.url, tier.copying_step, copy)
        yield has


# ---------------------------------------------------------------------- in words


def _explained(plan: StopPlan, facts: StopFacts, candidates: Sequence[_Candidate]) -> StopPlan:
    parts = [f"{duration(max(0.0, facts.grace_seconds))} left: {_what(plan, facts)}"]
    newest = candidates[-1]
    if plan.choice is not Choice.SNAPSHOT and newest.step > (plan.step or -1) and newest.seconds < math.inf:
        parts.append(f"one of step {newest.step} would need {_sum(facts, newest.seconds)}")
    parts += [_said(tier, plan) for tier in plan.tiers[1:]]
    parts.append(_loss(plan))
    return dataclasses.replace(plan, why="; ".join(parts))


def _what(plan: StopPlan, facts: StopFacts) -> str:
    url = facts.tiers[0].url
    match plan.choice:
        case Choice.SNAPSHOT if not plan.certain:
            return f"a snapshot of step {plan.step} is tried on {url}, whose speed is not known yet"
        case Choice.SNAPSHOT:
            return f"a snapshot of step {plan.step} will be durable on {url} within {_sum(facts, plan.seconds)}"
        case Choice.FLUSH if not plan.certain:
            return f"the snapshot of step {plan.step} in memory is tried on {url}, whose speed is not known yet"
        case Choice.FLUSH:
            return (
                f"the snapshot of step {plan.step} in memory will be durable on {url} within {duration(plan.seconds)}"
            )
        case Choice.FINISH:
            return (
                f"the snapshot of step {plan.step} in flight will be durable on {url} within {duration(plan.seconds)}"
            )
        case _ if plan.step is not None:
            return f"the snapshot of step {plan.step} is durable on {url} already"
        case _:
            return f"nothing becomes durable on {url}"


def _sum(facts: StopFacts, seconds: float) -> str:
    """`6.8 s (0.1 s step + 0.2 s stall + 4 GB at 800 MB/s with a quarter to spare)`."""
    near = facts.tiers[0]
    queued = sum(one.left_bytes for one in facts.in_flight)
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
    if plan.lost_steps is None:
        return "all work is lost"
    if plan.lost_steps == 0:
        return "no step is lost"
    return f"{plan.lost_steps} step{'s are' if plan.lost_steps > 1 else ' is'} lost"
