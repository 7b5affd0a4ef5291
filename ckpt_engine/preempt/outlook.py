"""How a run stands for whoever may want to stop it: what would be lost, and how long a snapshot would take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_engine.observe.ledger import Standing
from ckpt_engine.preempt.plan import StopFacts, new_snapshot_seconds


@dataclass(frozen=True, slots=True)
class TierOutlook:
    """One tier; see `ledger.TierStanding`."""

    url: str
    newest_step: int | None
    age_seconds: float | None
    bytes_per_second: float | None
    away: bool


@dataclass(frozen=True, slots=True)
class Outlook:
    """A run at one moment.

    Args:
        step: of the last finished training step.
        durable_step: of the newest snapshot that is durable on the nearest tier; None: none is.
        age_of_last_durable_seconds: since that snapshot was taken; None: none is.
        work_at_risk_seconds: what `kill -9` now would cost: that age, or the time since training started.
        work_at_risk_steps: the same in steps; None: none is durable.
        seconds_to_durable: that a stop would need now, a whole step included; None: no speed was measured yet.
        snapshots_in_flight: taken, and not durable yet.
        stopping: who has asked the run to stop, if somebody has.
    """

    step: int
    durable_step: int | None
    age_of_last_durable_seconds: float | None
    work_at_risk_seconds: float
    work_at_risk_steps: int | None
    seconds_to_durable: float | None
    snapshots_in_flight: int
    stopping: str | None
    tiers: tuple[TierOutlook, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


def outlook(
    standing: Standing, facts: StopFacts, *, now: float, started: float, step_seconds: float, stopping: str | None
) -> Outlook:
    """The outlook at `now` (monotonic seconds) of a run that started at `started` and whose last step took so long."""
    near = standing.tiers[0]
    age = None if near.newest_instant is None else max(0.0, now - near.newest_instant)
    measured = near.bytes_per_second is not None
    return Outlook(
        step=facts.step,
        durable_step=near.newest_step,
        age_of_last_durable_seconds=age,
        work_at_risk_seconds=now - started if age is None else age,
        work_at_risk_steps=None if near.newest_step is None else max(0, facts.step - near.newest_step),
        seconds_to_durable=step_seconds + new_snapshot_seconds(facts) if measured else None,
        snapshots_in_flight=len(standing.in_flight),
        stopping=stopping,
        tiers=tuple(
            TierOutlook(
                tier.url,
                tier.newest_step,
                None if tier.newest_instant is None else max(0.0, now - tier.newest_instant),
                tier.bytes_per_second,
                tier.away,
            )
            for tier in standing.tiers
        ),
    )


_OF_RUN = (
    "step",
    "durable_step",
    "age_of_last_durable_seconds",
    "work_at_risk_seconds",
    "work_at_risk_steps",
    "seconds_to_durable",
    "snapshots_in_flight",
)
_OF_TIER = ("newest_step", "age_seconds", "bytes_per_second", "away")


def prometheus(found: Outlook, numbers: Mapping[str, float]) -> str:
    """Everything in Prometheus' text format (version 0.0.4): gauges named `ckpt_...`; what is not known is left out.

    Args:
        numbers: more of them, as loggers get them.
    """
    values = {name: getattr(found, name) for name in _OF_RUN} | {"stopping": found.stopping is not None}
    lines: list[str] = []
    for name, value in (dict(numbers) | values).items():
        lines += _gauge(f"ckpt_{name}", [("", value)])
    for name in _OF_TIER:
        rows = [(f'{{tier="{_escaped(tier.url)}"}}', getattr(tier, name)) for tier in found.tiers]
        lines += _gauge(f"ckpt_tier_{name}", rows)
    return "\n".join(lines) + "\n"


def _gauge(name: str, rows: list[tuple[str, float | None]]) -> Iterator[str]:
    known = [(labels, float(value)) for labels, value in rows if value is not None and math.isfinite(value)]
    if known:
        yield f"# TYPE {name} gauge"
        yield from (f"{name}{labels} {value:.17g}" for labels, value in known)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
