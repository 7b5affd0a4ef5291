"""Turns what happens at boundaries into costs.

No clock here: everything arrives as numbers of seconds. Step times and stalls have heavy tails (logging, evaluation, a
data loader that waits): one slow step is no evidence about snapshots, and every estimate here says what it does
with one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from ckpt_engine.frequency.policy import Costs
from ckpt_engine.observe.run_times import believed

LATENCY_WINDOW = 4
CLEAN_WINDOW = 512
WARM_UP_STEPS = 2
ENOUGH_STEPS = 5
SHIFT_WINDOW = 16
SHIFT = 0.25
STALE = 0.10
BASELINE_ERROR = 0.25
"""What the baseline of the slowdown may be wrong by, as a share of the budget."""
SLOW_STEP = 4.0
"""Steps longer than so many upper quartiles of clean ones count as slow for a reason of their own, and shorter than
that part of a lower quartile as quick for one."""
TICK_SECONDS = 1e-9
NEAR = 3.0
"""Clean steps after a snapshot count for so many times the time of those next to it: few enough to be of the same
epoch, and enough that their jitter adds little to that of the others."""
DOUBT = 1.5
"""So many errors count as one of a slowdown that decides how often: a run looks hundreds of times."""
RECOVERY_STEPS = 2
"""Steps that begin within the time of so many after a snapshot may be longer because of it."""
_REMEMBERED = ("stall_seconds", "slowdown_seconds", "latency_seconds", "busy_seconds", "written_bytes")


class RobustBaseline:
    """The usual value of a series: an outlier moves nothing, a lasting change is followed with the third value.

    The mean of the middle half of the values since the last change. A change is lasting where the newest three values
    are all above what nine of ten before were, or the newest two below: accidents make it slower.

    Args:
        value: what is believed before anything was added.

    Attributes:
        value: what is believed now.
    """

    WINDOW = 128
    RISEN, FALLEN = 3, 2

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self._values: deque[float] = deque(maxlen=self.WINDOW)
        self.count = 0

    def add(self, value: float, noise: float = 0.0) -> bool:
        """One more value; whether it makes a change a lasting one. A change of less than twice `noise` is none."""
        self.count += 1
        self._values.append(value)
        every = list(self._values)
        risen, fallen = every[-self.RISEN :], every[-self.FALLEN :]
        if min(every) == max(every):  # nothing has changed: the look at quantiles below costs more than all else
            self.value = value
            return False
        if len(every) > self.RISEN and min(risen) > quantile(every[: -self.RISEN], 0.9) + 2.0 * noise:
            self._values = deque(risen, maxlen=self.WINDOW)
        elif len(every) > self.FALLEN and max(fallen) < quantile(every[: -self.FALLEN], 0.1) - 2.0 * noise:
            self._values = deque(fallen, maxlen=self.WINDOW)
        self.value = middle_mean(self._values)
        return len(self._values) < min(len(every), self.WINDOW)

    @property
    def kept(self) -> int:
        """How many values `value` is of."""
        return len(self._values)


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
    """What the steps next to snapshots were, beside clean ones. Everything is a sum: those of two snapshots add up.

    Args:
        growth: of the logarithms of their times over the usual one; slow steps count up to the limit of `StepTimes`.
        number: of these steps.
        steps: of them, those whose time is not cut; one during part of which a snapshot was on its way is that part.
        clean_growth, clean: as `growth` and `number`, of clean steps right before these, and after those before.
        variance: of `growth`, from the jitter of steps.
        squares: of `growth` over that of clean steps.
        snapshots: so many.
        seconds: that snapshots were on their way while training went on.
        slow: steps beyond that limit.
        slow_expected: how many of as many clean steps are.
        slow_seconds: signed; what they took beyond the limit, less what as many clean steps do on average.
    """

    growth: float = 0.0
    number: float = 0.0
    steps: float = 0.0
    clean_growth: float = 0.0
    clean: float = 0.0
    variance: float = 0.0
    squares: float = 0.0
    snapshots: float = 0.0
    seconds: float = 0.0
    slow: float = 0.0
    slow_expected: float = 0.0
    slow_seconds: float = 0.0

    @classmethod
    def of_all(cls, several: Iterable[Slowdown]) -> Slowdown:
        """The sum."""
        return cls(*map(sum, zip(*several, strict=True)))

    @property
    def surplus(self) -> float:
        """`growth` over that of as many clean steps."""
        return self.growth - self.number * self.clean_growth / max(1.0, self.clean)

    @property
    def factor(self) -> float:
        """The logarithm of the factor by which steps were longer while a snapshot was on its way."""
        return self.surplus / self.steps if self.steps > 0.0 else 0.0

    @property
    def factor_error(self) -> float:
        """One standard deviation of `factor`: that of both kinds of steps, or of snapshots, which epochs are in too."""
        jitter = self.variance * (1.0 + self.number / max(1.0, self.clean))
        spread = self.squares - self.surplus**2 / max(1, self.snapshots)
        return math.sqrt(max(jitter, spread)) / self.steps if self.steps > 0.0 else 0.0

    @property
    def share(self) -> float:
        """The part of `seconds` that training has lost, as estimated: signed."""
        return -math.expm1(-self.factor)


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
        spread = sum((one - mean) ** 2 for one in surplus) / (count - 1)
        variance = max(spread, sum(one.slow_expected for one in self._recent) / count, self.LEAST_VARIANCE)
        if mean <= self.SIGNIFICANT * math.sqrt(variance / count) or not self._rare():
            return 0.0
        return max(0.0, middle_mean([one.slow_seconds for one in self._recent]))

    def _rare(self) -> bool:
        """Whether as many slow steps as were seen are improbable: the tail of a Poisson distribution."""
        seen, expected = sum(one.slow for one in self._recent), sum(one.slow_expected for one in self._recent)
        fewer = term = math.exp(-expected)
        for number in range(1, int(min(seen, 1000.0))):
            term *= expected / number
            fewer += term
        return 1.0 - fewer < self.RARE


class StepTimes:
    """Step times of the recent past, clean ones apart from those disturbed by a snapshot.

    `add_clean` is the method of a plain deque most of the time, so that a step costs little.

    CheckFreq's `Tx = sum(max(0, t_j - Ti))` (FAST 2021, section 4.3) is only right without jitter, and signed
    differences of sums say little where steps have heavy tails: one long step is more than all slowdown. A slowdown
    is a factor, so that the mean *logarithm* of disturbed steps is compared with that of clean ones, cut in both tails.
    A snapshot lasts until a given time, so that the steps next to it are fewer the longer they are: sums over several
    snapshots have no bias from that (Wald 1944), the ratio of each one has. Clean steps count right
    after it, for a given time as well: both kinds begin where a step ends and end with the first one beyond a time, so
    that neither has more long steps, and in slow and quick phases as many of both kinds are met. Those before it end
    with a long step, which is why the interval was over.

    The first steps after a snapshot was written may be longer too, while caches are cold. They count for it where that
    is believed of those so far, and as clean else. They are those of a time too. What a step takes itself must not
    decide whether it counts: in an epoch of slow steps, all would be a cost.

    Args:
        prior: the clean step time an earlier run measured; used until this one has measured enough.
        warm_up: so many steps are not measured.

    Attributes:
        add_clean: takes the time of a step during which there was no snapshot.
    """

    def __init__(self, prior: float | None = None, warm_up: int = 0) -> None:
        self.clean: deque[float] = deque(maxlen=CLEAN_WINDOW)
        self.prior, self._warm_up = prior, warm_up
        self.add_clean: Callable[[float], None] = self._add_warm_up if warm_up else self.clean.append
        self._disturbed_steps = 0
        self._busy, self._disturbed = deque[float](maxlen=SHIFT_WINDOW), deque[float](maxlen=8 * CLEAN_WINDOW)
        self._summary = self._after_of = _Summary.of([0.0])
        self._summary_of = self._shift_seen = (0, 0.0)
        self._after, self._after_seconds = list[float](), 0.0
        self._recoveries = deque[float](maxlen=RobustBaseline.WINDOW)

    def add_disturbed(self, seconds: float) -> None:
        """A step during which a snapshot was staged or persisted."""
        self._disturbed.append(seconds)
        self._disturbed_steps += 1
        self._busy.append(seconds)

    def _add_warm_up(self, _seconds: float) -> None:
        """Drops the first steps: compilation, cold caches and autotuning are not what a step takes."""
        self._warm_up -= 1
        if self._warm_up <= 0:
            self.add_clean = self.clean.append

    def _add_after(self, seconds: float) -> None:
        """A clean step soon after a snapshot."""
        self.clean.append(seconds)
        self._after.append(seconds)
        self._after_seconds -= seconds
        if self._after_seconds <= 0.0 or len(self._after) == 8 * CLEAN_WINDOW:
            self.add_clean = self.clean.append

    @property
    def known(self) -> bool:
        """Enough clean steps were measured, or an earlier run did."""
        return len(self.clean) >= ENOUGH_STEPS or self.prior is not None

    def enough_for(self, budget: float) -> bool:
        """Whether the clean steps tell a slowdown of a quarter of `budget` from their jitter, as far as any can."""
        if len(self.clean) in (0, CLEAN_WINDOW):
            return bool(self.clean)
        return self._summarise().deviation <= BASELINE_ERROR * budget * math.sqrt(len(self.clean))

    @property
    def uneven(self) -> bool:
        """Whether some clean steps are slow or quick for reasons of their own."""
        return len(self.clean) >= ENOUGH_STEPS and self._summarise().inside(self.clean) < 1.0

    def step_seconds(self) -> float:
        """The mean clean step time, of the newest steps after a shift; 0.0 while unknown.

        It converts seconds to steps, so that slow steps count in full. Disturbed steps that are clearly faster than the
        clean ones prove that the clean time is stale.
        """
        self._forget_before_shift()
        clean = self._summarise()
        if len(self._busy) == SHIFT_WINDOW:
            disturbed = fmean(clean.logs(self._busy))
            if clean.log - disturbed > max(STALE, clean.noise):
                return fmean(self._busy)
        return clean.mean

    def take_slowdown(self, late_seconds: float = 0.0) -> Slowdown:
        """The slowdown since the last call; none is known while the clean step time is unknown.

        The first steps after the snapshot before this one are in it, if they count.

        Args:
            late_seconds: of the newest step, after no snapshot was on its way any more.
        """
        if self._disturbed_steps == 0:
            return Slowdown()
        logs, so_far = self._after_of.logs(self._after), self._recoveries
        early = bisect_left(list(accumulate(self._after)), RECOVERY_STEPS * self._after_of.mean) + 1
        counts = len(so_far) > 1 and believed(fmean(so_far), stdev(so_far) / math.sqrt(len(so_far))) > 0.0
        if len(logs) > early:
            so_far.append(sum(logs[:early]) - early * fmean(logs[early:]))
        early = early if counts else 0
        disturbed, after = [*self._after[:early], *self._disturbed], logs[early:]
        steps = self._disturbed_steps + len(disturbed) - len(self._disturbed)
        self._disturbed.clear()
        self._disturbed_steps = 0
        each, last = steps / len(disturbed), disturbed[-1]
        late_seconds = min(late_seconds, last)
        seconds = each * sum(disturbed) - late_seconds
        if not self.known:
            return Slowdown(seconds=seconds)
        clean = self._summarise()
        self._after, self._after_of, self._after_seconds = [], clean, NEAR * (seconds + late_seconds)
        several = len(after) or NEAR * steps
        self.add_clean = self._add_after
        found = Slowdown(
            growth=each * sum(clean.logs(disturbed)),
            number=steps,
            steps=(steps - (late_seconds / last if last > 0.0 else 0.0)) * clean.inside(disturbed),
            clean_growth=sum(after) if after else several * clean.log,
            clean=several,
            variance=steps * clean.deviation**2,
            seconds=seconds,
            slow=round(each * sum([seconds > clean.high for seconds in disturbed])),
            slow_expected=steps * clean.slow,
            slow_seconds=each * clean.beyond(disturbed) - steps * clean.excess,
        )
        return found._replace(squares=found.surplus**2, snapshots=1.0)

    def _summarise(self) -> _Summary:
        """Statistics of the clean steps, computed again only when there are new ones (the newest has changed)."""
        few = len(self.clean) < ENOUGH_STEPS
        values = [median(self.clean or [0.0]) if self.prior is None else self.prior] if few else list(self.clean)
        newest = (len(self.clean), values[-1])
        if newest != self._summary_of:
            self._summary_of, self._summary = newest, _Summary.of(values)
        return self._summary

    def _forget_before_shift(self) -> None:
        summary = self._summarise()
        if self._summary_of == self._shift_seen or len(self.clean) < 2 * SHIFT_WINDOW or summary.deviation == 0.0:
            return
        self._shift_seen = self._summary_of
        logs = summary.logs(self.clean)
        if abs(fmean(logs[-SHIFT_WINDOW:]) - fmean(logs[:-SHIFT_WINDOW])) > max(SHIFT, summary.noise):
            newest = list(self.clean)[-SHIFT_WINDOW:]
            self.clean.clear()
            self.clean.extend(newest)


class _Summary(NamedTuple):
    """Clean steps.

    Args:
        mean: of the steps.
        low, high: what their logarithms are cut at.
        log, deviation: of the logarithms.
        excess: what steps take beyond `high` on average.
        slow: the share of them that do.
    """

    mean: float
    low: float
    high: float
    log: float
    deviation: float = 0.0
    excess: float = 0.0
    slow: float = 0.0

    @classmethod
    def of(cls, values: list[float]) -> _Summary:
        low = max(quantile(values, 0.25) / SLOW_STEP, TICK_SECONDS)
        high = max(SLOW_STEP * quantile(values, 0.75), low)
        if min(values) == max(values):
            return cls(values[0], low, high, math.log(max(values[0], low)))
        made = cls(fmean(values), low, high, 0.0)
        logs = made.logs(values)
        slow = sum([value > high for value in values]) / len(values)
        return cls(made.mean, low, high, fmean(logs), stdev(logs), made.beyond(values) / len(values), slow)

    def inside(self, values: Sequence[float] | deque[float]) -> float:
        """The share of them that is not cut."""
        return sum([self.low <= value <= self.high for value in values]) / len(values)

    def logs(self, values: Iterable[float]) -> list[float]:
        """Their logarithms, none below that of `low` or above that of `high`."""
        return [math.log(min(max(value, self.low), self.high)) for value in values]

    def beyond(self, values: Iterable[float]) -> float:
        """What they take beyond `high` together."""
        return sum([value - self.high for value in values if value > self.high])

    @property
    def noise(self) -> float:
        """What the mean of `SHIFT_WINDOW` steps does not differ by in thousands of looks: 4.5 standard deviations."""
        return 4.5 * self.deviation / math.sqrt(SHIFT_WINDOW)


class CostMeter:
    """What one snapshot costs, from those so far; one that is unlike the others moves no estimate."""

    def __init__(self) -> None:
        self._stall, self._outliers = RobustBaseline(), Outliers()
        self._factors, self._active = RobustBaseline(), RobustBaseline()
        self._recent: deque[Slowdown] = deque(maxlen=RobustBaseline.WINDOW)
        self._all, self._slow = Slowdown(), SlowSteps()
        self._slow_seconds = self._written = 0.0
        self.slowdown_seconds = 0.0
        """What snapshots slow down the steps next to them, each, of late."""
        self._latencies, self._busy = deque[float](maxlen=LATENCY_WINDOW), deque[float](maxlen=LATENCY_WINDOW)

    @property
    def known(self) -> bool:
        """At least one snapshot was measured; what an earlier run had learned counts as one."""
        return self._stall.count > 0

    @property
    def _late(self) -> Slowdown:
        """That of the newest snapshots, since the last lasting change."""
        return Slowdown.of_all(list(self._recent)[-max(1, self._factors.kept) :])

    @property
    def slowdown_of_all(self) -> tuple[float, float]:
        """Seconds by which all snapshots so far have made steps longer together, and the standard error of that."""
        longer = self._all.share * max(0.0, self._all.seconds - self._slow_seconds)
        return self._slow_seconds + longer, self._all.seconds * self._all.factor_error

    def add_cost(self, stall_seconds: float, slowdown: Slowdown) -> float:
        """What one snapshot took from training, whether or not it became durable.

        Returns:
            Seconds of slowdown to charge for it; by a better estimate earlier ones have cost more, or less (negative).
        """
        before = believed(*self.slowdown_of_all)
        changed = self._stall.add(stall_seconds)
        self._outliers.add(stall_seconds, self._stall.value, changed=changed)
        self._recent.append(slowdown)
        self._all = Slowdown.of_all((self._all, slowdown))
        if slowdown.steps > 0.0:
            self._factors.add(slowdown.factor, slowdown.factor_error)
        self._active.add(slowdown.seconds)
        self._slow.add(slowdown)
        slow = self._slow.seconds
        self._slow_seconds += slow
        late = self._late
        active = max(0.0, self._active.value - slow)
        self.slowdown_seconds = slow + believed(active * late.share, DOUBT * active * late.factor_error)
        return believed(*self.slowdown_of_all) - before

    def add_durable(self, latency_seconds: float, busy_seconds: float, written_bytes: float) -> None:
        """One snapshot became durable."""
        self._latencies.append(latency_seconds)
        self._busy.append(busy_seconds)
        self._written = written_bytes

    def costs(self, step_seconds: float, hook_share: float = 0.0) -> Costs:
        """The estimates as the policy takes them."""
        return Costs(
            step_seconds=step_seconds,
            stall_seconds=self._stall.value + self._outliers.mean,
            slowdown_seconds=self.slowdown_seconds,
            latency_seconds=second_highest(self._latencies),
            busy_seconds=second_highest(self._busy),
            written_bytes=self._written,
            worst_latency_seconds=max(self._latencies, default=0.0),
            hook_share=round(hook_share, 4),
        )

    def to_json(self) -> dict[str, float]:
        costs = self.costs(0.0)
        return {name: getattr(costs, name) for name in _REMEMBERED} | {"evidence": list(self._late)}

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
        evidence = Slowdown(*map(float, data.get("evidence", ())))
        meter._stall.add(stall)
        meter._recent.append(evidence)
        meter._factors.add(evidence.factor, evidence.factor_error)
        meter._active.add(evidence.seconds / max(1.0, evidence.snapshots))
        meter.slowdown_seconds = slowdown
        meter.add_durable(latency, busy, written)
        return meter


def second_highest(values: Sequence[float] | deque[float]) -> float:
    """The second highest of the recent latencies, the only one, or 0.0 of none.

    It rises with the second slow persist and has fallen with the third fast one. Being too optimistic for once costs a
    postponed snapshot, never a stall.
    """
    return sorted(values)[-2:][0] if values else 0.0


def middle_mean(values: Sequence[float] | deque[float]) -> float:
    """The mean of the middle half of the values; of fewer than four the lower median."""
    ordered = sorted(values)
    count = len(ordered)
    if count < 4:
        return ordered[(count - 1) // 2]
    ends = count // 4
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
