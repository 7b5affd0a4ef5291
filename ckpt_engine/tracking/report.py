"""Collects the resume report of a run while it resumes, logs it and writes it beside the snapshots."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_engine.observe.aloud import Aloud, announce
from ckpt_engine.observe.resume_report import (
    FILE_NAME,
    NotRestored,
    Rejected,
    Restored,
    ResumeReport,
    resumed_from_memory,
)
from ckpt_engine.restore.load import Loaded


@dataclass(slots=True)
class ReportDraft:
    """What is known so far.

    Args:
        url: the run's root.
        loaded: the snapshot.
    """

    url: str
    loaded: Loaded
    restored: list[Restored] = field(default_factory=list)
    not_restored: list[NotRestored] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def finish(self) -> ResumeReport:
        """The report as a value."""
        info, notes = self.loaded.info, self.notes
        if self.loaded.from_memory:
            notes = [resumed_from_memory(self.loaded.lost_steps), *notes]
        return ResumeReport(
            url=self.url,
            snapshot=info.id,
            step=info.step,
            epoch=info.epoch,
            restored=tuple(self.restored),
            not_restored=tuple(self.not_restored),
            rejected=tuple(Rejected(r.snapshot, r.code, r.reason) for r in self.loaded.rejected),
            notes=(*notes, *self.loaded.notes),
            seconds=self.loaded.seconds,
            read_bytes=self.loaded.read_bytes,
            place="" if self.loaded.from_memory else self.loaded.place,
            away=self.loaded.left_out,
        )


def publish(
    report: ResumeReport, folder: Path, log: logging.Logger, aloud: Aloud | None = None, rank: int = 0
) -> Path | None:
    """Log the report to `log` and write it to `folder` as `resume-report.json`; returns the file.

    Of several ranks the first one does. Another one only warns of what it could not restore.

    A folder that cannot be written costs a warning, never the run.

    Args:
        aloud: shows the report's first line to a user who has configured no logging, see `announce`.
        rank: of this process.
    """
    if rank:
        if report.not_restored:
            log.warning("rank %d: %s", rank, report.text())
        return None
    if report.not_restored or report.rejected or report.away:
        log.warning("%s", report.text())
    else:
        announce(log, report.text(), line=report.line(), aloud=aloud)
    return write(report, folder, log)


def write(report: ResumeReport, folder: Path, log: logging.Logger, rank: int = 0) -> Path | None:
    """The file alone, of the first rank."""
    if rank:
        return None
    try:
        return _replace(folder / FILE_NAME, json.dumps(report.to_json(), indent=2) + "\n")
    except OSError as err:
        log.warning("the resume report could not be written to %s: %s", folder, err)
        return None


def _replace(path: Path, text: str) -> Path:
    """Replace the file in one step, so that a reader never sees half a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".tmp-{path.name}-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path
