"""What one process takes over from an earlier one, of any trainer: what it collects for the report of a resume, and how
that is published, as a line and a file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_engine.engine import Engine
from ckpt_engine.loop.capture import (
    Elastic,
    numbers_of,
    own_part,
)
from ckpt_engine.observe.events import announce
from ckpt_engine.observe.resume_report import (
    FILE_NAME,
    NotRestored,
    Rejected,
    Replay,
    Restored,
    ResumeReport,
    replace_file,
    resumed_from_memory,
)
from ckpt_engine.observe.units import place
from ckpt_engine.restore.load import Loaded


class Resume:
    """What one process takes over from an earlier one, and the report of it, of any trainer.

    Args:
        engine: opens the run's folder.
        log: of the adapter.
        folder: where the report is written if the run's own place is not a local folder.
    """

    def __init__(self, engine: Engine, log: logging.Logger, folder: Callable[[], str | Path]) -> None:
        self._engine, self._log, self._folder = engine, log, folder
        self._own: Mapping[str, Any] = {}
        self._elastic: Elastic | None = None
        self._loaded: Loaded | None = None
        """The snapshot, until the report of it is published."""
        self._restored, self._missing, self._notes = list[Restored](), list[NotRestored](), list[str]()
        self._report: ResumeReport | None = None

    def _open(self, state: dict[str, Any], loaded: Loaded) -> dict[str, Any] | None:
        """Begin the report, and take our own entries out of the state of a snapshot; None: others have made it."""
        self._loaded = loaded
        found = own_part(state, loaded, numbers_of(self._engine.ranks), self._engine.config.rng)
        if found is None:
            return None
        own, notes, self._elastic, differing = found
        self._notes += notes
        self._missing += differing
        self._engine.expect_replay(loaded)
        if (recorder := self._engine.recorder) is not None:
            recorder.told = self._replayed
        return own

    def _replayed(self, replay: Replay) -> None:
        """What the repeated steps have shown."""
        if self._report is not None:
            self._report = replace(self._report, replay=replay)
            write(self._report, self._report_folder, self._log, self._rank)
        if replay.first is not None:
            self.add([], [NotRestored("repeated steps", replay.text())])
        else:
            self._announce(replay.text())

    def add(self, restored: Sequence[Restored], missing: Sequence[NotRestored]) -> None:
        """More for the report, published or not."""
        self._restored += restored
        self._missing += missing
        if self._loaded is not None:
            return
        for row in missing:
            self._log.warning("not restored: %s: %s", row.name, row.why)
        if self._report is not None and (restored or missing):
            both = tuple(self._restored), tuple(self._missing)
            self._report = replace(self._report, restored=both[0], not_restored=both[1])
            write(self._report, self._report_folder, self._log, self._rank)

    def note(self, text: str) -> None:
        """One more sentence for the report."""
        self._notes.append(text)

    def publish(self) -> None:
        """Log and write the report, once."""
        if self._loaded is None:
            return
        loaded, self._loaded = self._loaded, None
        self._conclude()
        self._report = report_of(
            self._engine.root_url, loaded, self._restored, self._missing, self._notes, self._engine.rhythm
        )
        if (recorder := self._engine.recorder) is not None:
            self._report = replace(self._report, replay=recorder.replay)
        publish(self._report, self._report_folder, self._log, rank=self._rank)

    def _conclude(self) -> None:
        """Add to the lists what is known last."""
        raise NotImplementedError

    @property
    def _report_folder(self) -> Path:
        url = place(self._engine.root_url)
        return Path(url if "://" not in url else self._folder())

    @property
    def _rank(self) -> int:
        return numbers_of(self._engine.ranks)[0]

    def _announce(self, text: str) -> None:
        if self._rank == 0:
            announce(self._log, text)


def report_of(
    url: str,
    loaded: Loaded,
    restored: Sequence[Restored] = (),
    missing: Sequence[NotRestored] = (),
    notes: Sequence[str] = (),
    rhythm: str = "",
) -> ResumeReport:
    """The report of a resume.

    Args:
        url: the run's root.
        loaded: the snapshot.
        rhythm: how often snapshots are taken from here on, and why.
    """
    info = loaded.info
    if loaded.from_memory:
        notes = [resumed_from_memory(loaded.lost_steps), *notes]
    return ResumeReport(
        url=url,
        snapshot=info.id,
        step=info.step,
        epoch=info.epoch,
        restored=tuple(restored),
        not_restored=tuple(missing),
        rejected=tuple(Rejected(r.snapshot, r.code, r.reason) for r in loaded.rejected),
        notes=(*notes, *loaded.notes),
        seconds=loaded.seconds,
        read_bytes=loaded.read_bytes,
        place="" if loaded.from_memory else loaded.place,
        away=loaded.left_out,
        rhythm=rhythm,
    )


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


def write(report: ResumeReport, folder: Path, log: logging.Logger, rank: int = 0) -> Path | None:
    """The file alone, of the first rank."""
    if rank:
        return None
    try:
        return replace_file(folder / FILE_NAME, json.dumps(report.to_json(), indent=2) + "\n")
    except OSError as err:
        log.warning("the resume report could not be written to %s: %s", folder, err)
        return None
