"""Crash after crash of a training that keeps each step in memory: little is lost, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from pathlib import Path

import pytest

from ckpt_engine.writer import unix_sockets
from tests.writer.memory_trainer import DURABLE_EVERY
from tests.writer.staged import WAIT_SECONDS, check_all
from tests.writer.test_memory import attach, step_in_memory, trainer
from tests.writer.test_process import gone
from tests.writer.test_storm import kill, rows


def storm(folder: Path, crashes: int, seed: int) -> None:
    """Kill the trainer, its writer, or both, at random moments, and go on from what is found.

    While its writer lives, a killed trainer loses nothing that was in memory. Without its writer it loses what is not
    durable. The next one begins while the writer of the one before may still be at work.
    """
    root, log = folder / "run", folder / "run.log"
    chance = random.Random(seed)
    step = from_memory = 0
    for crash in range(crashes):
        begun = len(rows(log))
        with trainer(root, "storm", TEST_STEP=str(step), TEST_LINGER="600") as process:
            wanted = chance.choice([1, 2, 3, 8, 21, 40])
            while process.poll() is None and len(rows(log)) < begun + wanted:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.002)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(chance.uniform(0.0, 0.02))
            writer = next((row["writer"] for row in rows(log)[begun:] if "writer" in row), None)
            # What a killed writer leaves of its socket the next one removes: the last writer must end by itself.
            first = "trainer" if crash in (0, crashes - 1) else chance.choice(["trainer", "trainer", "both"])
            if first == "both" and writer is not None:
                kill(writer)
            kill(process.pid)
            process.wait(WAIT_SECONDS)
        newest = max((row["kept"] for row in rows(log)[begun:] if "kept" in row), default=0)
        place = attach(str(root), WAIT_SECONDS)
        if place is None:
            assert first == "both" or newest == 0
            for row in rows(log):
                assert "writer" not in row or gone(row["writer"])
            found = max((info.step for info in check_all(root)), default=0)
            assert found >= max(step, newest // DURABLE_EVERY * DURABLE_EVERY - 2 * DURABLE_EVERY)
        else:
            found = step_in_memory(place)
            assert newest <= found <= newest + 1 or (newest == 0 and found >= step), (newest, found, step)
            from_memory += 1
            place.release(bye=chance.random() < 0.5)  # or not, like a restart that is killed
        step = found
    assert from_memory > crashes / 3
    nothing_is_left(root, [row["writer"] for row in rows(log) if "writer" in row])
    assert max(info.step for info in check_all(root)) == step


def nothing_is_left(root: Path, writers: list[int]) -> None:
    """After a last `bye` no process and no socket; the memory was theirs."""
    place = attach(str(root), WAIT_SECONDS)
    if place is not None:
        place.release()
    for pid in writers:
        assert gone(pid)
    assert not [one for one in unix_sockets.folders() if Path(one, unix_sockets.name_of(str(root))).exists()]
    assert os.fspath(root) not in processes()


def processes() -> str:
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(found)


def test_five_crashes(tmp_path: Path) -> None:
    """A short storm of crashes."""
    storm(tmp_path, crashes=5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_crashes(tmp_path: Path) -> None:
    """A long storm of crashes."""
    storm(tmp_path, crashes=100, seed=2)
