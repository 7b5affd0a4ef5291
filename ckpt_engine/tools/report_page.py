"""The page `report.html` of a run's report.

It has plots as SVG, and tables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckpt_engine.errors import CkptError, visible
from ckpt_engine.grouping import grouped
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.tools.recorded_attempts import MEANINGS
from ckpt_engine.tools.run_report import Life, RunReport, SnapshotMark

_ROUND_SECONDS = (
    *(unit * many for unit in (1.0, 60.0) for many in (1, 2, 5, 10, 20, 30)),
    *(3600.0 * many for many in (1, 2, 5, 12)),
    *(86400.0 * many * power for power in (1, 10, 100) for many in (1, 2, 5)),
)
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960.0, 300.0, 70.0, 34.0, 12.0
_TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True, slots=True)
class Axis:
    """Where a value is on a plot.

    Args:
        low, high: the values at its ends.
        start, stop: where its ends are, in pixels.
        least: between two ticks.
        is_time: the values are seconds.
    """

    low: float
    high: float
    start: float
    stop: float
    is_time: bool = False
    least: float = 1.0

    def at(self, value: float) -> float:
        """The pixel of a value, to a tenth."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.stop - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Pixels and texts of round values."""
        least = (self.high - self.low) / (8.0 if self.is_time else 5.0)
        power = 10.0 ** math.floor(math.log10(max(least, self.least)))
        rounds = _ROUND_SECONDS if self.is_time else [power * many for many in (1, 2, 5, 10)]
        step = next((one for one in rounds if one >= least), least)
        values = [step * number for number in range(math.ceil(self.low / step), int(self.high / step) + 1)]
        # One unit for all, so that distances can be read.
        unit, name = next(one for one in _UNITS if step >= one[0]) if self.is_time else (1.0, "")
        return [(self.at(one), f"{one / unit:,.10g} {name}".rstrip()) for one in values]


def _shown(value: Any) -> Any:
    """A text of others as characters; what is HTML already has lines of its own."""
    return visible(units.paths(value)) if type(value) is str else value


def page(found: RunReport) -> str:
    """The page as HTML."""
    try:
        from jinja2 import Environment
    except ImportError as err:
        raise CkptError(
            "the page needs jinja2, which is not installed", hint='pip install "ckpt-engine[report]"'
        ) from err
    begin = min([one.start for one in found.lives] + [one.created for one in found.snapshots], default=found.made)
    last = max([one.end for one in found.lives] + [one.created for one in found.snapshots], default=found.made)
    across = Axis(0.0, max(1.0, last - begin), LEFT, WIDTH - 10.0, is_time=True)
    steps = [one.step for one in found.snapshots] + [one.step for one in found.lives if one.step is not None]
    up = Axis(0.0, max(1, *steps) if steps else 1, HEIGHT - BOTTOM, TOP)
    metric, mode = found.best or (next(iter(found.snapshots[-1].metrics if found.snapshots else ()), ""), "")
    known = {one.id: one.metrics[metric] for one in found.snapshots if math.isfinite(one.metrics.get(metric, math.nan))}
    level = Axis(min(known.values(), default=0.0), max(known.values(), default=1.0), HEIGHT - BOTTOM, TOP, least=1e-9)
    best = (max if mode == "max" else min)(known, key=known.__getitem__, default="") if mode else ""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)
    filters = (units.duration, units.size, units.percent, units.share)
    environment.filters |= {one.__name__: one for one in filters}
    return environment.from_string(_TEMPLATE.read_text()).render(
        report=found,
        across=across,
        up=up,
        marks=_marks(found.snapshots, lambda one: (across.at(one.created - begin), up.at(one.step))),
        metric=metric,
        level=level,
        best=best,
        measured=_marks(
            [one for one in found.snapshots if one.id in known],
            lambda one: (across.at(one.created - begin), level.at(known[one.id])),
        ),
        paths=[_path(one, found.snapshots, begin, across, up, first=one is found.lives[0]) for one in found.lives],
        failures=[
            (
                across.at(one.end - begin),
                up.at(one.step or 0),
                one,
                across.at(later.start - begin),
                up.at(one.step or 0 if later.resumed is None else later.resumed),
            )
            for one, later in pairwise(found.lives)
            if one.failed
        ],
        often=[
            (since, steps, why.removeprefix(f"every {count(steps, 'step')}: "))
            for one in found.lives
            for since, steps, why in one.intervals
        ],
        resumes=[one for one in found.lives if one.resumed or one.proof],
        meanings=MEANINGS,
        newest=found.snapshots[-1] if found.snapshots else None,
        age=lambda seconds: units.age(seconds, found.made),
        when=lambda seconds: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)),
        count=count,
        number=lambda value: "-" if value is None else f"{value:,}",
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        bottom=HEIGHT - BOTTOM,
    )


def _marks(snapshots: Sequence[SnapshotMark], place: Any) -> list[tuple[float, float, SnapshotMark, int]]:
    """A mark for each pixel that has snapshots: of the last one there, with how many there are."""
    placed = [(*place(one), one) for one in snapshots]
    pixels = grouped(((round(x), round(y), len(one.tiers) > 1), (x, y, one)) for x, y, one in placed)
    return [(*there[-1], len(there)) for there in pixels.values()]


def _path(life: Life, snapshots: Sequence[SnapshotMark], begin: float, across: Axis, up: Axis, *, first: bool) -> str:
    """The line of one process, as points of SVG, from where it is known to have been."""
    ready = life.start + life.seconds.get("startup", 0.0) + life.seconds.get("restore", 0.0)
    points = [(ready, life.resumed or 0)] if first or life.resumed is not None else []
    points += [(one.created, one.step) for one in snapshots if life.start <= one.created <= life.end]
    points += [(life.end, life.step)] if life.step is not None else []
    pixels = dict.fromkeys((across.at(when - begin), up.at(step)) for when, step in points)
    return " ".join(f"{x},{y}" for x, y in pixels)
