"""The failures that are simulated, by the name that a user gives them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ckpt_engine.config.option_types import parse_duration_seconds
from ckpt_engine.errors import ConfigError
from ckpt_engine.frequency.failures import (
    CLASSES,
    SHARES,
    FailureBelief,
    Failures,
    assumed_mtbf,
    observed,
    poisson,
    weibull,
)
from ckpt_engine.observe import units
from ckpt_engine.observe.events import MACHINE, PROCESS
from ckpt_engine.observe.units import count
from ckpt_engine.writer.attempts import Attempt

DAY = 86400.0
LLAMA3_SECONDS = 3.09 * 3600.0
PRESETS: Mapping[str, tuple[float, str, Mapping[str, float]]] = {
    "llama3": (LLAMA3_SECONDS, "Llama 3, 16,384 GPUs (Meta 2024)", {PROCESS: 0.75, MACHINE: 0.25}),
    "spot": (DAY / 127, "spot machines, 64 GPUs (PCcheck, ASPLOS 2025)", {MACHINE: 1.0}),
}
"""By name: seconds between failures, where these numbers are from, and the shares of the classes."""
RSC_HOURS = ((8, 47.7 * 24), (1024, 7.9), (16384, 1.8), (131072, 0.23))
SEED = 1


@dataclass(frozen=True, slots=True)
class FailurePlan:
    """Which failures are simulated: a new sequence each time, what it is, and failures per second on average."""

    make: Callable[[], Failures]
    source: str
    per_second: float


def failures_of(name: str, rows: Sequence[Attempt]) -> FailurePlan:
    """The failures of that name.

    Raises:
        ConfigError: it is none, or no file; or a line of the file is not right.
    """
    kind, _, value = name.partition(":")
    if not name:
        belief = FailureBelief.prior(assumed_mtbf())
        belief = belief.after([one.seconds for one in rows], [one.failure for one in rows])
        seen = sum(one.failure != "" for one in rows)
        what = f"what {count(seen, 'failure')} of this run make likely" if rows else "assumed of a run on one machine"
        shares = {one: rate / belief.per_second for one, rate in belief.rates.items()}
        return _poisson(belief.typical_seconds, what, shares)
    if name in PRESETS:
        return _poisson(*PRESETS[name])
    if kind == "rsc" and value.isdecimal() and int(value) > 0:
        return _poisson(_rsc_seconds(int(value)), f"Meta RSC, {int(value):,} GPUs (HPCA 2025)")
    if kind == "weibull":
        try:
            shape, scale = value.split(",")
            form, seconds = float(shape), parse_duration_seconds(scale)
            if not 0.1 <= form <= 10.0:
                raise ValueError("the shape is from 0.1 to 10")
        except ValueError as err:
            raise ConfigError(f"--failures {name}: {err}", hint="as in weibull:0.6,7.5h") from err
        mean = seconds * math.gamma(1.0 + 1.0 / form)
        what = f"Weibull, shape {form:g}, {units.duration(mean)} on average"
        return FailurePlan(lambda: weibull(form, seconds, random.Random(SEED)), what, 1.0 / mean)
    if kind in ("rsc", *PRESETS) or not Path(name).is_file():
        raise ConfigError(
            f"--failures {name!r} is no failure preset and no file",
            hint="llama3, rsc:1024, spot, weibull:0.6,7.5h, or a file with a time and a class in each line",
        )
    trace = read_trace(Path(name))
    return FailurePlan(lambda: observed(trace), f"{count(len(trace), 'failure')} of {name}", len(trace) / trace[-1][0])


def _poisson(mtbf: float, what: str, shares: Mapping[str, float] = SHARES) -> FailurePlan:
    what = f"{what}: one in {units.duration(mtbf)}"
    return FailurePlan(lambda: poisson(mtbf, random.Random(SEED), shares), what, 1.0 / mtbf)


def _rsc_seconds(gpus: int) -> float:
    """Between failures: the published points, and straight lines between their logarithms."""
    points = [(math.log(number), math.log(3600.0 * hours)) for number, hours in RSC_HOURS]
    at = math.log(gpus)
    left, right = next((pair for pair in pairwise(points) if at <= pair[1][0]), points[-2:])
    return math.exp(left[1] + (right[1] - left[1]) * (at - left[0]) / (right[0] - left[0]))


def read_trace(path: Path) -> list[tuple[float, str]]:
    """Failures from a file: in each line the time since the start and a class, `#` begins a comment.

    Raises:
        ConfigError: a line is something else, or times fall; names it. Or there is no line.
    """
    found: list[tuple[float, str]] = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path} cannot be read: {err}") from err
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        time, _, kind = text.rpartition(" ")
        try:
            seconds = parse_duration_seconds(time)
            if kind not in CLASSES:
                raise ValueError(f"{kind!r} is none of {', '.join(CLASSES)}")
            if found and seconds <= found[-1][0]:
                raise ValueError("times rise")
        except ValueError as err:
            raise ConfigError(f"{path}:{number}: {err}", hint="a line is `3h 20min machine`") from err
        found.append((seconds, kind))
    if not found:
        raise ConfigError(f"{path} has no failure", hint="a line is `3h 20min machine`")
    return found
