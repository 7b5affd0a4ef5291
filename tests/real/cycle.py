"""The whole cycle of a run: trained, killed with `kill -9`, resumed elsewhere, and equal to a run without a kill."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 600.0
_LOOK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a run.

    Args:
        config: its ckpt.yaml.
        durable: so many snapshots are durable before it is killed; None: it lives on.
        with_writer: whether the writer process dies with it, as if the machine had vanished.
        before: called before it starts.
        ready: what else must be true before it is killed.
    """

    config: Path
    durable: int | None = None
    with_writer: bool = False
    before: Callable[[], object] = lambda: None
    ready: Callable[[], object] = lambda: True


def assert_survives(
    folder: Path, lives: Sequence[Life], steps: int, *, resumes_at_acknowledged: bool = True, seed: int = 0
) -> list[int]:
    """All lives together are the uninterrupted run, bit for bit.

    Args:
        folder: for traces; must be a local one.
        resumes_at_acknowledged: no life begins before the newest snapshot that was acknowledged in an earlier one.

    Returns:
        The step at which each life began.
    """
    chance = random.Random(seed)
    reference = folder / "reference"
    _start(reference, steps, None).wait(PATIENCE_SECONDS)
    expected = _read(reference)
    assert len(expected) == steps + 1, _log(reference)
    acknowledged, began = 0, []
    for number, life in enumerate(lives):
        life.before()
        trace = folder / f"life{number}"
        process = _start(trace, steps, life.config)
        try:
            if life.durable is None:
                assert process.wait(PATIENCE_SECONDS) == 0, _log(trace)
            else:
                _wait_for(process, trace, life.durable, life.ready)
                time.sleep(chance.uniform(0.0, 0.1))  # a random moment, also in the middle of a write or a commit
                _kill(process, life.with_writer)
        finally:
            _kill(process, False)
        lines = _read(trace)
        start = int(lines[0].removeprefix("resumed "))
        trained = [line for line in lines if line.startswith(("step", "digest"))]
        assert trained == expected[start : start + len(trained)], f"life {number} from {start}: {_log(trace)}"
        assert start >= acknowledged or not resumes_at_acknowledged, f"{acknowledged} was acknowledged, {start} found"
        acknowledged = max([acknowledged, *(int(line.split()[1]) for line in lines if line.startswith("durable"))])
        began.append(start)
    assert lines[-1] == expected[-1], "it did not come to its end"
    return began


def _start(trace: Path, steps: int, config: Path | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.real.cycle_trainer", str(trace), str(steps)]
    command += [str(config)] if config else []
    with trace.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)


def _wait_for(process: subprocess.Popen[bytes], trace: Path, durable: int, ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sum(line.startswith("durable") for line in _read(trace)) < durable or not ready():
        assert process.poll() is None, f"it ended before it was killed: {_log(trace)}"
        assert time.monotonic() < deadline, f"not {durable} durable snapshots, or not ready: {_log(trace)}"
        time.sleep(_LOOK_SECONDS)


def _kill(process: subprocess.Popen[bytes], with_writer: bool) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if with_writer else []
    process.kill()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait(PATIENCE_SECONDS)


def _read(trace: Path) -> list[str]:
    """The whole lines of a trace."""
    return trace.read_text().split("\n")[:-1] if trace.exists() else []


def _log(trace: Path) -> str:
    return trace.with_suffix(".log").read_text()[-4000:]
