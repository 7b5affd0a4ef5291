"""`ckpt report`: what a run has done, how often it failed and what that cost, as data for the page `report.html`."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import click

from ckpt_engine.cli.ls import TierListing, listings, merged, named_branches
from ckpt_engine.cli.output import age, json_option, new_file, print_json, print_text
from ckpt_engine.cli.root import Run, open_run, options_of, storage_options
from ckpt_engine.cli.status import MEANINGS, failure_of, history_of, percent
from ckpt_engine.cli.verify import all_ok, check_run
from ckpt_engine.errors import CkptError, visible
from ckpt_engine.observe import units
from ckpt_engine.observe.resume_report import ResumeReport, last_resume
from ckpt_engine.observe.run_times import RunSpent
from ckpt_engine.observe.units import count
from ckpt_engine.store.branches import Branch
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.names import parse_id
from ckpt_engine.writer.attempts import AttemptHistory, after

DEFAULT = "ckpt-report.html"
_TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True, slots=True)
class Life:
    """One process that trained.

    Args:
        host: its machine.
        start: wall-clock seconds since 1970.
        lasted: seconds until it was last known to live.
        ended: how, for people.
        failed: whether by a failure.
        step: the last one that was complete; None: not known.
        resumed: the step it went on from; None: it began fresh, or no snapshot of it is left.
        lost_steps: of it, that the next process had to do again; None: not known.
        seconds: what its time, and that until the next one, went into.
        intervals: since which wall-clock second it took snapshots every how many steps, and why.
    """

    host: str
    start: float
    lasted: float
    ended: str
    failed: bool
    step: int | None
    resumed: int | None
    lost_steps: int | None
    seconds: Mapping[str, float]
    intervals: tuple[tuple[float, int, str], ...] = ()

    @property
    def end(self) -> float:
        """Wall-clock seconds since 1970."""
        return self.start + self.lasted


@dataclass(frozen=True, slots=True)
class SnapshotMark:
    """One snapshot.

    Args:
        created: wall-clock seconds since 1970.
        tiers: numbers of the tiers that have it, from 1.
        gap: seconds since the one before of the same process; None: it is its first.
    """

    id: str
    step: int
    created: float
    reason: str
    nbytes: int
    tiers: tuple[int, ...]
    gap: float | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """All that the page shows.

    Args:
        made: wall-clock seconds since 1970.
        verified: whether every byte was read and is what was written; None: not looked at.
        problems: what is damaged, or does not answer.
        resume: the report of the last resume; None: there was none, or it is not on this machine.
    """

    root: str
    made: float
    tiers: tuple[TierListing, ...]
    branches: tuple[Branch, ...]
    snapshots: tuple[SnapshotMark, ...]
    components: Mapping[str, int]
    lives: tuple[Life, ...]
    spent: RunSpent | None
    verified: bool | None
    problems: tuple[str, ...]
    resume: ResumeReport | None

    def to_json(self) -> dict[str, Any]:
        """What `print_json` takes."""
        return {
            "root": self.root,
            "made": self.made,
            "tiers": [one.to_json() for one in self.tiers],
            "branches": [{"id": one.id, "newest": one.newest.id} for one in self.branches],
            "snapshots": self.snapshots,
            "components": self.components,
            "lives": self.lives,
            "seconds": self.spent and self.spent.parts,
            "goodput": self.spent and self.spent.goodput,
            "verified": self.verified,
            "problems": self.problems,
            "resume": self.resume,
        }


@click.command("report", short_help="Write a page for a browser that shows what a run has done.")
@click.argument("root")
@click.option("--html", "file", default=DEFAULT, show_default=True, help="The file to write.", type=Path)
@click.option("--verify", is_flag=True, help="Read every stored byte first, and show whether it is what was written.")
@click.option("--force", is_flag=True, help="Replace the file.")
@storage_options
@json_option
def command(root: str, file: Path, verify: bool, force: bool, as_json: bool) -> None:
    """Write one page that shows the run at ROOT: its steps, snapshots, failures and resumes, what its time went into,
    what each failure has cost, and what is stored where.

    The page needs no network and no other file. With --json its numbers are printed, and no page is written.
    """
    found = read_report(root, verify=verify, hidden=as_json)
    if as_json:
        print_json(found.to_json())
        return
    with new_file(file, replace=force) as out:
        out.write(page(found).encode())
    size = units.size(file.stat().st_size)
    print_text(f"{file} ({size}): {count(len(found.snapshots), 'snapshot')}, {count(len(found.lives), 'attempt')}")


def read_report(root: str, *, verify: bool = False, hidden: bool = True) -> RunReport:
    """What is known of the run at a root.

    Args:
        verify: read every stored byte.
        hidden: without a progress bar.

    Raises:
        CkptError: there is no run, or no tier answers.
    """
    run, config = open_run(root), options_of(root)
    tiers, away = listings(run)
    rows = merged(tiers)
    problems = [f"{one.url} is left out: [{one.code}] {one.reason}" for one in away]
    problems += [f"{bad.id} is damaged at {tier.url}: {bad.error}" for tier in tiers for bad in tier.listing.damaged]
    verified = None
    if verify:
        verified, more = _verified(run, hidden=hidden)
        problems += more
    history = AttemptHistory()
    try:
        history = history_of(config, run.places[0].storage)
    except CkptError as err:
        problems.append(str(err))
    infos = [info for info, _ in rows]
    return RunReport(
        root=run.places[0].storage.url,
        made=time.time(),
        tiers=tuple(tiers),
        branches=tuple(named_branches(rows)[0]),
        snapshots=tuple(_taken(rows)),
        components=dict(infos[-1].components) if infos else {},
        lives=tuple(_lives(history, infos)),
        spent=history.spent if history.rows else None,
        verified=verified,
        problems=tuple(problems),
        resume=last_resume(config.root_url),
    )


def _verified(run: Run, *, hidden: bool) -> tuple[bool, list[str]]:
    checked, away = check_run(run, hidden=hidden)
    more = [f"{one.url} was not verified: [{one.code}] {one.reason}" for one in away]
    for copies in checked:
        damaged = [(verdict.snapshot, problem) for verdict in copies.verdicts for problem in verdict.problems]
        damaged += [(problem.file or "", problem) for problem in copies.others]
        more += [f"{where} at {copies.url}: [{problem.code}] {problem.message}" for where, problem in damaged]
    return all_ok(checked) and not away, more


def _taken(rows: Sequence[tuple[SnapshotInfo, Sequence[TierListing]]]) -> list[SnapshotMark]:
    found = []
    before: dict[str, float] = {}
    for info, holders in rows:
        last = before.get(info.line.attempt)
        before[info.line.attempt] = info.created
        gap = None if last is None else max(0.0, info.created - last)
        tiers = tuple(one.number for one in holders)
        found.append(SnapshotMark(info.id, info.step, info.created, info.reason, info.nbytes, tiers, gap))
    return found


def _lives(history: AttemptHistory, infos: Sequence[SnapshotInfo]) -> list[Life]:
    """The attempts, and which snapshot each went on from, as those that it has left say."""
    created = [info.created for info in infos]
    resumed: list[int | None] = []
    for one, following in zip_longest(history.rows, history.rows[1:]):
        first = bisect_left(created, one.began)
        mine = infos[first : bisect_left(created, following.began) if following else len(infos)]
        parent = parse_id(mine[0].parent) if mine and mine[0].parent else None
        resumed.append(parent.step if parent else None)
    lives = []
    spent = history.before
    for number, (one, following) in enumerate(zip_longest(history.rows, history.rows[1:])):
        was, spent = spent.parts, after(spent, one, following)
        step = one.step if one.step >= 0 else None
        later = resumed[number + 1] if following is not None else None
        lost = max(0, step - later) if step is not None and later is not None else None
        failed = one.failure != "" and (one.end is not None or following is not None)
        lives.append(
            Life(
                host=one.host,
                start=one.started or one.began,
                lasted=one.lasted,
                ended=failure_of(one) if one.end is not None or following is None else "lost with its machine",
                failed=failed,
                step=step,
                resumed=resumed[number],
                lost_steps=lost,
                seconds={name: seconds - was[name] for name, seconds in spent.parts.items()},
                intervals=tuple((one.began + since, steps, why) for since, steps, why in one.intervals),
            )
        )
    return lives


# ---- the page

_ROUND_SECONDS = (
    *(unit * many for unit in (1.0, 60.0) for many in (1, 2, 5, 10, 20, 30)),
    *(3600.0 * many for many in (1, 2, 5, 12)),
    *(86400.0 * many * power for power in (1, 10, 100) for many in (1, 2, 5)),
)
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960.0, 300.0, 70.0, 34.0, 12.0


@dataclass(frozen=True, slots=True)
class Axis:
    """Where a value is on a plot.

    Args:
        low, high: the values at its ends.
        start, stop: where its ends are, in pixels.
        log: equal distances are equal factors; of seconds only.
        is_time: the values are seconds.
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False
    is_time: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value, to a tenth."""
        low, high, value = (math.log(max(one, 1e-3)) if self.log else one for one in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.stop - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Pixels and texts of round values."""
        if self.log:
            return [(self.at(one), units.duration(one)) for one in _ROUND_SECONDS if self.low <= one <= self.high]
        step = _round_step((self.high - self.low) / (8.0 if self.is_time else 5.0), self.is_time)
        values = [step * number for number in range(math.ceil(self.low / step), int(self.high / step) + 1)]
        # One unit for all, so that distances can be read.
        unit, name = next(one for one in _UNITS if step >= one[0]) if self.is_time else (1.0, "")
        return [(self.at(one), f"{one / unit:,.10g} {name}".rstrip()) for one in values]


def _round_step(least: float, is_time: bool) -> float:
    """The first round distance that is no shorter than this one."""
    power = 10.0 ** math.floor(math.log10(max(least, 1.0)))
    rounds = _ROUND_SECONDS if is_time else [power * many for many in (1, 2, 5, 10)]
    return next((one for one in rounds if one >= least), least)


def _shown(value: Any) -> Any:
    """A text of others as characters; what is HTML already has lines of its own."""
    return visible(value) if type(value) is str else value


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
    gaps = [max(one.gap, 1e-3) for one in found.snapshots if one.gap is not None]
    apart = Axis(
        min(gaps, default=1.0) / 1.5, max(gaps, default=1.0) * 1.5, HEIGHT - BOTTOM, TOP, log=True, is_time=True
    )
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)
    environment.filters |= {"duration": units.duration, "size": units.size, "percent": percent}
    return environment.from_string(_TEMPLATE.read_text()).render(
        report=found,
        across=across,
        up=up,
        apart=apart,
        marks=_marks(found.snapshots, lambda one: (across.at(one.created - begin), up.at(one.step))),
        distances=_marks(
            [one for one in found.snapshots if one.gap is not None],
            lambda one: (across.at(one.created - begin), apart.at(one.gap or 0.0)),
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
        meanings=MEANINGS,
        newest=found.snapshots[-1] if found.snapshots else None,
        age=lambda seconds: age(seconds, found.made),
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
    found: dict[tuple[int, int, bool], tuple[float, float, SnapshotMark, int]] = {}
    for one in snapshots:
        x, y = place(one)
        key = round(x), round(y), len(one.tiers) > 1
        found[key] = x, y, one, found[key][3] + 1 if key in found else 1
    return list(found.values())


def _path(life: Life, snapshots: Sequence[SnapshotMark], begin: float, across: Axis, up: Axis, *, first: bool) -> str:
    """The line of one process, as points of SVG, from where it is known to have been."""
    points = [(life.start, life.resumed or 0)] if first or life.resumed is not None else []
    points += [(one.created, one.step) for one in snapshots if life.start <= one.created <= life.end]
    points += [(life.end, life.step)] if life.step is not None else []
    pixels = dict.fromkeys((across.at(when - begin), up.at(step)) for when, step in points)
    return " ".join(f"{x},{y}" for x, y in pixels)
