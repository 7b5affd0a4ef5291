"""How a run stands that may have to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ckpt_engine.observe.durability import DurabilityStatus, Ledger
from ckpt_engine.observe.units import count, duration
from ckpt_engine.preempt.loop_steps import LoopSteps
from ckpt_engine.preempt.memory_flush import MemoryFlush
from ckpt_engine.preempt.stop_plan import StopFacts, StopPlan, new_snapshot_seconds, outlook, plan_stop
from ckpt_engine.preempt.stop_requests import Stop, StopNotice


@dataclass(eq=False)
class RunOutlook:
    """What is durable of a run, and what a stop would save and lose. Any thread.

    Args:
        ledger: what is durable and how fast the tiers are.
        now: the source of moments.
        slots: snapshots that fit in host memory at once.
        steps: of the loop.
        flush: of what is only in memory.
        divided: whether nodes have roots of their own, as far as that is known.
    """

    ledger: Ledger
    now: Callable[[], float]
    slots: int
    steps: LoopSteps
    flush: MemoryFlush
    divided: Callable[[], bool]

    def facts(self, stop: Stop, boundary_seconds: float) -> StopFacts:
        """What a plan for this stop follows from, if the running step ends in so many seconds; 0: at a boundary."""
        now, standing = self.now(), self.ledger.standing
        in_flight = [
            replace(one, nbytes=n) for one, n in zip(standing.in_flight, standing.left_bytes(now), strict=True)
        ]
        asked = self.flush.asked
        if asked is not None and self.flush.is_pending:
            left = DurabilityStatus(standing.tiers, (asked,), busy_since=asked.since).left_bytes(now)[0]
            in_flight.append(replace(asked, nbytes=left))
        return StopFacts(
            step=self.steps.last,
            grace_seconds=stop.deadline - now,
            state_bytes=standing.state_bytes,
            tiers=standing.tiers,
            boundary_seconds=boundary_seconds,
            stall_seconds=standing.stall_seconds,
            in_flight=tuple(in_flight),
            slots=self.slots,
            held_step=standing.held_step if asked is None or asked.step != standing.held_step else None,
        )

    def plan(self, stop: Stop, *, ahead: bool = False) -> StopPlan:
        """What to do about `stop` at a boundary: now, or after one more step that lasts as long as the last one."""
        return plan_stop(self.facts(stop, self.steps.took if ahead else 0.0))

    def until_late(self, stop: Stop) -> float:
        """Seconds until a snapshot at the end of the running step would not become durable in time.

        With one that waits in memory a little less, so that it still fits; half of the grace where no speed is known.
        """
        facts = self.facts(stop, 0.0)
        needed = new_snapshot_seconds(facts)
        if facts.held_step is not None:
            known = facts.tiers[0].bytes_per_second is not None
            needed = needed + self.flush.spare_seconds if known else (stop.deadline - stop.notice.instant) / 2.0
        return facts.grace_seconds - needed

    def durable(self) -> str:
        """What is durable, and what that leaves out, for people."""
        standing = self.ledger.standing
        near = standing.safest
        if near.newest_step is None:
            return f"no snapshot is durable on {near.url}"
        where = " and ".join(tier.url for tier in standing.tiers if tier.newest_step == near.newest_step)
        lost = self.steps.last - near.newest_step
        behind = "" if lost <= 0 else f", {lost} step{'s' if lost > 1 else ''} behind"
        part = " (the part of this node)" if self.divided() else ""
        return f"step {near.newest_step:,} is durable on {where}{part}{behind}"

    def summary(self, overhead: str, resumed: tuple[int, str] | None, skipped: int) -> str:
        """What the run has done, for people, when it is over.

        Args:
            overhead: what snapshots cost, as a text.
            resumed: the step of the snapshot from which it has gone on, and where that was.
            skipped: how many snapshots were due and not taken, as earlier ones were still being written.
        """
        if self.steps.first is None:  # its trainer has found before the first step that it is complete
            return "nothing was left to train" + (f"; step {resumed[0]} is durable on {resumed[1]}" if resumed else "")
        standing = self.ledger.standing
        if not standing.committed and not standing.failed:
            nothing = self.steps.last == self.steps.first
            what = "nothing was left to train" if nothing else "no snapshot was taken"
            return f"{what}; {self.durable()}"
        busy = f"{skipped:,} skipped because earlier ones were still being written, " if skipped else ""
        many = f"{count(standing.committed, 'snapshot')}, {busy}{standing.failed} failed"
        stall = f"longest stall {duration(standing.longest_stall_seconds)}"
        return f"{many}; {overhead}; {stall}; {self.durable()}"

    def to_json(self, stop: Stop | None) -> dict[str, Any]:
        """How the run stands now, with the stop that is wanted, see `stop_plan.outlook`."""
        now = self.now()
        facts = self.facts(Stop(StopNotice("", now), now) if stop is None else stop, 0.0)
        return outlook(
            self.ledger.standing,
            facts,
            now=now,
            started=self.steps.started,
            step_seconds=self.steps.took,
            stopping=None if stop is None else stop.notice.who,
        )
