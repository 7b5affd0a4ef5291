"""A notebook: an interrupted cell ends without noise, and the same cell run again goes on."""

from __future__ import annotations

import code
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.recipes.lives import PATIENCE_SECONDS, lines, trained, unbroken
from tests.support.curves import wait_for_a_snapshot

CELL = """
from tests.recipes.train import train
train({root!r}, {lines!r}, {pace})
"""


class Notebook(code.InteractiveInterpreter):
    """Runs cells one after the other in this process, as a kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = ""

    def write(self, data: str) -> None:
        self.shown += data

    def run_cell(self, source: str) -> str:
        """What it shows besides what it prints."""
        self.shown = ""
        try:
            self.runcode(compile(source, "<cell>", "exec"))
        except SystemExit:
            self.shown += "SystemExit"
        except KeyboardInterrupt:
            self.shown += "KeyboardInterrupt"
        return self.shown


def interrupt_after(folder: Path, entries: int) -> threading.Thread:
    """The stop button, once the cell has trained so much."""

    def press() -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(lines(folder)) < entries and time.monotonic() < deadline:
            time.sleep(0.005)
        wait_for_a_snapshot(folder / "run")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.long
def test_a_cell_that_is_run_again_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice interrupted, no step is lost or trained twice."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch.distributed puts its own there
    notebook = Notebook()
    cell = CELL.format(root=str(tmp_path / "run"), lines=str(tmp_path / "lines"), pace=0.02)
    for _ in range(2):
        button = interrupt_after(tmp_path, len(lines(tmp_path)) + 8)
        shown = notebook.run_cell(cell)
        button.join(PATIENCE_SECONDS)
        assert "KeyboardInterrupt" in shown
        assert "SystemExit" not in shown
    assert notebook.run_cell(cell) == ""
    steps = [int(line.split()[0]) for line in lines(tmp_path) if line[0].isdigit()]
    assert steps == sorted(set(steps))
    assert trained(tmp_path) == unbroken()
