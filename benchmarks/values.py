"""The values a benchmark produces: series of samples, checks against a target, and the result of one bar."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["at most", "at least"]


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one quantity.

    Args:
        name: what was measured.
        unit: of every sample, as it is shown.
        samples: in the order they were taken.
        note: what a reader must know to compare it with the others.
    """

    name: str
    unit: str
    samples: tuple[float, ...]
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def low(self) -> float:
        """Lower quartile (the smallest of fewer than four samples)."""
        return _quartiles(self.samples)[0]

    @property
    def high(self) -> float:
        """Upper quartile (the largest of fewer than four samples)."""
        return _quartiles(self.samples)[1]


@dataclass(frozen=True, slots=True)
class Check:
    """One target and the samples that are compared with it; the median counts.

    Args:
        what: the quantity, as the target names it.
        unit: of samples and limit; "x" for ratios.
        direction: whether the limit is an upper or a lower one.
        samples: of the quantity; paired where two things are compared.
    """

    what: str
    unit: str
    direction: Direction
    limit: float
    samples: tuple[float, ...]

    @property
    def series(self) -> Series:
        """The samples, for their median and spread."""
        return Series(self.what, self.unit, self.samples)

    @property
    def measured(self) -> float:
        """The median, which is compared with the limit."""
        return self.series.median

    @property
    def passed(self) -> bool:
        """Whether the median keeps the limit."""
        return self.measured <= self.limit if self.direction == "at most" else self.measured >= self.limit


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: what was measured beside what was published, cells as they are shown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure. `lines` has the points of each, by name."""

    title: str
    x: str
    y: str
    lines: Mapping[str, tuple[tuple[float, float], ...]]


@dataclass(frozen=True, slots=True)
class BarResult:
    """What one bar measured.

    Args:
        conditions: cache, fsync, sizes, threads and the like: whatever the numbers depend on.
        checks: the targets.
        series: everything else that was measured, references and peers included.
        notes: caveats in whole sentences.
        grids, plots: of a study.
    """

    name: str
    title: str
    conditions: Mapping[str, str]
    checks: tuple[Check, ...]
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()
    plots: tuple[Plot, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every target is kept."""
        return all(check.passed for check in self.checks)


def ratios(measured: Sequence[float], reference: Sequence[float]) -> tuple[float, ...]:
    """Round by round quotients of two interleaved series: what drifts during the run cancels out."""
    return tuple(a / b for a, b in zip(measured, reference, strict=True))


def to_json(result: BarResult) -> dict[str, Any]:
    """The result with its computed medians and verdicts, as JSON values."""
    data = dataclasses.asdict(result)
    data["passed"] = result.passed
    for check, row in zip(result.checks, data["checks"], strict=True):
        row.update(measured=check.measured, passed=check.passed)
    for series, row in zip(result.series, data["series"], strict=True):
        row.update(median=series.median, low=series.low, high=series.high)
    return data


def from_json(data: Mapping[str, Any]) -> BarResult:
    """The inverse of `to_json`; what was computed is computed again."""
    checks = tuple(Check(c["what"], c["unit"], c["direction"], c["limit"], tuple(c["samples"])) for c in data["checks"])
    series = tuple(Series(s["name"], s["unit"], tuple(s["samples"]), s["note"]) for s in data["series"])
    grids = tuple(
        Grid(g["title"], tuple(g["columns"]), tuple(tuple(row) for row in g["rows"])) for g in data.get("grids", ())
    )
    plots = tuple(
        Plot(p["title"], p["x"], p["y"], {name: tuple((x, y) for x, y in line) for name, line in p["lines"].items()})
        for p in data.get("plots", ())
    )
    notes = tuple(data["notes"])
    return BarResult(data["name"], data["title"], data["conditions"], checks, series, notes, grids, plots)


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    if len(samples) < 4:
        return min(samples), max(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high
