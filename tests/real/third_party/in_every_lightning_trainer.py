"""A pytest plugin: every Lightning `Trainer` that a suite makes gets our callback.

`pytest -p in_every_lightning_trainer --ckpt-trainers FOLDER` with this folder on the path; `suite.py` compares.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ckpt import AdaptiveCheckpoint


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plugin's options."""
    group = parser.getgroup("ckpt-engine")
    group.addoption("--ckpt-trainers", metavar="FOLDER", help="Add our callback to every Trainer; snapshots go here.")
    group.addoption("--ckpt-outcomes", metavar="FILE", help="Append a line of JSON for each test.")
    group.addoption("--ckpt-only", metavar="FILE", help="Run only the tests whose names this JSON list has.")


def pytest_configure(config: pytest.Config) -> None:
    """Change what a Trainer is made of, and write down what becomes of each test."""
    folder = config.getoption("ckpt_trainers")
    if folder:
        config.add_cleanup(add_to_every_trainer(Path(folder)))
    outcomes = config.getoption("ckpt_outcomes")
    if outcomes and not hasattr(config, "workerinput"):  # xdist's controller hears of all tests
        config.pluginmanager.register(Outcomes(Path(outcomes)), "ckpt-outcomes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are not asked for."""
    file = config.getoption("ckpt_only")
    if not file:
        return
    wanted = frozenset(json.loads(Path(file).read_text()))
    left_out = [item for item in items if item.nodeid not in wanted]
    items[:] = [item for item in items if item.nodeid in wanted]
    config.hook.pytest_deselected(items=left_out)


def add_to_every_trainer(folder: Path) -> Callable[[], None]:
    """From now on each Trainer has our callback, with snapshots of each step in a folder of its own; call to undo."""
    original, patch = pl.Trainer.__init__, pytest.MonkeyPatch()

    @functools.wraps(original)
    def with_ours(trainer: pl.Trainer, *args: Any, callbacks: Any = None, **options: Any) -> None:
        given = list(callbacks) if isinstance(callbacks, Iterable) else [] if callbacks is None else [callbacks]
        if not any(isinstance(one, AdaptiveCheckpoint) for one in given):
            place = tempfile.mkdtemp(dir=folder)
            given.append(AdaptiveCheckpoint(place, every_n_steps=1, keep={"last": 1}, writer="thread"))
        original(trainer, *args, callbacks=given, **options)

    patch.setattr(pl.Trainer, "__init__", with_ours)
    return patch.undo


class Outcomes:
    """Appends what was collected, and what became of each test.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._failed: dict[str, str] = {}
        self._skipped: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """How many there are."""
        if session.items:  # xdist's controller collects nothing
            self._write(event="collected", tests=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failed test."""
        if report.failed:
            self._write(event="test", id=report.nodeid, outcome="failed", line=first_line(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of the three phases of a test is over."""
        if report.failed:
            self._failed.setdefault(report.nodeid, first_line(report))
        elif report.skipped:
            self._skipped.add(report.nodeid)
        if report.when == "teardown":
            line = self._failed.pop(report.nodeid, None)
            passed = "skipped" if report.nodeid in self._skipped else "passed"
            self._write(event="test", id=report.nodeid, outcome=passed if line is None else "failed", line=line or "")

    def _write(self, **values: Any) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")


def first_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The error of a failed test, without its traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext.strip().rpartition("\n")[2]
    return next((line for line in text.splitlines() if line.strip()), "")
