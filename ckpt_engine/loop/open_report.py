"""The report of a resume, from the first entry to its publication."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_engine.engine import Engine
from ckpt_engine.loop.capture import numbers_of
from ckpt_engine.observe.events import announce
from ckpt_engine.observe.resume_report import (
    FILE_NAME,
    NotRestored,
    Replay,
    Restored,
    ResumeReport,
    replace_file,
    resumed_from_memory,
)
from ckpt_engine.observe.units import place
from ckpt_engine.restore.changes import UNCHANGED, Changes
from ckpt_engine.restore.load import Loaded


class OpenReport:
    """The report of a resume: published once, and its file is written again where more becomes known after that.

    Args:
        engine: of the run.
        log: of the adapter.
        folder: where it is written if the run's own place is not a local folder.

    Attributes:
        is_open: a snapshot was loaded, and the report of it is not published yet.
        restored, missing, notes: for the report.
    """

    def __init__(self, engine: Engine, log: logging.Logger, folder: Callable[[], str | Path]) -> None:
        self._engine, self._log, self._folder = engine, log, folder
        self.rank = numbers_of(engine.ranks)[0]
        self.is_open = False
        self.restored, self.missing, self.notes = list[Restored](), list[NotRestored](), list[str]()
        self._published: ResumeReport | None = None

    def announce(self, text: str) -> None:
        """Say it to the user now, once for all ranks."""
        if self.rank == 0:
            announce(self._log, text)

    def add(self, restored: Sequence[Restored], missing: Sequence[NotRestored]) -> None:
        """More for the report, published or not."""
        self.restored += restored
        self.missing += missing
        if self.is_open:
            return
        self.warn(missing)
        if restored or missing:
            self._write_again(restored=tuple(self.restored), not_restored=tuple(self.missing))

    def warn(self, missing: Sequence[NotRestored]) -> None:
        """Log what is not restored."""
        for row in missing:
            self._log.warning("not restored: %s: %s", row.name, row.why)

    def add_replay(self, replay: Replay) -> None:
        """What the repeated steps have shown."""
        self._engine.times.replay = replay
        self._write_again(replay=replay)
        if replay.first is not None:
            self.add([], [NotRestored("repeated steps", replay.text())])
        else:
            self.announce(replay.text())

    def publish(self) -> None:
        """Log and write it."""
        self.is_open = False
        engine, loaded = self._engine, self._engine.loaded
        assert loaded is not None
        self._published = report_of(
            engine.root_url, loaded, self.restored, self.missing, self.notes, engine.rhythm, engine.changes
        )
        if (recorder := engine.recorder) is not None:
            engine.times.replay = recorder.proof.replay
            self._published = replace(self._published, replay=recorder.proof.replay)
        publish(self._published, folder_of_report(engine.root_url, self._folder()), self._log, rank=self.rank)

    def _write_again(self, **more: Any) -> None:
        if self._published is not None and self.rank == 0:
            self._published = replace(self._published, **more)
            write(self._published, folder_of_report(self._engine.root_url, self._folder()), self._log)


def report_of(
    url: str,
    loaded: Loaded,
    restored: Sequence[Restored] = (),
    missing: Sequence[NotRestored] = (),
    notes: Sequence[str] = (),
    rhythm: str = "",
    changes: Changes = UNCHANGED,
) -> ResumeReport:
    """The report of a resume.

    Args:
        url: the run's root.
        loaded: the snapshot.
        rhythm: how often snapshots are taken from here on, and why.
        changes: that were made.
    """
    info = loaded.info
    if loaded.from_memory:
        notes = [resumed_from_memory(loaded.lost_steps), *notes]
    return ResumeReport(
        url=url,
        snapshot=info.id,
        step=0 if changes.restarts else info.step,
        epoch=None if changes.restarts else info.epoch,
        restored=tuple(restored),
        not_restored=tuple(missing),
        rejected=loaded.rejected,
        notes=(*notes, *loaded.notes),
        seconds=loaded.seconds,
        read_bytes=loaded.read_bytes,
        place="" if loaded.from_memory else loaded.place,
        away=loaded.left_out,
        rhythm=rhythm,
        changes=tuple(changes.rows),
    )


def folder_of_report(root_url: str, other: str | Path) -> Path:
    """Where the report of a resume goes: the run's own place if that is a local folder, else `other`."""
    url = place(root_url)
    return Path(url if "://" not in url else other)


def publish(report: ResumeReport, folder: Path, log: logging.Logger, rank: int = 0) -> Path | None:
    """Log the report to `log` and write it to `folder` as `resume-report.json`; returns the file.

    Of several ranks the first one does. Another one only warns of what it could not restore.

    A folder that cannot be written costs a warning, never the run.

    Args:
        rank: of this process.
    """
    if rank:
        if report.not_restored:
            log.warning("rank %d: %s", rank, report.text())
        return None
    if report.not_restored or report.rejected or report.away:
        log.warning("%s", report.text())
    else:
        announce(log, report.text(), line=report.line())
    return write(report, folder, log)


def write(report: ResumeReport, folder: Path, log: logging.Logger) -> Path | None:
    """The file alone."""
    try:
        return replace_file(folder / FILE_NAME, json.dumps(report.to_json(), indent=2) + "\n")
    except OSError as err:
        log.warning("the resume report could not be written to %s: %s", folder, err)
        return None
