"""Turns what happens at boundaries into costs: clean step time, slowdown next to a snapshot, stall, latency.

No clock here: everything arrives as numbers of seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_engine.frequency.controller import Costs

EWMA_WEIGHT = 0.3
JITTER_WEIGHT = 0.05
LATENCY_WINDOW = 4
CLEAN_WINDOW = 512
ENOUGH_STEPS = 5
SHIFT_WINDOW = 16
SHIFT = 0.25
STALE = 0.10
# What the baseline of the slowdown may be wrong by, as a share of the budget.
BASELINE_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class Ewma:
    """An exponentially weighted mean that starts as a plain one, so that an untypical first value fades quickly."""

    value: float = 0.0
    count: int = 0

    def add(self, sample: float, weight: float = EWMA_WEIGHT) -> Ewma:
        count = self.count + 1
        return Ewma(self.value + max(weight, 1.0 / count) * (sample - self.value), count)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much longer the steps next to a snapshot were than as many clean ones.

    Args:
        seconds: signed; negative where they happened to be faster.
        jitter_seconds: one standard deviation that the jitter of these steps gives `seconds`.
        baseline_seconds: one standard deviation that the clean step time, known from so many steps, gives it.
    """

    seconds: float = 0.0
    jitter_seconds: float = 0.0
    baseline_seconds: float = 0.0


class StepTimes:
    """Step times of the recent past, clean ones apart from those disturbed by a snapshot.

    `clean` is a plain deque so that the training thread can append to it directly at each step.

    The paper's `Tx = sum(max(0, t_j - Ti))` is only right without jitter: with 10 % of it, steps that nothing slows
    down add 4 % of their time. The sum of signed differences against the *mean* clean step is the same number without
    jitter and unbiased with it. The interval itself is in terms of the median.

    Args:
        prior: the clean step time an earlier run measured; used until this one has measured enough.
    """

    __slots__ = ("_busy", "_busy_seconds", "_busy_steps", "_shift_seen", "_summary", "_summary_of", "clean", "prior")

    def __init__(self, prior: float | None = None) -> None:
        self.clean: deque[float] = deque(maxlen=CLEAN_WINDOW)
        self.prior = prior
        self._busy: deque[float] = deque(maxlen=SHIFT_WINDOW)
        self._busy_seconds = 0.0
        self._busy_steps = 0
        self._summary = _Summary(0.0, 0.0, 0.0)
        self._summary_of: tuple[int, float] = (0, 0.0)
        self._shift_seen = self._summary_of

    def add_disturbed(self, seconds: float) -> None:
        """A step during which a snapshot was staged or persisted."""
        self._busy_seconds += seconds
        self._busy_steps += 1
        self._busy.append(seconds)

    @property
    def known(self) -> bool:
        """Enough clean steps were measured, or an earlier run did."""
        return len(self.clean) >= ENOUGH_STEPS or self.prior is not None

    def enough_for(self, budget: float) -> bool:
        """Whether the clean steps tell a slowdown of a quarter of `budget` from their jitter, as far as any can."""
        if len(self.clean) in (0, CLEAN_WINDOW):
            return bool(self.clean)
        clean = self._summarise()
        return clean.deviation <= BASELINE_ERROR * budget * clean.mean * math.sqrt(len(self.clean))

    def step_seconds(self) -> float:
        """The clean step time: median of clean steps, of the newest ones after a shift; 0.0 while unknown.

        Disturbed steps that are clearly faster than the clean ones prove that the clean time is stale.
        """
        if len(self.clean) < ENOUGH_STEPS:
            clean, noise = self.prior if self.prior is not None else median(self.clean), 0.0
        else:
            self._forget_before_shift()
            summary = self._summarise()
            clean, noise = summary.median, summary.median_noise
        if len(self._busy) == SHIFT_WINDOW:
            disturbed = median(self._busy)
            if clean - disturbed > max(STALE * clean, noise):
                return disturbed
        return clean

    def take_slowdown(self) -> Slowdown:
        """The slowdown since the last call; none can be told while the clean step time is unknown."""
        total, steps = self._busy_seconds, self._busy_steps
        self._busy_seconds, self._busy_steps = 0.0, 0
        if steps == 0 or not self.known:
            return Slowdown()
        if len(self.clean) < ENOUGH_STEPS:
            return Slowdown(total - steps * self.step_seconds())
        clean = self._summarise()
        return Slowdown(
            seconds=total - steps * clean.mean,
            jitter_seconds=clean.deviation * math.sqrt(steps),
            baseline_seconds=clean.deviation * steps / math.sqrt(len(self.clean)),
        )

    def _summarise(self) -> _Summary:
        """Statistics of the clean steps, computed again only when there are new ones (the newest has changed)."""
        newest = (len(self.clean), self.clean[-1])
        if newest != self._summary_of:
            self._summary_of, self._summary = newest, _Summary.of(list(self.clean))
        return self._summary

    def _forget_before_shift(self) -> None:
        summary = self._summarise()
        if self._summary_of == self._shift_seen or len(self.clean) < 2 * SHIFT_WINDOW:
            return
        self._shift_seen = self._summary_of
        everything = list(self.clean)
        newest = everything[-SHIFT_WINDOW:]
        was, now = median(everything[:-SHIFT_WINDOW]), median(newest)
        if abs(now - was) > max(SHIFT * was, summary.median_noise):
            self.clean.clear()
            self.clean.extend(newest)


@dataclass(frozen=True, slots=True)
class _Summary:
    """Mean, standard deviation and median of clean steps."""

    mean: float
    deviation: float
    median: float

    @classmethod
    def of(cls, values: list[float]) -> _Summary:
        mean = sum(values) / len(values)
        squares = sum([(value - mean) ** 2 for value in values])
        return cls(mean, math.sqrt(squares / max(1, len(values) - 1)), median(values))

    @property
    def median_noise(self) -> float:
        """Three standard deviations of the median of `SHIFT_WINDOW` steps (1.25 times that of their mean)."""
        return 3.0 * 1.25 * self.deviation / math.sqrt(SHIFT_WINDOW)


class CostMeter:
    """Averages over snapshots: EWMA of stall and slowdown, high end of the recent latencies, last size."""

    __slots__ = ("_busy", "_latencies", "_noise", "_slowdown", "_stall", "_written")

    def __init__(self) -> None:
        self._stall = Ewma()
        self._slowdown = Ewma()
        self._noise = 0.0
        self._latencies: deque[float] = deque(maxlen=LATENCY_WINDOW)
        self._busy: deque[float] = deque(maxlen=LATENCY_WINDOW)
        self._written = 0.0

    @property
    def known(self) -> bool:
        """At least one snapshot was measured, now or by an earlier run."""
        return self._stall.count > 0

    def add_cost(self, stall_seconds: float, slowdown: Slowdown) -> None:
        """What one snapshot took from training, whether or not it became durable."""
        self._stall = self._stall.add(stall_seconds)
        # A change that jitter explains is averaged over many snapshots, any other follows at the usual pace.
        surprise = abs(slowdown.seconds - self._slowdown.value)
        weight = EWMA_WEIGHT if surprise > 2.0 * slowdown.jitter_seconds else JITTER_WEIGHT
        self._slowdown = self._slowdown.add(slowdown.seconds, weight)
        averaged = max(weight / (2.0 - weight), 1.0 / self._slowdown.count)
        self._noise = math.hypot(slowdown.jitter_seconds * math.sqrt(averaged), slowdown.baseline_seconds)

    def add_durable(self, latency_seconds: float, busy_seconds: float, written_bytes: float) -> None:
        """One snapshot became durable."""
        self._latencies.append(latency_seconds)
        self._busy.append(busy_seconds)
        self._written = written_bytes

    def costs(self, step_seconds: float) -> Costs:
        """The averages as the policy takes them. A slowdown within the noise of step times is none."""
        return Costs(
            step_seconds=step_seconds,
            stall_seconds=self._stall.value,
            slowdown_seconds=max(0.0, self._slowdown.value - self._noise),
            latency_seconds=high_end(self._latencies),
            busy_seconds=high_end(self._busy),
            written_bytes=self._written,
        )

    def to_json(self) -> dict[str, float]:
        costs = self.costs(0.0)
        return {
            "stall_seconds": costs.stall_seconds,
            "slowdown_seconds": costs.slowdown_seconds,
            "latency_seconds": costs.latency_seconds,
            "busy_seconds": costs.busy_seconds,
            "written_bytes": costs.written_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostMeter:
        """A meter that starts from what another one had learned, as if it were one measurement.

        Raises:
            ValueError: a number no measurement can be.
            KeyError, TypeError: not such a document at all.
        """
        stall, slowdown, latency, busy, written = (
            float(data[key])
            for key in ("stall_seconds", "slowdown_seconds", "latency_seconds", "busy_seconds", "written_bytes")
        )
        if not all(0.0 <= value < math.inf for value in (stall, slowdown, latency, busy, written)):
            raise ValueError(f"not measured costs: {dict(data)!r}")
        meter = cls()
        meter.add_cost(stall, Slowdown(slowdown))
        meter.add_durable(latency, busy, written)
        return meter


def high_end(values: Sequence[float] | deque[float]) -> float:
    """max(last, 95 % quantile) of the recent latencies; 0.0 of none.

    The window is 4, not the paper's 8: with 8 an interference that ends is still in the quantile eight snapshots
    later, which rules out the recovery within six that the paper's own scenario asks for. Being too optimistic for
    once costs a postponed snapshot, never a stall.
    """
    return max(values[-1], quantile(values, 0.95)) if values else 0.0


def quantile(values: Sequence[float] | deque[float], share: float) -> float:
    """Linearly interpolated quantile of a non-empty collection."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def median(values: Sequence[float] | deque[float]) -> float:
    """The median; 0.0 of nothing."""
    return quantile(values, 0.5) if values else 0.0
