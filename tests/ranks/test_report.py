"""Of several ranks one reports what was resumed; the others speak only of what they could not restore."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from ckpt_engine.loop.open_report import publish
from ckpt_engine.observe.resume_report import FILE_NAME, NotRestored, ResumeReport

LOG = logging.getLogger("tests.ranks.report")


def test_one_rank_reports(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 writes the file and says so; another rank with nothing to complain of is silent."""
    report = ResumeReport(url="file:///run", snapshot="a", step=7)
    with caplog.at_level(logging.INFO):
        assert publish(report, tmp_path, LOG, rank=1) is None
        assert not caplog.records
        assert not list(tmp_path.iterdir())
        assert publish(report, tmp_path, LOG) == tmp_path / FILE_NAME
    assert "resumed at step 7" in caplog.text


def test_who_may_read_the_report_says_the_umask(tmp_path: Path) -> None:
    """As with every other file of a run: a colleague who may read the run may read why it lacks something."""
    before = os.umask(0o027)
    try:
        publish(ResumeReport(url="file:///run", snapshot="a", step=7), tmp_path, LOG)
    finally:
        os.umask(before)
    assert stat.filemode((tmp_path / FILE_NAME).stat().st_mode) == "-rw-r-----"


def test_what_another_rank_could_not_restore_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be different on each rank, and must not be lost."""
    report = ResumeReport(url="file:///run", snapshot="a", step=7, not_restored=(NotRestored("streams", "no GPU"),))
    publish(report, tmp_path, LOG, rank=3)
    assert "rank 3: " in caplog.text
    assert "no GPU" in caplog.text
