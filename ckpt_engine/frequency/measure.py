"""Turns what happens at boundaries into costs.

No clock here: everything arrives as numbers of seconds. Step times and stalls have heavy tails (logging, evaluation, a
data loader that waits): one slow step is no evidence about snapshots, and every estimate here says what it does
with one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from ckpt_engine.frequency.policy import Costs

LATENCY_WINDOW = 4
CLEAN_WINDOW = 512
ENOUGH_STEPS = 5
SHIFT_WINDOW = 16
SHIFT = 0.25
STALE = 0.10
# What the baseline of the slowdown may be wrong by, as a share of the budget.
BASELINE_ERROR = 0.25
# Steps longer than so many upper quartiles of clean ones count as slow for a reason of their own.
SLOW_STEP = 2.0
# Of snapshots that meet a data stall at most so many are expected. A snapshot lasts until a given time, so that the
# steps next to it are fewer the longer they are: where steps are skewed the median of their surplus is above 0, and the
# mean is not (Wald 1944).
FEW = 0.1
_REMEMBERED = ("stall_seconds", "slowdown_seconds", "latency_seconds", "busy_seconds", "written_bytes")


class RobustBaseline:
    """The usual value of a series: an outlier moves nothing, a lasting change is followed with the third value.

    The mean of the values since the last change without the lowest and the highest. A change is lasting where the
    newest three values are all above what nine of ten before were, or the newest two below: accidents make it slower.

    Args:
        value: what is believed before anything was added.
        trim: the share of values that is left out at each end: up to so many may be anything. The more, the further it
            is from the mean of a skewed distribution.

    Attributes:
        value: what is believed now.
    """

    WINDOW = 128
    RISEN, FALLEN = 3, 2

    def __init__(self, value: float = 0.0, trim: float = 0.25) -> None:
        self.value, self._trim = value, trim
        self._values: deque[float] = deque(maxlen=self.WINDOW)
        self._error: float | None = 0.0
        self.count = 0

    def add(self, value: float, noise: float = 0.0) -> bool:
        """One more value; whether it makes a change a lasting one. A change of less than twice `noise` is none."""
        self.count += 1
        self._values.append(value)
        every = list(self._values)
        risen, fallen = every[-self.RISEN :], every[-self.FALLEN :]
        if min(every) == max(every):  # nothing has changed: the look at quantiles below costs more than all else
            self.value, self._error = value, 0.0
            return False
        if len(every) > self.RISEN and min(risen) > quantile(every[: -self.RISEN], 0.9) + 2.0 * noise:
            self._values = deque(risen, maxlen=self.WINDOW)
        elif len(every) > self.FALLEN and max(fallen) < quantile(every[: -self.FALLEN], 0.1) - 2.0 * noise:
            self._values = deque(fallen, maxlen=self.WINDOW)
        self.value, self._error = middle_mean(self._values, self._trim), None
        return len(self._values) < min(len(every), self.WINDOW)

    @property
    def kept(self) -> int:
        """How many values `value` is of."""
        return len(self._values)

    @property
    def error(self) -> float:
        """One standard deviation of `value`, from the quartiles of the values (of a normal distribution)."""
        if self._error is None:
            ordered = sorted(self._values)
            spread = (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / 1.35
            self._error = 1.1 * spread / math.sqrt(len(ordered))
        return self._error


@dataclass(eq=False)
class Outliers:
    """What rare large values add to the mean of a series whose usual value is known.

    One in the last `WINDOW` values is chance; from the second on their share is that of the mean which no robust
    estimate sees. Few values count as if there were `LEAST`, so that two early ones are not taken for the rule.
    """

    WINDOW = 200
    LARGE = 4.0
    ENOUGH = 2
    LEAST = 100
    _excess: deque[float] = field(default_factory=partial(deque, maxlen=WINDOW))

    def add(self, value: float, usual: float, *, changed: bool = False) -> None:
        """One more value; `changed`: the newest ones were no outliers but the beginning of what is usual now."""
        self._excess.append(value - usual if value > self.LARGE * usual else 0.0)
        if changed:
            for back in range(1, min(RobustBaseline.RISEN, len(self._excess)) + 1):
                self._excess[-back] = 0.0

    @property
    def mean(self) -> float:
        seen = len(self._excess) - self._excess.count(0.0)
        return sum(self._excess) / max(self.LEAST, len(self._excess)) if seen >= self.ENOUGH else 0.0


class Slowdown(NamedTuple):
    """How much longer the steps next to a snapshot were than as many clean ones.

    Args:
        seconds: signed; slow steps count up to the limit of `StepTimes` only.
        jitter_seconds: one standard deviation that the jitter of these steps gives `seconds`.
        baseline_seconds: one standard deviation that the clean step time, known from so many steps, gives it.
        slow: steps beyond that limit.
        slow_expected: how many of as many clean steps are.
        slow_seconds: signed; what they took beyond the limit, less what as many clean steps do on average.
    """

    seconds: float = 0.0
    jitter_seconds: float = 0.0
    baseline_seconds: float = 0.0
    slow: int = 0
    slow_expected: float = 0.0
    slow_seconds: float = 0.0


@dataclass(eq=False)
class SlowSteps:
    """Whether the steps next to snapshots are slow more often than others, and what that costs each snapshot.

    A t-test of the surplus of slow steps per snapshot, with at least the variance of a Poisson process: one snapshot
    that meets a data stall has many slow steps and proves nothing, one more slow step next to each of three does, where
    there are hardly any else. Where there are, as many as were seen must be improbable too: a run looks hundreds of
    times, and what it believes by mistake stays for as long as the next snapshots take.
    """

    WINDOW = 16
    LEAST = 3
    SIGNIFICANT = 3.0
    LEAST_VARIANCE = 0.1
    RARE = 1e-6
    _recent: deque[Slowdown] = field(default_factory=partial(deque, maxlen=WINDOW))
    seconds: float = 0.0
    """Per snapshot; 0.0 where chance explains what was seen."""

    def add(self, slowdown: Slowdown) -> None:
        self._recent.append(slowdown)
        self.seconds = self._believed()
        newest = list(self._recent)[-self.LEAST :]
        if self.seconds > 0.0 and all(one.slow <= one.slow_expected for one in newest):
            self._recent = deque(newest, maxlen=self.WINDOW)
            self.seconds = self._believed()

    def _believed(self) -> float:
        count = len(self._recent)
        if count < self.LEAST:
            return 0.0
        surplus = [one.slow - one.slow_expected for one in self._recent]
        mean = sum(surplus) / count
        if mean <= 0.0:
            return 0.0
        spread = sum((one - mean) ** 2 for one in surplus) / (count - 1)
        variance = max(spread, sum(one.slow_expected for one in self._recent) / count, self.LEAST_VARIANCE)
        if mean <= self.SIGNIFICANT * math.sqrt(variance / count) or not self._rare():
            return 0.0
        return max(0.0, middle_mean([one.slow_seconds for one in self._recent]))

    def _rare(self) -> bool:
        """Whether as many slow steps as were seen are improbable: the tail of a Poisson distribution."""
        seen, expected = sum(one.slow for one in self._recent), sum(one.slow_expected for one in self._recent)
        fewer = term = math.exp(-expected)
        for number in range(1, min(seen, 1000)):
            term *= expected / number
            fewer += term
        return 1.0 - fewer < self.RARE


class StepTimes:
    """Step times of the recent past, clean ones apart from those disturbed by a snapshot.

    `clean` is a plain deque so that the training thread can append to it directly at each step.

    CheckFreq's `Tx = sum(max(0, t_j - Ti))` (FAST 2021, section 4.3) is only right without jitter: with 10 % of it,
    steps that nothing slows down add 4 % of their time. The sum of signed differences against the *mean* clean step is
    the same number without jitter and unbiased with it; cut at `SLOW_STEP` upper quartiles (winsorised) on both sides,
    it stays so where one step in thirty takes fifteen times as long, at a small part of the noise.

    Args:
        prior: the clean step time an earlier run measured; used until this one has measured enough.
    """

    def __init__(self, prior: float | None = None) -> None:
        self.clean: deque[float] = deque(maxlen=CLEAN_WINDOW)
        self.prior = prior
        self._busy: deque[float] = deque(maxlen=SHIFT_WINDOW)
        self._disturbed: deque[float] = deque(maxlen=8 * CLEAN_WINDOW)
        self._disturbed_steps = 0
        self._summary = _Summary(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._summary_of: tuple[int, float] = (0, 0.0)
        self._shift_seen = self._summary_of

    def add_disturbed(self, seconds: float) -> None:
        """A step during which a snapshot was staged or persisted."""
        self._disturbed.append(seconds)
        self._disturbed_steps += 1
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

    @property
    def uneven(self) -> bool:
        """Whether some clean steps are slow for reasons of their own."""
        return len(self.clean) >= ENOUGH_STEPS and self._summarise().slow > 0.0

    def step_seconds(self) -> float:
        """The mean clean step time, of the newest steps after a shift; 0.0 while unknown.

        It converts seconds to steps, so that slow steps count in full. Disturbed steps that are clearly faster than the
        clean ones prove that the clean time is stale.
        """
        if len(self.clean) < ENOUGH_STEPS:
            clean = self.prior if self.prior is not None else median(self.clean or [0.0])
            noise, limit, excess = 0.0, math.inf, 0.0
        else:
            self._forget_before_shift()
            summary = self._summarise()
            clean, noise, limit, excess = summary.mean, summary.noise, summary.limit, summary.excess
        if len(self._busy) == SHIFT_WINDOW:
            disturbed = sum(_cut(list(self._busy), limit)) / SHIFT_WINDOW
            if clean - disturbed > max(STALE * clean, noise):
                return disturbed
        return clean + excess

    def take_slowdown(self) -> Slowdown:
        """The slowdown since the last call; none is known while the clean step time is unknown."""
        disturbed, steps = list(self._disturbed), self._disturbed_steps
        self._disturbed.clear()
        self._disturbed_steps = 0
        if steps == 0 or not self.known:
            return Slowdown()
        if len(self.clean) < ENOUGH_STEPS:
            mean = self.step_seconds()
            clean = _Summary(mean, 0.0, 0.0, SLOW_STEP * mean, 0.0, 0.0)
        else:
            clean = self._summarise()
        cut = sum(_cut(disturbed, clean.limit))
        each = steps / len(disturbed)
        return Slowdown(
            seconds=each * cut - steps * (clean.mean + clean.trend),
            jitter_seconds=clean.deviation * math.sqrt(steps),
            baseline_seconds=clean.deviation * steps / math.sqrt(max(1, len(self.clean))),
            slow=round(each * sum([seconds > clean.limit for seconds in disturbed])),
            slow_expected=steps * clean.slow,
            slow_seconds=each * (sum(disturbed) - cut) - steps * clean.excess,
        )

    def _summarise(self) -> _Summary:
        """Statistics of the clean steps, computed again only when there are new ones (the newest has changed)."""
        newest = (len(self.clean), self.clean[-1])
        if newest != self._summary_of:
            self._summary_of, self._summary = newest, _Summary.of(list(self.clean))
        return self._summary

    def _forget_before_shift(self) -> None:
        summary = self._summarise()
        if self._summary_of == self._shift_seen or len(self.clean) < 2 * SHIFT_WINDOW or summary.deviation == 0.0:
            return
        self._shift_seen = self._summary_of
        cut = _cut(list(self.clean), summary.limit)
        was, now = (sum(part) / len(part) for part in (cut[:-SHIFT_WINDOW], cut[-SHIFT_WINDOW:]))
        if abs(now - was) > max(SHIFT * was, summary.noise):
            newest = list(self.clean)[-SHIFT_WINDOW:]
            self.clean.clear()
            self.clean.extend(newest)


class _Summary(NamedTuple):
    """Clean steps.

    Args:
        mean, deviation: of the steps cut at `limit`.
        excess: what they take beyond the limit on average.
        slow: the share of them that do.
        trend: how much longer the newest are than the mean, where the steps get longer or shorter steadily.
    """

    mean: float
    deviation: float
    excess: float
    limit: float
    slow: float
    trend: float

    @classmethod
    def of(cls, values: list[float]) -> _Summary:
        if min(values) == max(values):
            return cls(values[0], 0.0, 0.0, SLOW_STEP * values[0], 0.0, 0.0)
        limit = SLOW_STEP * quantile(values, 0.75)
        cut = _cut(values, limit)
        mean = sum(cut) / len(cut)
        squares = sum([(value - mean) ** 2 for value in cut])
        deviation = math.sqrt(squares / max(1, len(cut) - 1))
        slow = sum(value > limit for value in values) / len(values)
        half = len(cut) // 2
        # The difference of the means of two halves has twice the deviation of the mean of all.
        trend = sum(cut[-half:]) / half - sum(cut[:half]) / half if half else 0.0
        if abs(trend) < 3.0 * 2.0 * deviation / math.sqrt(len(cut)):
            trend = 0.0
        return cls(mean, deviation, max(0.0, sum(values) / len(values) - mean), limit, slow, trend)

    @property
    def noise(self) -> float:
        """What the mean of `SHIFT_WINDOW` steps does not differ by in thousands of looks: 4.5 standard deviations."""
        return 4.5 * self.deviation / math.sqrt(SHIFT_WINDOW)


class CostMeter:
    """What one snapshot costs, from those so far; one that is unlike the others moves no estimate."""

    def __init__(self) -> None:
        self._stall, self._outliers = RobustBaseline(), Outliers()
        self._slowdown = RobustBaseline(trim=FEW)
        self._believed: deque[float] = deque([0.0], maxlen=RobustBaseline.RISEN)
        """Of slowdowns, after each of the newest snapshots."""
        self._slow = SlowSteps()
        self.slowdown_seconds = 0.0
        """What snapshots slow down the steps next to them, each."""
        self._jitter = self._noise = 0.0
        self._latencies: deque[float] = deque(maxlen=LATENCY_WINDOW)
        self._busy: deque[float] = deque(maxlen=LATENCY_WINDOW)
        self._written = 0.0

    @property
    def known(self) -> bool:
        """At least one snapshot was measured; what an earlier run had learned counts as one."""
        return self._stall.count > 0

    def _slows_down(self) -> float:
        """What `slowdown_seconds` is now.

        An estimate within the noise of step times is none, one far above it counts in full: the positive-part estimator
        of James and Stein (1961) at three times the variance, because what is believed is paid for.
        """
        usual, noise = self._slowdown.value, self.slowdown_error
        usual -= min(usual, 3.0 * noise * noise / usual) if usual > 0.0 else usual
        return usual + self._slow.seconds

    @property
    def slowdown_error(self) -> float:
        """One standard deviation of `slowdown_seconds`, from the jitter of steps."""
        jitter = 1.1 * self._jitter / math.sqrt(max(1, min(self._slowdown.count, RobustBaseline.WINDOW)))
        return math.hypot(max(jitter, self._slowdown.error), self._noise)

    @property
    def slowdown_of_all(self) -> tuple[float, float]:
        """Of all snapshots so far together, and its standard error: without the caution of `slowdown_seconds`."""
        each, count = max(0.0, self._slowdown.value) + self._slow.seconds, self._stall.count
        return count * each, count * self.slowdown_error

    def add_cost(self, stall_seconds: float, slowdown: Slowdown) -> float:
        """What one snapshot took from training, whether or not it became durable.

        Returns:
            Seconds of slowdown to charge for it; after a better estimate, those that earlier ones were charged too
            little, or too much (negative), are in it.
        """
        before, count = self.slowdown_seconds, self._slowdown.kept
        changed = self._stall.add(stall_seconds)
        self._outliers.add(stall_seconds, self._stall.value, changed=changed)
        replaced = self._slowdown.add(slowdown.seconds, slowdown.jitter_seconds)
        self._slow.add(slowdown)
        self._jitter, self._noise = slowdown.jitter_seconds, slowdown.baseline_seconds
        self.slowdown_seconds = now = self._slows_down()
        known = min(self._slowdown.kept - 1, count)
        charge = now + known * (now - before)
        if replaced and known < len(self._believed):  # earlier ones cost what was believed before the change began
            charge += (count - known) * (self._believed[-1 - known] - before)
        self._believed.append(now)
        return charge

    def add_durable(self, latency_seconds: float, busy_seconds: float, written_bytes: float) -> None:
        """One snapshot became durable."""
        self._latencies.append(latency_seconds)
        self._busy.append(busy_seconds)
        self._written = written_bytes

    def costs(self, step_seconds: float) -> Costs:
        """The estimates as the policy takes them."""
        return Costs(
            step_seconds=step_seconds,
            stall_seconds=self._stall.value + self._outliers.mean,
            slowdown_seconds=self.slowdown_seconds,
            latency_seconds=second_highest(self._latencies),
            busy_seconds=second_highest(self._busy),
            written_bytes=self._written,
            worst_latency_seconds=max(self._latencies, default=0.0),
        )

    def to_json(self) -> dict[str, float]:
        costs = self.costs(0.0)
        return {name: getattr(costs, name) for name in _REMEMBERED}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostMeter:
        """A meter that starts from what another one had learned, as if it were one measurement.

        Raises:
            ValueError: a number no measurement can be.
            KeyError, TypeError: not such a document at all.
        """
        stall, slowdown, latency, busy, written = (float(data[name]) for name in _REMEMBERED)
        if not all(0.0 <= value < math.inf for value in (stall, slowdown, latency, busy, written)):
            raise ValueError(f"not measured costs: {dict(data)!r}")
        meter = cls()
        meter.add_cost(stall, Slowdown(slowdown))
        meter.add_durable(latency, busy, written)
        return meter


def _cut(values: list[float], limit: float) -> list[float]:
    """The values, none above the limit."""
    return values if max(values) <= limit else [min(value, limit) for value in values]


def second_highest(values: Sequence[float] | deque[float]) -> float:
    """The second highest of the recent latencies, the only one, or 0.0 of none.

    It rises with the second slow persist and has fallen with the third fast one. Being too optimistic for once costs a
    postponed snapshot, never a stall.
    """
    return sorted(values)[-2:][0] if values else 0.0


def middle_mean(values: Sequence[float] | deque[float], trim: float = 0.25) -> float:
    """The mean without that share of the values at each end, one at least; of fewer than four the lower median."""
    ordered = sorted(values)
    count = len(ordered)
    if count < 4:
        return ordered[(count - 1) // 2]
    ends = max(1, int(trim * count))
    middle = ordered[ends : count - ends]
    return sum(middle) / len(middle)


def quantile(values: Sequence[float] | deque[float], share: float) -> float:
    """Linearly interpolated quantile of a non-empty collection."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def measured(seconds: float) -> float:
    """A measurement from outside; negative, NaN and infinite ones are none."""
    return seconds if 0.0 < seconds < math.inf else 0.0
