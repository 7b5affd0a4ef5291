"""The report of a resume: what came back with it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ckpt_engine.errors import visible
from ckpt_engine.observe.units import duration, place, size

FILE_NAME = "resume-report.json"
"""Where a run's folder has the report of its last resume."""
_SHOWN = 20
"""Changes that the log names; the file has all."""
_FROM_MEMORY = "resumed from memory"
_BY_OTHERS = "another number of ranks"


@dataclass(frozen=True, slots=True)
class Restored:
    """A part of the state that is exactly as it was, e.g. `optimizer` with the detail `AdamW, 2 parameter groups`."""

    name: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NotRestored:
    """A part of the state that is not as it was, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class ChangedPart:
    """What the option `resume` has changed.

    Args:
        how: `left`, `renamed` or `set`.
        name: of the component or value.
        detail: what became of it.
    """

    how: str
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate snapshot that was passed over; `code` is that of the error (`CKPT401`, ...)."""

    id: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """Where a repeated step was first seen to differ from the one of the earlier process.

    Args:
        step: the training step.
        what: `batch`, `random`, `learning_rate` or `weights`, which moments are, too.
        name: of the tensor; "" where it is none.
        relative: how far its values are apart, of the larger one; None: not known.
    """

    step: int
    what: str
    name: str = ""
    relative: float | None = None

    def __str__(self) -> str:
        where = f" of {self.name}" if self.name else ""
        far = "" if self.relative is None else f", by {self.relative:.1e}"
        return f"the {self.what.replace('_', ' ')}{where}{far}"


@dataclass(frozen=True, slots=True)
class Replay:
    """Whether a resumed run repeated the steps behind the snapshot as an earlier process had run them.

    Args:
        result: `exact`, `different` or `not compared`.
        steps: that were repeated and equal.
        why: what the result means, or why there is none.
        first: the first difference.
    """

    result: str
    steps: int = 0
    why: str = ""
    first: ReplayDifference | None = None

    def text(self) -> str:
        """The result for people, a line."""
        if self.result == "exact":
            return f"resume proved exact: {self.why}"
        if self.first is None:
            return f"resume not proved: {self.why}"
        first = self.first
        return (
            f"resume not exact: step {first.step} repeats otherwise, first seen in {first}, "
            f"after {self.steps} equal steps: {self.why}"
        )


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What one resume did.

    Args:
        url: the run's root.
        place: URL of the place that served the snapshot, if that is another one.
        snapshot: id of the snapshot restored; None: nothing was restored, the run starts fresh.
        step, epoch: those of the snapshot.
        restored, not_restored: parts of the state, in the order they were put back.
        rejected: candidates that were newer than the chosen one and unusable, newest first.
        notes: sentences worth reading (e.g. partially accumulated gradients are kept).
        seconds: from looking at the store to the state being in place.
        read_bytes: read from storage.
        away: sentences about places that were left out and may have something newer.
        rhythm: how often snapshots are taken from here on, and why.
        replay: whether the steps that it repeated were those of the earlier process; None: that was not asked.
        changes: what the option `resume` has changed.
    """

    url: str
    snapshot: str | None = None
    step: int | None = None
    epoch: int | None = None
    restored: tuple[Restored, ...] = ()
    not_restored: tuple[NotRestored, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    read_bytes: int = 0
    place: str = ""
    away: tuple[str, ...] = ()
    rhythm: str = ""
    replay: Replay | None = None
    changes: tuple[ChangedPart, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ResumeReport:
        """The inverse of `to_json`; keys of later versions are ignored.

        Raises:
            ValueError: not a resume report.
        """
        return msgspec.convert(data, cls)

    def text(self) -> str:
        """The report for people, several lines, no trailing newline."""
        lines = [self._headline()]
        lines += _section("changed", [(one.name, one.detail) for one in self.changes[:_SHOWN]])
        lines += [f"    … and {len(self.changes) - _SHOWN} more"] if len(self.changes) > _SHOWN else []
        lines += _section("restored", [(one.name, one.detail) for one in self.restored])
        lines += _section("not restored", [(one.name, one.why) for one in self.not_restored])
        lines += _section("passed over", [(one.id, f"[{one.code}] {one.reason}") for one in self.rejected])
        lines += [f"  note: {note}" for note in filter(None, (*self.notes, *self.away, self.rhythm))]
        return "\n".join(map(visible, lines))

    def line(self) -> str:
        """The report in one line."""
        notes = [note for note in self.notes if note.startswith((_FROM_MEMORY, _BY_OTHERS))]
        changes = [f"{one.name}: {one.detail}" for one in self.changes[:1]]
        changes += [f"{len(self.changes) - 1} more in {FILE_NAME}"] if self.changes[1:] else []
        return visible("; ".join(filter(None, (self._headline(), *changes, *notes, *self.away, self.rhythm))))

    def _headline(self) -> str:
        if self.snapshot is None:
            return f"starting fresh: nothing was restored from {place(self.url)}"
        where = f"step {self.step}" + (f", epoch {self.epoch}" if self.epoch is not None else "")
        return (
            f"resumed at {where} from {self.snapshot} in {place(self.place or self.url)} "
            f"({size(self.read_bytes)} read, {duration(self.seconds)})"
        )


def last_resume(root: str) -> ResumeReport | None:
    """The report of the last resume of the run in this folder; None: there is none, or it is of another version."""
    try:
        return ResumeReport.from_json(json.loads((Path(place(root)) / FILE_NAME).read_bytes()))
    except (OSError, ValueError):
        return None


def replay_of(root: str) -> Replay | None:
    """What the repeated steps of the last resume have shown; None: not known."""
    report = last_resume(root)
    return None if report is None else report.replay


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    width = max(len(name) for name, _ in rows)
    return [f"  {title}:"] + [f"    {name:<{width}}  {detail}".rstrip() for name, detail in rows]


def resumed_from_memory(lost_steps: int | None) -> str:
    """The sentence about a resume from the memory of the writer of a trainer that died.

    Args:
        lost_steps: steps that had begun since that snapshot; None where that is not known.
    """
    if lost_steps is None:
        return _FROM_MEMORY
    return f"{_FROM_MEMORY}, {lost_steps} step{'' if lost_steps == 1 else 's'} lost"


def resumed_by_others(saved: int, size: int) -> str:
    """The sentence about a resume by another number of ranks.

    Args:
        saved: ranks that took the snapshot.
        size: ranks that resume.
    """
    return f"{_BY_OTHERS}: {saved} before, {size} now"


def replace_file(path: Path, text: str) -> Path:
    """Replace the file in one step, so that a reader never sees half a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{os.urandom(4).hex()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path
