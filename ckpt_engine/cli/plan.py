"""`ckpt plan`: how much work of a run would be of use, simulated with the policy that trains."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click

from ckpt_engine.cli.output import json_option, print_json, print_table, print_text, showing
from ckpt_engine.cli.root import options_of, repository_of, storage_options
from ckpt_engine.cli.status import bar, percent
from ckpt_engine.config import load_config
from ckpt_engine.config.sections import parse_duration_seconds
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
from ckpt_engine.frequency.intervals import optimal
from ckpt_engine.frequency.policy import Costs, FrequencySettings
from ckpt_engine.frequency.simulate import FurtherTier, Restart, Rule, Ruled, SimulatedJob
from ckpt_engine.frequency.triggers import SnapshotTimer
from ckpt_engine.observe import units
from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.events import MACHINE, PROCESS, SITE, UNKNOWN, EventSink
from ckpt_engine.observe.units import count
from ckpt_engine.writer.attempts import BEAT_SECONDS, Attempt, read_attempts

DAY = 86400.0
LLAMA3_SECONDS = 3.09 * 3600.0
PRESETS: Mapping[str, tuple[float, str, Mapping[str, float]]] = {
    "llama3": (LLAMA3_SECONDS, "Llama 3, 16,384 GPUs (Meta 2024)", {PROCESS: 0.75, MACHINE: 0.25}),
    "spot": (DAY / 127, "spot machines, 64 GPUs (PCcheck, ASPLOS 2025)", {MACHINE: 1.0}),
}
"""By name: seconds between failures, where these numbers are from, and the shares of the classes."""
RSC_HOURS = ((8, 47.7 * 24), (1024, 7.9), (16384, 1.8), (131072, 0.23))
FAR_BYTES_PER_SECOND = 200e6
ASSUMED = Costs(step_seconds=1.0, stall_seconds=0.5, latency_seconds=10.0, written_bytes=10e9)
RESTART = Restart({PROCESS: 10.0, MACHINE: 280.0, SITE: 280.0}, startup=15.0, restore=5.0)
SEED = 1
DAYS = 30.0
# Boundaries that are looked at where no days are asked for; where a rule decides, one takes a tenth of the time.
MOST_OURS = 100_000
MOST_RULED = 400_000


@dataclass(frozen=True, slots=True)
class FailurePlan:
    """Which failures are simulated: a new sequence each time, what it is, and failures per second on average."""

    make: Callable[[], Failures]
    source: str
    per_second: float


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What became of one policy.

    Args:
        lost_seconds, worst_seconds: of one failure; None: there was none.
        interval_seconds: between snapshots; None: none was taken.
        spread: the standard deviation of `goodput`; None: too few failures to say.
        tiers: bytes written per day to each durable tier, nearest first.
    """

    name: str
    goodput: float
    spread: float | None
    lost_seconds: float | None
    worst_seconds: float | None
    overhead: float
    interval_seconds: float | None
    failures: int
    tiers: tuple[float, ...]


@click.command("plan", short_help="Simulate the goodput of a run.")
@click.argument("root", required=False)
@click.option("--failures", default="", metavar="WHAT", help="llama3, rsc:GPUS, spot, weibull:SHAPE,SCALE, or a file.")
@click.option("--compare", default="daly,checkfreq,30min", show_default=True, metavar="RULES", help="Beside ours.")
@click.option("--days", type=click.FloatRange(0.1, 3650.0), help="Simulated days: 30, fewer where much happens.")
@click.option(
    "--price", "prices", multiple=True, metavar="TIER=PRICE", help="Of a GB written; `hour=PRICE`: of an hour."
)
@storage_options
@json_option
def command(
    root: str | None, failures: str, compare: str, days: float | None, prices: tuple[str, ...], as_json: bool
) -> None:
    """Simulate a run of the options in ckpt.yaml, or of the run at ROOT, with failures, and compare policies.

    What snapshots cost is taken from the run where it has measured that. RULES are daly, checkfreq, durations, and
    package.module:name for your own, see docs/frequency.md.
    """
    config = options_of(root) if root else load_config({"tiers": ["."]})
    rows = read_attempts(repository_of(config.tiers[0]).storage).rows if root else ()
    costs, memory, measured = _costs(rows)
    settings = FrequencySettings.of(config)
    wanted = _failures(failures, rows)
    charged = _prices(prices, len(config.tiers))
    rules = {name: rule_of(name) for name in filter(None, (one.strip() for one in compare.split(",")))}
    speeds = [(tier, tier.bandwidth or FAR_BYTES_PER_SECOND) for tier in config.tiers[1:]]
    far = [FurtherTier(max(1e-3, costs.written_bytes / speed), tier.every or 0.0) for tier, speed in speeds]
    training = _training(settings, costs, memory)
    restart = _restart(rows)
    jobs = {"ckpt-engine": partial(SimulatedJob, training=training)}
    for name, rule in rules.items():
        if isinstance(rule, type):
            rhythm = partial(rule, settings)
        else:
            rhythm = partial(_ruled, max(costs.step_seconds, rule(costs, wanted.per_second)))
        jobs[name] = partial(SimulatedJob, training=training, rhythm=rhythm)
    jobs = {name: partial(job, restart=restart, tiers=far) for name, job in jobs.items()}
    ended, found, left = _simulate(jobs, wanted, days)
    planned = [_run(name, job, costs) for name, job in found.items()]
    if as_json:
        made = {"days": ended, "failures": wanted.source, "measured": measured, "costs": costs, "left_out": left}
        print_json({**made, "restart": restart, "policies": planned})
    else:
        _print(planned, wanted, costs, restart, measured, ended, charged)
        for name in left:
            print_text(f"{name} is left out: it takes too many snapshots in that time; --days simulates it as well")


def _simulate(
    jobs: Mapping[str, Callable[..., SimulatedJob]], wanted: FailurePlan, days: float | None
) -> tuple[float, dict[str, SimulatedJob], list[str]]:
    """The days that were simulated, the policies for as long as that, and the names of those that need too long.

    Without `days` the first policy, ours, says how many: its work is bounded, and that of each of the others.
    """
    seconds, found, left = (days or DAYS) * DAY, dict[str, SimulatedJob](), list[str]()
    most = math.inf if days else float(MOST_OURS)
    for name, made in jobs.items():
        job = made(failures=wanted.make(), seconds=seconds, most=most)
        with showing(partial(_far, f"{name}, policy {1 + len(found) + len(left)} of {len(jobs)}", job), hidden=True):
            job.run()
        if not found:
            seconds, most = job.seconds, math.inf if days else float(MOST_RULED)
        if job.seconds < seconds:
            left.append(name)
        else:
            found[name] = job
    return seconds / DAY, found, left


def _far(what: str, job: SimulatedJob) -> str:
    return f"ckpt plan: {what}: day {(job.clock.now - job.origin) / DAY:.3g} of at most {job.seconds / DAY:.3g}"


def _ruled(seconds: float, clock: Clock, _sink: EventSink) -> Ruled:
    return Ruled(seconds, clock)


def _costs(rows: Sequence[Attempt]) -> tuple[Costs, float, bool]:
    """What one snapshot costs, and one in memory; whether that was measured by the run."""
    seen = next((one.times for one in reversed(rows) if one.times.get("persist_each") and one.times.get("step")), None)
    if seen is None:
        return ASSUMED, ASSUMED.stall_seconds / 4.0, False
    costs = Costs(
        step_seconds=seen["step"],
        stall_seconds=seen.get("stall_each", 0.0),
        slowdown_seconds=seen.get("slowdown_each", 0.0),
        latency_seconds=seen["persist_each"],
        written_bytes=1e6 * seen.get("megabytes", 0.0),
    )
    return costs, seen.get("memory_each", 0.0) or costs.stall_seconds, True


def _restart(rows: Sequence[Attempt]) -> Restart:
    """What restarts usually took in this run; what it had none of is assumed."""
    down = dict(RESTART.down)
    for kind in down:
        late = 0.0 if kind == PROCESS else BEAT_SECONDS / 2.0  # that a lost machine lived after its last heartbeat
        gaps = [
            max(0.0, (following.started or following.began) - one.began - one.seconds - late)
            for one, following in pairwise(rows)
            if one.failure in (kind, UNKNOWN)
        ]
        down[kind] = median(gaps) if gaps else down[kind]
    startup, restore = (
        median([one.times[name] for one in rows if one.times.get(name)] or [assumed])
        for name, assumed in (("startup", RESTART.startup), ("restore", RESTART.restore))
    )
    return Restart(down, startup, restore)


def _training(settings: FrequencySettings, costs: Costs, memory: float) -> dict[str, Any]:
    persist = max(costs.latency_seconds - costs.stall_seconds, 1e-3)
    share = min(costs.slowdown_seconds / persist, 0.9)
    return {
        "settings": settings,
        "step_seconds": max(costs.step_seconds, 1e-3),
        "stall": costs.stall_seconds,
        "persist": persist,
        "slowdown": 1.0 / (1.0 - share),
        "memory_stall": memory,
        "nbytes": int(costs.written_bytes),
    }


def _failures(name: str, rows: Sequence[Attempt]) -> FailurePlan:
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


def rule_of(name: str) -> Rule | type[SnapshotTimer]:
    """The rule of that name: from the costs of a snapshot and failures per second to seconds between snapshots.

    Or a class of its own timers, each made of settings, a clock and a sink.

    Raises:
        ConfigError: there is none.
    """
    if name == "daly":
        return lambda costs, rate: optimal(costs.cost_seconds, 1.0 / rate)
    if name == "checkfreq":  # an overhead of 3.5 %, and never faster than the writer (FAST 2021)
        return lambda costs, _: max(costs.cost_seconds / 0.035, costs.latency_seconds)
    module, colon, function = name.partition(":")
    if colon:
        if (here := str(Path.cwd())) not in sys.path:  # where a script is started, Python looks beside the script only
            sys.path.append(here)
        try:
            made: Rule | type[SnapshotTimer] = getattr(import_module(module), function)
        except (ImportError, AttributeError, ValueError) as err:
            raise ConfigError(
                f"--compare {name}: {err}", hint="package.module:function, see docs/frequency.md"
            ) from err
        return made
    try:
        seconds = parse_duration_seconds(name)
    except ValueError as err:
        raise ConfigError(
            f"--compare {name!r} is no rule: {err}", hint="daly, checkfreq, 30min, or package.module:function"
        ) from err
    return lambda _costs, _rate: seconds


def _prices(given: Sequence[str], tiers: int) -> dict[str, float]:
    found = {}
    for one in given:
        name, _, value = one.partition("=")
        try:
            if name != "hour" and not 1 <= int(name) <= tiers:
                raise ValueError(f"there are {count(tiers, 'durable tier')}")
            found[name] = float(value)
        except ValueError as err:
            raise ConfigError(f"--price {one!r}: {err}", hint="as in --price 1=0.01 --price hour=98.32") from err
    return found


def _run(name: str, job: SimulatedJob, costs: Costs) -> PlannedRun:
    lost = [seconds for _, seconds in job.lost]
    per_day = DAY / job.seconds * costs.written_bytes
    return PlannedRun(
        name=name,
        goodput=job.goodput,
        spread=spread(job.cycles),
        lost_seconds=sum(lost) / len(lost) if lost else None,
        worst_seconds=max(lost, default=None),
        overhead=(job.stalled + job.slowed) / job.seconds,
        interval_seconds=job.seconds / job.taken if job.taken else None,
        failures=len(lost),
        tiers=(per_day * job.written, *(per_day * tier.copied for tier in job.further)),
    )


def spread(cycles: Sequence[tuple[float, float]]) -> float | None:
    """The standard deviation of goodput, from how unlike the times between failures were; None: too few were.

    Args:
        cycles: when each failure was over, and what was useful until then.
    """
    if len(cycles) < 3:
        return None
    gains = [(now - time, done - useful) for (time, useful), (now, done) in pairwise(cycles)]
    time, useful = sum(each for each, _ in gains), sum(gain for _, gain in gains)
    return math.hypot(*(gain - useful / time * each for each, gain in gains)) / time


def _print(
    found: Sequence[PlannedRun],
    wanted: FailurePlan,
    costs: Costs,
    restart: Restart,
    measured: bool,
    days: float,
    prices: Mapping[str, float],
) -> None:
    said = "as this run has measured" if measured else "assumed: nothing was measured"
    print_text(f"failures   {wanted.source}")
    print_text(
        f"snapshots  stall {units.duration(costs.stall_seconds)}, slowdown {units.duration(costs.slowdown_seconds)}, "
        f"durable in {units.duration(costs.latency_seconds)}, {units.size(costs.written_bytes)}"
    )
    print_text(f"           steps of {units.duration(costs.step_seconds)}; {said}")
    process, machine = (restart.down[one] + restart.startup + restart.restore for one in (PROCESS, MACHINE))
    said = "assumed" if restart == RESTART else "as in this run"
    print_text(
        f"restarts   {units.duration(process)} after a process, {units.duration(machine)} after a machine ({said})", ""
    )
    most = max(1.0 - one.goodput for one in found)
    rows = [
        (
            one.name,
            percent(one.goodput),
            *("-" if seconds is None else units.duration(seconds) for seconds in (one.lost_seconds, one.worst_seconds)),
            percent(one.overhead),
            "never" if one.interval_seconds is None else units.duration(one.interval_seconds),
            units.size(sum(one.tiers)),
            bar((1.0 - one.goodput) / most if most > 0.0 else 0.0, 12),
        )
        for one in sorted(found, key=lambda each: -each.goodput)
    ]
    titles = ("policy", "goodput", "lost", "worst", "overhead", "every", "a day", "of no use")
    print_table(titles, rows, numbers=titles[1:-1])
    spreads = [one.spread for one in found if one.spread is not None]
    by = f"goodput ± {100.0 * max(spreads):.1f} by chance" if spreads else "too few to say much of goodput"
    print_text("", f"{days:.3g} simulated days, {count(found[0].failures, 'failure')}: {by}")
    print_text("lost: work of one failure, on average")
    if len(found) > 1:
        print_text("rules know the true costs and the true failure rate; ckpt-engine learns both")
    for name, price in prices.items():
        what = "hours that are of no use" if name == "hour" else f"GB written to tier {name}"
        for one in found:
            idle = (1.0 - one.goodput) * days * 24.0
            amount = idle if name == "hour" else one.tiers[int(name) - 1] * days / 1e9
            print_text(f"{one.name}: {amount * price:,.2f} for {amount:,.1f} {what}")
