"""A rule for `ckpt plan --compare young_rule:interval`: the first order optimum of Young (1974)."""

from __future__ import annotations

import math

from ckpt_engine.frequency.policy import Costs


def interval(costs: Costs, failures_per_second: float) -> float:
    """Seconds between two snapshots."""
    return math.sqrt(2.0 * costs.cost_seconds / failures_per_second)
