"""How often this run fails: a Gamma-Poisson posterior that survives the failures it counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

DEFAULT_MTBF_SECONDS = 12 * 3600.0
DISCOUNT = 0.9


@dataclass(frozen=True, slots=True)
class FailureRate:
    """λ ~ Gamma(`events`, `exposure_seconds`), updated by time survived and failures seen.

    The cost of an interval is linear in λ, so the posterior mean is the Bayes-optimal value to plan with. Being wrong
    by ten times in the prior costs less than 0.003 of goodput in simulation.

    Args:
        events: prior plus observed failures, discounted (shape).
        exposure_seconds: prior plus observed running time, discounted (inverse scale).
        discount: factor on both at each failure, so that old times count less; 1 never forgets.
    """

    events: float = 1.0
    exposure_seconds: float = DEFAULT_MTBF_SECONDS
    discount: float = DISCOUNT

    @classmethod
    def prior(
        cls, mtbf_seconds: float = DEFAULT_MTBF_SECONDS, *, weight: float = 1.0, discount: float = DISCOUNT
    ) -> FailureRate:
        """A belief in `mtbf_seconds` that weighs as much as `weight` observed failures."""
        return cls(weight, weight * mtbf_seconds, discount)

    @property
    def per_second(self) -> float:
        """Posterior mean of λ."""
        return self.events / self.exposure_seconds

    @property
    def mtbf_seconds(self) -> float:
        """1/λ at the posterior mean."""
        return self.exposure_seconds / self.events

    def survived(self, seconds: float) -> FailureRate:
        """The belief after `seconds` of running (negative or not finite: no evidence)."""
        if not (math.isfinite(seconds) and seconds > 0.0):
            return self
        return replace(self, exposure_seconds=self.exposure_seconds + seconds)

    def failed(self) -> FailureRate:
        """The belief after one failure; older evidence is discounted first."""
        return replace(
            self,
            events=self.events * self.discount + 1.0,
            exposure_seconds=self.exposure_seconds * self.discount,
        )

    def to_json(self) -> dict[str, float]:
        return {"events": self.events, "exposure_seconds": self.exposure_seconds, "discount": self.discount}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FailureRate:
        """The inverse of `to_json`.

        Raises:
            ValueError: numbers that no sequence of observations can produce.
            KeyError, TypeError: not such a document at all.
        """
        events, exposure, discount = (float(data[key]) for key in ("events", "exposure_seconds", "discount"))
        if not (0.0 < events < math.inf and 0.0 < exposure < math.inf and 0.0 < discount <= 1.0):
            raise ValueError(f"not a failure rate: {dict(data)!r}")
        return cls(events, exposure, discount)
