"""How often a run fails, by class of failure: a Gamma belief that time without failures lowers and failures raise.

The classes say what a failure takes with it (`events.PROCESS`, `MACHINE`, `SITE`), which decides what kind of snapshot
is of use after it. A belief is a value, and everything here is a pure function of values.

What is assumed of a run that nothing is known of: failures of the job itself (Ctrl-C, errors, preemption) once in
`JOB_SECONDS`, and those of hardware in proportion to the number of ranks. Together they are what Meta measured on 1,024
GPUs (7.9 h between failures) and projects for 16,384 (1.8 h) and 131,072 (0.23 h): Kokolis et al., HPCA 2025.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from ckpt_engine.observe.events import MACHINE, PROCESS, SITE

CLASSES = (PROCESS, MACHINE, SITE)
SHARES: Mapping[str, float] = {PROCESS: 0.75, MACHINE: 0.2, SITE: 0.05}
"""Of all failures, until there is evidence: three of four need only a new process (DLRover's Flash Checkpoint)."""
JOB_SECONDS = 12 * 3600.0
RANK_SECONDS = 86400.0 * 8 / 6.5e-3
"""Between hardware failures of one rank: 6.5 in 1,000 days of a machine with eight of them."""
STATED_WEIGHT = 2.0
"""What an `mtbf` of the user weighs, in failures; an assumption weighs one."""
DISCOUNT = 0.9


def assumed_mtbf(ranks: int = 1) -> float:
    """Seconds between failures of a job of so many ranks that nothing is known of."""
    return 1.0 / (1.0 / JOB_SECONDS + ranks / RANK_SECONDS)


@dataclass(frozen=True, slots=True)
class FailureBelief:
    """The rate of each class ~ Gamma(its events, `exposure_seconds`), independent of the others.

    The cost of an interval is linear in the rates, so the posterior means are the Bayes-optimal values to plan with.
    At each failure all older evidence loses a tenth of its weight: a regime that has changed is believed after a few.

    Args:
        process, machine, site: prior plus observed failures of each class, discounted (shape).
        exposure_seconds: prior plus observed running time, discounted (inverse scale).
    """

    process: float
    machine: float
    site: float
    exposure_seconds: float

    @classmethod
    def prior(cls, mtbf_seconds: float, weight: float = 1.0) -> Self:
        """A belief in `mtbf_seconds` and the usual `SHARES` that weighs as much as `weight` observed failures."""
        return cls(weight * SHARES[PROCESS], weight * SHARES[MACHINE], weight * SHARES[SITE], weight * mtbf_seconds)

    @property
    def rates(self) -> Mapping[str, float]:
        """Failures per second of each class: posterior means."""
        return {one: events / self.exposure_seconds for one, events in self._events.items()}

    @property
    def per_second(self) -> float:
        """Failures of all classes per second."""
        return sum(self.rates.values())

    @property
    def mtbf_seconds(self) -> float:
        """Between failures of whatever class."""
        return 1.0 / self.per_second

    def survived(self, seconds: float) -> FailureBelief:
        """The belief after `seconds` of running (negative or not finite: no evidence)."""
        if not (math.isfinite(seconds) and seconds > 0.0):
            return self
        return FailureBelief(self.process, self.machine, self.site, self.exposure_seconds + seconds)

    def failed(self, kind: str) -> FailureBelief:
        """The belief after one failure; if its class is not known it counts for each by the usual share."""
        new = {kind: 1.0} if kind in CLASSES else SHARES
        process, machine, site = (DISCOUNT * was + new.get(one, 0.0) for one, was in self._events.items())
        return FailureBelief(process, machine, site, DISCOUNT * self.exposure_seconds)

    def after(self, lasted: Sequence[float], failures: Sequence[str]) -> FailureBelief:
        """The belief after attempts that lasted so long, each ended by a failure of that class ("": by none)."""
        belief = self
        for seconds, kind in zip(lasted, failures, strict=True):
            belief = belief.survived(seconds)
            belief = belief if kind == "" else belief.failed(kind)
        return belief

    @property
    def _events(self) -> Mapping[str, float]:
        return {PROCESS: self.process, MACHINE: self.machine, SITE: self.site}

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FailureBelief:
        """The inverse of `to_json`.

        Raises:
            ValueError: numbers that no sequence of observations can produce.
            KeyError, TypeError: not such a document at all.
        """
        values = [float(data[key]) for key in (*CLASSES, "exposure_seconds")]
        if not all(0.0 < value < math.inf for value in values):
            raise ValueError(f"not a belief about failures: {dict(data)!r}")
        return cls(*values)


Failures = Iterator[tuple[float, str]]
"""Seconds from the failure before, or the start, to the next one, and its class."""


def poisson(mtbf_seconds: float, rng: random.Random, shares: Mapping[str, float] = SHARES) -> Failures:
    """Failures at a constant rate, each of a class by its share."""
    yield from weibull(1.0, mtbf_seconds, rng, shares)


def weibull(shape: float, scale_seconds: float, rng: random.Random, shares: Mapping[str, float] = SHARES) -> Failures:
    """Failures whose rate changes with the time since the last one; a shape below 1: they come in bursts."""
    kinds, weights = list(shares), list(shares.values())
    while True:
        yield rng.weibullvariate(scale_seconds, shape), rng.choices(kinds, weights)[0]


def observed(trace: Sequence[tuple[float, str]]) -> Failures:
    """Failures that have happened: seconds since the start, rising, and class; after the last one there are none."""
    before = 0.0
    for at, kind in trace:
        yield at - before, kind
        before = at
    while True:
        yield math.inf, PROCESS
