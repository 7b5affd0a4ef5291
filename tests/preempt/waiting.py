"""Lightning runs that wait until a test has signalled or killed them: `python -m tests.preempt.waiting` serves jobs.

Jobs are those of `tests.lightning.train_script`. With `wait_after` a run that has so many entries in its trace goes on
with no batch before the file `<trace>.go` is there: however long somebody takes to act on a run, it is not over.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.lightning import train_script
from tests.lightning.test_kill import Trainers
from tests.support.trainers import read, serve

PATIENCE_SECONDS = 120.0


class WaitingTrainers(Trainers):
    """As `Trainers`, of runs that wait."""

    def __init__(self) -> None:
        super(Trainers, self).__init__("tests.preempt.waiting")


def go_file(trace: Path) -> Path:
    """The file that lets a run go on."""
    return trace.with_name(f"{trace.name}.go")


class WaitingPace(train_script.Pace):
    """Waits before a backward pass."""

    trace = Path()
    wait_after = 0

    def on_before_backward(self, *args: Any) -> None:
        super().on_before_backward(*args)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(read(self.trace)) >= self.wait_after and not go_file(self.trace).exists():
            assert time.monotonic() < deadline, "the file that lets this run go on does not come"
            time.sleep(0.002)


def run(job: dict[str, Any]) -> None:
    """One training process."""
    if "wait_after" in job:
        WaitingPace.trace, WaitingPace.wait_after = Path(job["trace"]), job["wait_after"]
        train_script.Pace = WaitingPace  # type: ignore[misc]
    train_script.run(job)


if __name__ == "__main__":
    serve(run)
