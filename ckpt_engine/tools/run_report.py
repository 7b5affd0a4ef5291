"""What a run has done, as data.

It says how often the run failed and what that cost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

from ckpt_engine.config import Config
from ckpt_engine.grouping import grouped
from ckpt_engine.observe.resume_report import ResumeReport, last_resume
from ckpt_engine.observe.run_times import RunSpent
from ckpt_engine.store.branches import Branch
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.names import parse_id
from ckpt_engine.store.repository import CHANGED, ForkPoint
from ckpt_engine.tools.check_run import Counting, all_ok, check_run
from ckpt_engine.tools.listing import TierListing, listings, merged, named_branches
from ckpt_engine.tools.recorded_attempts import failure_of, history_of
from ckpt_engine.tools.run_status import known
from ckpt_engine.tools.stored_run import Run
from ckpt_engine.writer.attempts import AttemptHistory, after
from ckpt_engine.writer.run_records import TierStatus, read_status

_AGAIN = ("startup", "restore", "replay")
"""What the process after a failure spends on it, see `run_times.TIMES`."""


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
        resumed: the step that it resumed from; 0 or None: it began fresh, or that is not known.
        lost_steps: of it, that the next process had to do again; None: not known.
        lost_seconds: that its failure has cost: the step that it cut off, until another process trained, and steps that
            were done again; None: there was none, or it is not known.
        proof: whether its resume was exact, for people; empty: not recorded.
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
    lost_seconds: float | None = None
    proof: str = ""

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
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunReport:
    """All that the page shows.

    Args:
        made: wall-clock seconds since 1970.
        verified: whether every byte was read and is what was written; None: not looked at.
        problems: what is damaged, or does not answer.
        resume: the report of the last resume; None: there was none, or it is not on this machine.
        unasked: tiers of the run that were not asked, as its writer knows them.
        measured: of the newest attempt, see `run_times.MEASURED`.
        best: of `keep.best`, the name of the metric and `min` or `max`; None: nothing says which snapshot is best.
        fork: where the run was forked; None: it was not.
        changed: the first snapshot of each process that resumed with changes.
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
    unasked: tuple[TierStatus, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)
    best: tuple[str, str] | None = None
    fork: ForkPoint | None = None
    changed: tuple[SnapshotInfo, ...] = ()

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
            "overhead": self.measured.get("overhead"),
            "budget": self.measured.get("budget"),
            "unasked": self.unasked,
            "best": self.best,
            "fork": self.fork,
            "changed": self.changed,
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
    near = run.places[0].storage
    history = known(lambda: history_of(config, near), problems) or AttemptHistory(())
    status = known(lambda: read_status(near), problems)
    infos = [info for info, _ in rows]
    return RunReport(
        root=run.places[0].storage.url,
        made=time.time(),
        tiers=tuple(tiers),
        branches=tuple(named_branches(rows)[0]),
        snapshots=tuple(_taken(rows)),
        components=dict(infos[-1].components) if infos else {},
        lives=tuple(_lives(history, infos)),
        spent=history.spent if history.attempts else None,
        verified=verified,
        problems=tuple(problems),
        resume=last_resume(config.root_url),
        unasked=tuple(one for one in (status.tiers if status is not None else ()) if one.url not in run.tiers),
        measured=history.attempts[-1].times if history.attempts else {},
        best=(config.keep.best.monitor, config.keep.best.mode) if config.keep.best is not None else None,
        fork=run.fork,
        changed=_changed(run, infos),
    )


def _changed(run: Run, infos: Sequence[SnapshotInfo]) -> tuple[SnapshotInfo, ...]:
    """The first snapshot of each attempt whose section `resume` is not that of the attempt that it continues."""
    firsts = {info.line.attempt: info for info in reversed(infos)}
    sections = {attempt: run.notes(info.id).get(CHANGED) for attempt, info in firsts.items()}
    return tuple(
        info
        for info in infos
        if firsts[info.line.attempt] is info
        and sections[info.line.attempt] not in (None, sections.get(next(iter(info.line.before), ("",))[0]))
    )


def _taken(rows: Sequence[tuple[SnapshotInfo, Sequence[TierListing]]]) -> list[SnapshotMark]:
    by_attempt = grouped((info.line.attempt, info) for info, _ in rows).values()
    gaps = {later.id: max(0.0, later.created - one.created) for infos in by_attempt for one, later in pairwise(infos)}
    return [
        SnapshotMark(
            id=info.id,
            step=info.step,
            created=info.created,
            reason=info.reason,
            nbytes=info.nbytes,
            tiers=tuple(one.number for one in holders),
            gap=gaps.get(info.id),
            metrics=info.metrics,
        )
        for info, holders in rows
    ]


def _lives(history: AttemptHistory, infos: Sequence[SnapshotInfo]) -> Iterator[Life]:
    """The attempts, and which snapshot each went on from, as those that it has left say."""
    resumed: list[int | None] = []
    for one, following in zip_longest(history.attempts, history.attempts[1:]):
        end = math.inf if following is None else following.began
        parent = parse_id(next((info.parent or "" for info in infos if one.began <= info.created < end), ""))
        resumed.append(one.resumed_at if one.resumed_at >= 0 else None if parent is None else parent.step)
    spent = history.before
    for number, (one, following) in enumerate(zip_longest(history.attempts, history.attempts[1:])):
        was, spent = spent.parts, after(spent, one, following)
        step = one.step if one.step >= 0 else None
        later = next((step for step in resumed[number + 1 :] if step is not None), None)
        lost = max(0, step - later) if step is not None and later is not None else None
        failed = one.failure != "" and (one.end is not None or following is not None)
        seconds = {name: total - was[name] for name, total in spent.parts.items()}
        cost = seconds["down"] + seconds["replay"] - one.times.get("replay", 0.0)
        again = (following.times.get(name, 0.0) for name in _AGAIN) if following is not None else ()
        yield Life(
            host=one.host,
            start=one.started or one.began,
            lasted=one.lasted,
            ended=failure_of(one) if one.end is not None or following is None else "lost with its machine",
            failed=failed,
            step=step,
            resumed=resumed[number],
            lost_steps=lost,
            seconds=seconds,
            lost_seconds=cost + sum(again) if failed and following is not None and one.times else None,
            proof=one.proof,
            intervals=tuple((one.began + since, steps, why) for since, steps, why in one.intervals),
        )
