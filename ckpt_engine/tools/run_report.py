"""What a run has done, as data.

It says how often the run failed and what that cost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ckpt_engine.config import Config
from ckpt_engine.errors import CkptError
from ckpt_engine.observe.resume_report import ResumeReport, last_resume
from ckpt_engine.observe.run_times import RunSpent
from ckpt_engine.store.branches import Branch
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.names import parse_id
from ckpt_engine.tools.check_run import Counting, all_ok, check_run
from ckpt_engine.tools.listing import TierListing, listings, merged, named_branches
from ckpt_engine.tools.recorded_attempts import failure_of, history_of
from ckpt_engine.tools.stored_run import Run
from ckpt_engine.writer.attempts import AttemptHistory, after


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


def read_report(run: Run, config: Config, say: Callable[[str], object], counting: Counting | None) -> RunReport:
    """What is known of a run.

    Args:
        config: its options.
        say: takes the line about a wait of some seconds.
        counting: follows the reading of every stored byte; None: they are not read.

    Raises:
        CkptError: no tier answers.
    """
    tiers, away = listings(run, say)
    rows = merged(tiers)
    problems = [f"{one.url} is left out: [{one.code}] {one.reason}" for one in away]
    problems += [f"{bad.id} is damaged at {tier.url}: {bad.error}" for tier in tiers for bad in tier.listing.damaged]
    verified = None
    if counting is not None:
        checked, silent = check_run(run, (), counting)
        verified = all_ok(checked) and not silent
        problems += [f"{one.url} was not verified: [{one.code}] {one.reason}" for one in silent]
        problems += [f"{copies.url}: {problem}" for copies in checked for problem in copies.problems]
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
    resumed: list[int | None] = []
    for one, following in zip_longest(history.rows, history.rows[1:]):
        end = math.inf if following is None else following.began
        parent = parse_id(next((info.parent or "" for info in infos if one.began <= info.created < end), ""))
        resumed.append(None if parent is None else parent.step)
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
