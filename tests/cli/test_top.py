"""`ckpt top` in a terminal: a screen that fits, changes in place, and leaves the terminal as it was."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Engine
from ckpt_engine.observe.resume_report import Replay
from tests.cli.conftest import RunFolder

PATIENCE_SECONDS = 120.0
CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MEASURED = {"step": 0.5, "stall_each": 0.012, "overhead": 0.004, "budget": 0.01, "until_next": 40.0}


class Watched:
    """`ckpt top` in a terminal of its own."""

    def __init__(self, root: Path, columns: int, rows: int) -> None:
        self.keyboard, self.device = os.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.device)
        self.out = ""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "ckpt_engine.cli.main", "top", root, "--every", "0.2"],
            stdin=self.device,
            stdout=self.device,
            stderr=self.device,
        )

    def resize(self, columns: int, rows: int) -> None:
        termios.tcsetwinsize(self.device, (rows, columns))

    def read(self) -> None:
        """What it has written by now."""
        while select.select([self.keyboard], [], [], 0.05)[0]:
            self.out += os.read(self.keyboard, 1 << 16).decode(errors="replace")

    @property
    def frames(self) -> list[list[str]]:
        """The rows of each whole picture, without colours."""
        return [CODE.sub("", one).split("\r\n") for one in self.out.split("\x1b[H")[1:-1]]

    def until(self, seen: Callable[[str], bool]) -> list[str]:
        """The first picture that is as wanted, from now on."""
        self.read()
        known, deadline = len(self.frames), time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            self.read()
            for rows in self.frames[known:]:
                if seen("\n".join(rows)):
                    return rows
        raise AssertionError(self.out[-3000:])

    def end(self, key: bytes) -> int:
        """Type a key; how it ended."""
        os.write(self.keyboard, key)
        return self.process.wait(PATIENCE_SECONDS)


@contextmanager
def watched(root: Path, columns: int = 80, rows: int = 24) -> Iterator[Watched]:
    one = Watched(root, columns, rows)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait(PATIENCE_SECONDS)
        os.close(one.device)
        os.close(one.keyboard)


@pytest.fixture(params=[20, 120])
def root(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The path of a run, of so many characters."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    yield base / ("r" * (request.param - len(str(base)) - 1))
    shutil.rmtree(base)


@pytest.fixture
def live(root: Path) -> Iterator[Engine]:
    """A run on two tiers that trains in this process, and has two snapshots."""
    engine = Engine(tiers=[root, root.with_name(f"{root.name[:-1]}f")])
    engine.paced_by(lambda: {"interval_steps": 38, "why": "every 38 steps: set by budget"})
    engine.times.measured = lambda: MEASURED
    engine.times.replay = Replay("exact", 5, "5 of 5 repeated steps gave the same batches and weights")
    for step in (1_200, 1_238):
        engine.save({"weights": torch.zeros(3)}, step=step).wait(PATIENCE_SECONDS)
    yield engine
    engine.close()


def unfit(rows: list[str], columns: int = 80, most: int = 24) -> list[str]:
    """Rows that a terminal would wrap; all of them where there are too many."""
    return rows if len(rows) > most else [row for row in rows if len(row) > columns]


@pytest.mark.long
def test_a_live_run_fills_a_screen_that_fits(live: Engine, root: Path) -> None:
    """Tiers with bars and rates, interval, next snapshot, overhead, goodput and events; no row wraps."""
    with watched(root) as screen:
        rows = screen.until(lambda text: "next snapshot in 40 s" in text and text.count("1,238") >= 2)
        assert [frame for frame in screen.frames if unfit(frame)] == []
        text = "\n".join(rows)
        near = next(row for row in rows if row.startswith("1 "))
        assert "working" in near and "1,238" in near and "█" * 14 in near and re.search(r"\d [kM]?B/s", near)
        assert "0.4 % of at most 1 %; a stall of 12 ms" in text
        assert "snapshots every 38 steps: set by budget" in text
        assert re.search(r"goodput .* of ", text) and "its trainer lives" in text
        events = rows[rows.index("last events") + 1 : -1]
        assert 1 <= len(events) <= 5 and all(
            re.match(r"\d\d:\d\d:\d\d  step 1238: durable on ", one) for one in events[:1]
        )
        assert not re.search(r"s\d{10}", "".join(events)), "no ids"
        assert rows[-1] == "q or Ctrl-C ends it"
        assert screen.end(b"\x03") == 0
        screen.read()
        assert screen.out.startswith("\x1b[?1049h") and screen.out.endswith("\x1b[?25h\x1b[?1049l")
        assert termios.tcgetattr(screen.device) == screen.before
        assert screen.out.count("\x1b[?1049h") == 1 and "Traceback" not in screen.out


@pytest.mark.long
@pytest.mark.parametrize("root", [20], indirect=True)
def test_a_screen_takes_the_size_that_the_terminal_gets(live: Engine, root: Path) -> None:
    """A narrower and lower one is filled, and q ends it as Ctrl-C does."""
    with watched(root) as screen:
        screen.until(lambda text: "next snapshot" in text)
        screen.resize(50, 10)
        rows = screen.until(lambda text: text.count("\n") < 10)
        assert unfit(rows, 50, 10) == [] and rows[-1] == "q or Ctrl-C ends it"
        assert screen.end(b"q") == 0
        assert termios.tcgetattr(screen.device) == screen.before


@pytest.mark.long
def test_a_run_that_is_not_there_yet_is_waited_for(run_folder: RunFolder, arrays: Any) -> None:
    """A line says so, and a run that comes is shown; a signal to end leaves the terminal as it was."""
    run_folder.add(10, arrays)
    root = run_folder.path.parent / "later"
    with watched(root) as screen:
        rows = screen.until(lambda text: "no run at" in text)
        assert unfit(rows) == []
        run_folder.path.rename(root)
        rows = screen.until(lambda text: "no process writes it now" in text)
        assert "no run at" not in "".join(rows)
        root.rename(run_folder.path)
        rows = screen.until(lambda text: "no run at" in text)
        assert "no process writes it now" in "".join(rows), "what was known stays"
        screen.process.send_signal(signal.SIGTERM)
        assert screen.process.wait(PATIENCE_SECONDS) == 0
        screen.read()
        assert screen.out.endswith("\x1b[?25h\x1b[?1049l")
        assert termios.tcgetattr(screen.device) == screen.before


@pytest.mark.long
def test_without_a_terminal_each_look_is_a_line_of_json(run_folder: RunFolder, arrays: Any) -> None:
    """The same object as that of `ckpt status`, or what went wrong."""
    run_folder.add(10, arrays)
    root = run_folder.path.parent / "later"
    command = [sys.executable, "-m", "ckpt_engine.cli.main", "top", str(root), "--every", "0.1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        looks = map(json.loads, iter(shown.stdout.readline, ""))
        assert "no run at" in next(looks)["error"]
        run_folder.path.rename(root)
        found = next(look for look in looks if "error" not in look)
        assert (found["root"], found["tiers"][0]["snapshots"]) == (f"file://{root}", 1)
        shown.send_signal(signal.SIGINT)
        _, err = shown.communicate(timeout=PATIENCE_SECONDS)
    assert (shown.returncode, err) == (0, "")
