"""A real terminal of 80 columns: what a run says there of ours is little, and fits."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.recipes.lives import PATIENCE_SECONDS, REPOSITORY
from tests.recipes.test_quickstart import script

OURS = "snapshot|resumed|durable"
SLOW = ("opening ", "waiting for ", "reading ")
"""How lines begin that say what takes more than three seconds, as everything may on a machine that is busy."""


def watch(command: list[object], folder: Path) -> tuple[str, int]:
    """What a command writes to its terminal, and its status."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", TERM="xterm", COLUMNS="80")
        os.execv(str(command[0]), list(map(str, command)))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown, deadline = b"", time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                shown += os.read(terminal, 1 << 16)
            except OSError:  # the terminal of a process that is gone
                return shown.decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.kill(child, 9)
    raise AssertionError(shown.decode())


def short(text: str) -> str:
    """A quickstart that ends by itself, soon."""
    return text.replace("1_000_000", "64_000").replace("100_000", "800")


def plain(shown: str) -> list[str]:
    """Its lines without colours; a bar that is drawn again is another one."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["Lightning", "Accelerate", "transformers", "Plain loop"])
def test_a_run_says_little_and_the_bar_is_one_line(role: str, tmp_path: Path) -> None:
    """Four lines of ours at most, from the first start to the end, and a rerun that has nothing to do as well."""
    (tmp_path / "train.py").write_text(short(script(role)))
    for _ in range(2):
        shown, status = watch([sys.executable, "-W", "ignore", "train.py"], tmp_path)
        assert status == 0, shown
        said = [line for line in plain(shown) if re.search(OURS, line) and not line.startswith(SLOW)]
        assert 1 <= len(said) <= 4, said
        drawn = [
            part for part in re.split(r"\n|`Trainer", "\n".join(plain(shown))) if "ckpt=" in part or "ckpt:" in part
        ]
        assert [part for part in drawn if len(part.rstrip()) > 80 or not re.search(r"ckpt[=:] ?\d+\b", part)] == []
        assert drawn or role != "Lightning" or "nothing was left" in shown, shown


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_run_resumes_from_is_a_line_of_its_own(tmp_path: Path) -> None:
    """It does not stand at the end of a progress bar, which would be wider than the terminal with it."""
    pytest.importorskip("rich")
    for end in (", max_steps=50", ""):
        code = short(script("Lightning")).replace("max_epochs=3", f"max_epochs=1{end}")
        (tmp_path / "train.py").write_text(code)
        shown, status = watch([sys.executable, "-W", "ignore", "train.py"], tmp_path)
        assert status == 0, shown
    said = [line for line in plain(shown) if "resumed at step 50" in line]
    assert [line for line in said if line.startswith("resumed at step 50")] == said != [], shown
