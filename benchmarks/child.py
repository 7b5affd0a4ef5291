"""Measure one bar in a process of its own, so that no bar inherits the memory, threads or caches of another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from benchmarks import bars
from benchmarks.machine import Disturbance
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, from_json, to_json

TIMEOUT_SECONDS = 3600.0
ERROR_LINES = 30


class BarError(Exception):
    """A bar could not be measured."""


def measure(name: str, scale: Scale, folder: Path, say: Callable[[str], object]) -> tuple[BarResult, dict[str, float]]:
    """Measure a bar; also the shares of the processors that others used meanwhile.

    Raises:
        BarError: the process failed or ran for more than an hour.
    """
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as temp:
        out, errors = Path(temp) / "result.json", Path(temp) / "stderr"
        command = [sys.executable, "-m", "benchmarks.child", name, scale.value, str(folder), str(out)]
        disturbance = Disturbance()
        with (
            errors.open("w") as stderr,
            subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
        ):
            timer = threading.Timer(TIMEOUT_SECONDS, process.kill)
            timer.start()
            try:
                for line in process.stdout or ():
                    say(line.strip())
                status = process.wait()
            finally:
                timer.cancel()
                process.kill()
        if status != 0:
            raise BarError(f"its process ended with status {status}\n{_tail(errors)}")
        return from_json(json.loads(out.read_text())), disturbance.shares()


def _tail(errors: Path) -> str:
    return "\n".join(errors.read_text(errors="replace").splitlines()[-ERROR_LINES:])


def _main(name: str, scale: str, folder: str, out: str) -> None:
    # The pipe on stdout carries progress only: whatever libraries print goes to stderr.
    progress = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    with progress:
        bench = Bench(Path(folder), Scale(scale), lambda line: progress.write(line + "\n"))
        Path(out).write_text(json.dumps(to_json(bars.runner(name)(bench))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
