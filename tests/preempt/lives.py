"""One life of a training process: started, watched by its trace, stopped; and what it left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.lightning.cases import CASES
from tests.lightning.runs import fit
from tests.lightning.test_kill import Trainers, log, read
from tests.preempt.waiting import go_file

PATIENCE_SECONDS = 60.0


class Life:
    """A training process whose run is at `folder/run`; the fork is over when `join` was called.

    Args:
        number: of the life; a resumed one must not depend on its seed.
        job: more of it; see `waiting`.
    """

    def __init__(self, trainers: Trainers, folder: Path, case: str, number: int = 0, **job: Any) -> None:
        self.trace = folder / f"{number}.trace"
        self.root = folder / "run"
        self._trainers = trainers
        self.pid = trainers.start(
            {
                "case": case,
                "root": str(self.root),
                "trace": str(self.trace),
                "seed": 1000 * number,
                "pace": 0.02,
                **job,
            }
        )

    def go(self) -> None:
        """Let a run that was started with `wait_after` go on, once the test has signalled it."""
        go_file(self.trace).touch()

    def join(self) -> int:
        """The exit status."""
        return self._trainers.join()

    def reaches(self, entries: int) -> None:
        """Wait until the trace has so many entries."""
        self.until(lambda: len(self.lines) >= entries)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for something; fails with the log."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.log
            time.sleep(0.002)

    @property
    def lines(self) -> list[str]:
        return read(self.trace)

    @property
    def log(self) -> str:
        return log(self.trace)

    @property
    def steps(self) -> list[int]:
        """Of the snapshots that exist, oldest first."""
        return [one.step for one in Repository(open_storage(self.root)).ids()]


@cache
def uninterrupted(case: str) -> tuple[str, ...]:
    """The trace of a run without a stop."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the trainers
    try:
        reference = fit(CASES[case])
    finally:
        torch.set_num_threads(threads)
    return (
        *(repr(entry) for entry in reference.trace),
        repr(("digest", json.dumps(reference.digest, sort_keys=True))),
    )
