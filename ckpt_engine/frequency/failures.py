"""How often a run fails, by class of failure.

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
from functools import cached_property, lru_cache
from itertools import pairwise, repeat
from operator import mul
from typing import Any, Self

from ckpt_engine.observe.events import MACHINE, PROCESS, SITE, UNKNOWN

CLASSES = (PROCESS, MACHINE, SITE)
SHARES: Mapping[str, float] = {PROCESS: 0.75, MACHINE: 0.2, SITE: 0.05}
"""Of all failures, until there is evidence: three of four need only a new process (DLRover's Flash Checkpoint)."""
_COUNTED = {kind: tuple(float(one == kind) for one in CLASSES) for kind in CLASSES} | {UNKNOWN: tuple(SHARES.values())}
JOB_SECONDS = 12 * 3600.0
RANK_SECONDS = 86400.0 * 8 / 6.5e-3
"""Between hardware failures of one rank: 6.5 in 1,000 days of a machine with eight of them."""
STATED_WEIGHT = 2.0
"""What an `mtbf` of the user weighs, in failures; an assumption weighs one."""
DOUBT = 0.5
"""That an assumption is wrong; of one that weighs as much as several failures, that many of them in a row."""
SCALE, SCALES = 4.0, 6
"""Then the truth is so many steps of this factor away at most, up or down, each as likely: 4,096 times."""
DISCOUNT, SHARES_DISCOUNT = 0.9, 0.98
SHARES_WEIGHT = 2.0
"""What the usual shares weigh, in failures."""
ENOUGH_EVENTS = 20
SIGNIFICANT = 6.635
"""The 99th percentile of chi-square with one degree of freedom: twice the log of a likelihood ratio (Wilks 1938)."""
LEAST_SECONDS = 30.0
"""Half of what a heartbeat leaves unknown of an attempt's length."""
MOST_FACTOR = 4.0
_LEAST_SHAPE, _MOST_SHAPE, _NEWTON_STEPS = 0.05, 20.0, 40
Failures = Iterator[tuple[float, str]]
"""Seconds from the failure before, or the start, to the next one, and its class."""


def assumed_mtbf(ranks: int = 1) -> float:
    """Seconds between failures of a job of so many ranks that nothing is known of."""
    return 1.0 / (1.0 / JOB_SECONDS + ranks / RANK_SECONDS)


@dataclass(frozen=True, slots=True)
class FailureBelief:
    """The rate of all failures ~ a mixture of Gammas, the shares of the classes ~ Dirichlet.

    The cost of an interval is linear in the rates, so the posterior means are the Bayes-optimal values to plan with.
    At each failure all older evidence of the rate loses a tenth of its weight: a regime that has changed is believed
    after a few. What share each class has changes less: evidence of that loses a fiftieth, or the rate of a class that
    is rare would be known from two failures.

    What is assumed may be wrong by orders of magnitude, and a Gamma alone does not give way then: its tail is too
    thin. So it is contaminated (Berger and Berliner 1986): with a probability of `DOUBT` the truth is of another scale.
    Each scale predicts what was seen, and counts by how well it did. Of three lives of 15 s, where half a day was
    assumed, a single Gamma makes 3 h, this one 15 s; and of a new run it says what is true of new runs, that many die
    soon, and fewer the older they get.

    Args:
        process, machine, site: usual shares plus observed failures of each class, discounted (concentrations).
        exposure_seconds, events: observed running time and failures, discounted.
        assumed_seconds: between failures, before anything was observed.
        weight: what that weighs, in failures.
    """

    process: float
    machine: float
    site: float
    exposure_seconds: float
    events: float
    assumed_seconds: float
    weight: float

    @classmethod
    def prior(cls, mtbf_seconds: float, weight: float = 1.0) -> Self:
        """A belief in `mtbf_seconds` and the usual `SHARES` that weighs as much as `weight` observed failures."""
        process, machine, site = (SHARES_WEIGHT * SHARES[one] for one in CLASSES)
        return cls(process, machine, site, 0.0, 0.0, mtbf_seconds, weight)

    @property
    def rates(self) -> Mapping[str, float]:
        """Failures per second of each class: posterior means."""
        each = self.per_second / sum(self._counts.values())
        return {one: each * count for one, count in self._counts.items()}

    @property
    def per_second(self) -> float:
        """Failures of all classes per second."""
        return sum(share * rate for share, rate in self._scales())

    @property
    def mtbf_seconds(self) -> float:
        """Between failures of whatever class."""
        return 1.0 / self.per_second

    @property
    def typical_seconds(self) -> float:
        """The same as a geometric mean: of a usual job, where `mtbf_seconds` is that of few which fail at once."""
        return math.exp(-sum(share * math.log(rate) for share, rate in self._scales()))

    def _scales(self) -> list[tuple[float, float]]:
        """How likely each scale is by now, and failures per second if it is true."""
        exposure, known = self.exposure_seconds, self.weight + self.events
        scales = [(log, seconds + exposure) for log, seconds in _scales_before(self.assumed_seconds, self.weight)]
        logs = [log - known * math.log(seconds) for log, seconds in scales]
        most = max(logs)
        shares = [math.exp(log - most) for log in logs]
        total = sum(shares)
        return [(share / total, known / seconds) for share, (_, seconds) in zip(shares, scales, strict=True)]

    def survived(self, seconds: float) -> FailureBelief:
        """The belief after `seconds` of running (negative or not finite: no evidence)."""
        return self.after((seconds,), ("",))

    def failed(self, kind: str) -> FailureBelief:
        """The belief after one failure; if its class is not known it counts for each by the usual share."""
        return self.after((0.0,), (kind,))

    def after(self, lasted: Sequence[float], failures: Sequence[str]) -> FailureBelief:
        """The belief after attempts that lasted so long, each ended by a failure of that class ("": by none)."""
        exposure, events, (process, machine, site) = self.exposure_seconds, self.events, self._counts.values()
        for seconds, kind in zip(lasted, failures, strict=True):
            if 0.0 < seconds < math.inf:
                exposure += seconds
            if kind != "":
                exposure, events = DISCOUNT * exposure, DISCOUNT * events + 1.0
                more = _COUNTED.get(kind, _COUNTED[UNKNOWN])
                was = process, machine, site
                process, machine, site = (SHARES_DISCOUNT * old + new for old, new in zip(was, more, strict=True))
        return FailureBelief(process, machine, site, exposure, events, self.assumed_seconds, self.weight)

    @property
    def _counts(self) -> Mapping[str, float]:
        return {PROCESS: self.process, MACHINE: self.machine, SITE: self.site}

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FailureBelief:
        """The inverse of `to_json`.

        Raises:
            ValueError, ZeroDivisionError: numbers that no sequence of observations can produce.
            KeyError, TypeError: not such a document at all.
        """
        process, machine, site = classes = [float(data[key]) for key in CLASSES]
        exposure = float(data["exposure_seconds"])
        events = float(data.get("events", sum(classes)))
        if "weight" in data:
            assumed, weight = float(data["assumed_seconds"]), float(data["weight"])
        else:  # before 0057 what was assumed was part of what was observed
            assumed, weight, exposure, events = exposure / events, events, 0.0, 0.0
        positive = all(0.0 < value < math.inf for value in (*classes, assumed, weight))
        if not (positive and 0.0 <= exposure < math.inf and 0.0 <= events < math.inf):
            raise ValueError(f"not a belief about failures: {dict(data)!r}")
        return cls(process, machine, site, exposure, events, assumed, weight)


@lru_cache
def _scales_before(assumed_seconds: float, weight: float) -> list[tuple[float, float]]:
    """Of each scale: the logarithm of its density where nothing was observed, but for what all have in common, and
    the seconds of observation that the assumption is worth there."""
    doubt = DOUBT**weight
    steps = range(-SCALES, SCALES + 1)
    shares = [doubt / len(steps) + (1.0 - doubt if step == 0 else 0.0) for step in steps]
    worth = [weight * assumed_seconds * SCALE**step for step in steps]
    likely = [(share, seconds) for share, seconds in zip(shares, worth, strict=True) if share > 0.0]
    return [(math.log(share) + weight * math.log(seconds), seconds) for share, seconds in likely]


@dataclass(frozen=True, slots=True)
class WeibullFit:
    """Times between failures as a Weibull distribution.

    Args:
        shape: below 1 the rate falls with the time since the last failure, above 1 it rises.
        evidence: twice the logarithm of the likelihood ratio against a constant rate.
    """

    shape: float
    evidence: float


def fit_weibull(lasted: Sequence[float], failed: Sequence[bool]) -> WeibullFit:
    """The distribution that makes these times most likely; one that no failure has ended was at least so long.

    Source: Cohen, "Maximum likelihood estimation in the Weibull distribution based on complete and on censored
    samples", Technometrics 1965; solved by Newton's method in the logarithm of the shape.

    Args:
        lasted: seconds; not finite ones count as `LEAST_SECONDS`, as shorter ones do.
        failed: at least one is true.
    """
    logs = [math.log(max(LEAST_SECONDS, one if math.isfinite(one) else 0.0)) for one in lasted]
    level = max(logs)
    below = [log - level for log in logs]
    count = sum(failed)
    mean = sum([log for log, one in zip(below, failed, strict=True) if one]) / count

    def weights_of(shape: float) -> list[float]:
        return list(map(math.exp, map(shape.__mul__, below)))

    def likelihood(shape: float) -> float:
        return count * (math.log(shape * count / sum(weights_of(shape))) + (shape - 1.0) * mean)

    shape, squares = 1.0, list(map(mul, below, below))
    for _ in range(_NEWTON_STEPS):
        weights = weights_of(shape)
        total = sum(weights)
        first = sum(map(mul, weights, below)) / total
        spread = sum(map(mul, weights, squares)) / total - first * first
        change = (1.0 + shape * (mean - first)) / (1.0 + shape * shape * spread)
        shape = max(_LEAST_SHAPE, min(shape * math.exp(change), _MOST_SHAPE))
        if abs(change) < 1e-5:  # squared, that is what the next one would be
            break
    return WeibullFit(shape, 2.0 * (likelihood(shape) - likelihood(1.0)))


def believed_shape(lasted: Sequence[float], failures: Sequence[str]) -> float:
    """The shape of the times between failures (as of `FailureBelief.after`); 1.0, a constant rate, if not proven.

    Lazy checkpointing (Tiwari et al., DSN 2014) needs a shape. One of too few failures is worse than none: of 20 the
    standard error is 0.17, so that as many are needed, and a likelihood ratio that chance gives once in a hundred.
    """
    failed = [kind != "" for kind in failures]
    if sum(failed) < ENOUGH_EVENTS:
        return 1.0
    fit = fit_weibull(lasted, failed)
    return fit.shape if fit.evidence > SIGNIFICANT else 1.0


def hazard_factor(shape: float, seconds: float, mtbf_seconds: float) -> float:
    """By what the rate of failures so long after the last one differs from its mean: the hazard of a Weibull
    distribution with that mean by its rate, within `MOST_FACTOR` and its inverse."""
    scale = mtbf_seconds / math.gamma(1.0 + 1.0 / shape)
    factor: float = shape * (max(seconds, LEAST_SECONDS) / scale) ** (shape - 1.0) * mtbf_seconds / scale
    return max(1.0 / MOST_FACTOR, min(factor, MOST_FACTOR))


def prior_of(stated_mtbf: float | None, ranks: int = 1) -> FailureBelief:
    """Where the belief about a job of so many ranks begins: with the seconds that the user has said, or (None) with
    what is assumed."""
    if stated_mtbf is None:
        return FailureBelief.prior(assumed_mtbf(ranks))
    return FailureBelief.prior(stated_mtbf, STATED_WEIGHT)


@dataclass(frozen=True)
class Evidence:
    """What is known of earlier attempts of a run, and what follows from it.

    Args:
        prior: what was believed before there was any.
        lasted, failures: of those that the nearest tier knows, as of `FailureBelief.after`.
        remembered: what the snapshot that training resumes from knew, which counts where that tier knows of none.
        before: what was believed before the first one that it knows, where another one was lost.
        began: when the attempt under way did, on the clock whose times the methods get.
    """

    prior: FailureBelief
    lasted: tuple[float, ...] = ()
    failures: tuple[str, ...] = ()
    remembered: FailureBelief | None = None
    before: FailureBelief | None = None
    began: float = 0.0

    @property
    def base(self) -> FailureBelief | None:
        """What was believed before the first attempt that the nearest tier knows; None: the prior."""
        return self.before if self.lasted else self.remembered

    @cached_property
    def _belief(self) -> FailureBelief:
        return (self.base or self.prior).after(self.lasted, self.failures)

    @cached_property
    def _shape(self) -> float:
        return believed_shape(self.lasted, self.failures)

    def at(self, now: float) -> FailureBelief:
        """The belief where the attempt under way has lasted until now."""
        return self._belief.survived(now - self.began)

    def rates(self, now: float) -> Mapping[str, float]:
        """Failures per second of each class from now on."""
        belief = self.at(now)
        rates = belief.rates
        if self._shape == 1.0:
            return rates
        factor = hazard_factor(self._shape, now - self.began, belief.mtbf_seconds)
        return {one: factor * rate for one, rate in rates.items()}


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
    for (before, _), (at, kind) in pairwise([(0.0, ""), *trace]):
        yield at - before, kind
    yield from repeat((math.inf, PROCESS))
