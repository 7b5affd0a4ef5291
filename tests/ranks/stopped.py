"""One life of a run of several ranks: started, watched by its traces, stopped; and what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.ranks.launch import REPOSITORY, Launcher

SIZE = 2
PATIENCE_SECONDS = 120.0
EPOCHS = 3
BATCHES = EPOCHS * 8
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", str(SIZE), "--standalone"]
WAYS = {
    "script": ("lightning", []),
    "torchrun": ("lightning", TORCHRUN),
    "accelerate": ("accelerate", TORCHRUN),
    "plain": ("plain", TORCHRUN),
}


def job_of(folder: Path, life: int, loop: str, **changes: Any) -> dict[str, Any]:
    """A job of `stop_run`; a resumed life must not depend on its seed."""
    return {
        "loop": loop,
        "root": str(folder / "run"),
        "trace": str(folder / f"trace{life}"),
        "size": SIZE,
        "epochs": EPOCHS,
        "pace": 0.05,
        "seed": 1000 * life,
        **changes,
    }


class Traces:
    """What the ranks of one life have written so far."""

    def __init__(self, job: dict[str, Any], log: Callable[[], str]) -> None:
        self._job = job
        self.log = log

    def lines(self, rank: int) -> list[str]:
        path = Path(f"{self._job['trace']}.{rank}")
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def batches(self, rank: int) -> list[str]:
        return [line for line in self.lines(rank) if line[0].isdigit()]

    def pid(self, rank: int) -> int:
        return int(self.lines(rank)[0].split()[1])

    def exit(self, rank: int) -> str | None:
        """The exit status as the rank has said it; None: it has come to its end."""
        return next((line.split()[1] for line in self.lines(rank) if line.startswith("exit ")), None)

    def weights(self) -> Any:
        line = self.lines(0)[-1]  # buffers of batch norm are each rank's own
        assert line.startswith("end "), self.log()
        return json.loads(line[4:])

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for something; fails with the log."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.002)

    def reach(self, batches: int) -> None:
        """Wait until every rank has begun so many batches."""
        self.until(lambda: all(len(self.batches(rank)) >= batches for rank in range(SIZE)))


def snapshots(folder: Path) -> list[tuple[int, str]]:
    """Step and reason of all that exist, oldest first."""
    return [(info.step, info.reason) for info in Repository(open_storage(folder / "run")).list()]


def gone(pids: list[int]) -> bool:
    """Whether none of these processes is left, within a while: writers finish by themselves."""
    left = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            one = psutil.Process(pid)
            left += [one] if one.status() != psutil.STATUS_ZOMBIE else []
    return not psutil.wait_procs(left, PATIENCE_SECONDS)[1]


class Lives:
    """Lives of one run, forked from one server."""

    def __init__(self, launcher: Launcher, loop: str, folder: Path) -> None:
        self.launcher, self.loop, self._folder = launcher, loop, folder
        self._number = 0
        self._joined = True
        self.pids: list[int] = []

    def start(self, **changes: Any) -> Traces:
        job = job_of(self._folder, self._number, self.loop, **changes)
        log = self._folder / f"log{self._number}"
        self._number += 1
        self._joined = False
        self.pids = self.launcher.start(job, SIZE, log, lets_end=True)
        return Traces(job, lambda: "".join(Path(f"{log}.{rank}").read_text() for rank in range(SIZE)))

    def join(self) -> list[int]:
        """The exit statuses."""
        self._joined = True
        return self.launcher.join()

    def kill(self) -> None:
        """End a life that was not joined: its test has failed."""
        if not self._joined:
            for pid in self.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.join()

    def reference(self, folder: Path, **changes: Any) -> Account:
        """The account of another run, without a stop."""
        return Account(Lives(self.launcher, self.loop, folder).whole(**changes))

    def whole(self, **changes: Any) -> Traces:
        """A life without a stop."""
        traces = self.start(pace=0.0, **changes)
        assert self.join() == [0] * SIZE, traces.log()
        return traces


class Launched:
    """A life that a launcher of its own has started."""

    def __init__(self, way: str, folder: Path, number: int, **changes: Any) -> None:
        loop, launcher = WAYS[way]
        job = job_of(folder, number, loop, **changes)
        log = folder / f"log{number}"
        self.traces = Traces(job, log.read_text)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "tests.ranks.stop_run", json.dumps(job)],
                stdout=file,
                stderr=file,
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def signal(self, target: str) -> None:
        """SIGTERM to a rank, to the process groups of both, or to who has started them."""
        ranks = [self.traces.pid(rank) for rank in range(SIZE)]
        if target == "launcher":
            self.process.terminate()
        elif target == "all":
            for group in {os.getpgid(pid) for pid in ranks}:
                os.killpg(group, signal.SIGTERM)
        else:
            os.kill(ranks[int(target)], signal.SIGTERM)

    def end(self) -> int:
        return self.process.wait(2 * PATIENCE_SECONDS)


class Account:
    """Adds up lives: together they are the uninterrupted run, and not one batch is trained twice."""

    def __init__(self, reference: Traces) -> None:
        self._expected = [reference.batches(rank) for rank in range(SIZE)]
        self._weights = reference.weights()
        assert [len(one) for one in self._expected] == [BATCHES] * SIZE
        self.step = 0

    def add(self, life: Traces, *, ends: bool = False, fails: bool = False) -> None:
        """One more life.

        Args:
            ends: it comes to the end of the training.
            fails: its last batch is not trained to its end.
        """
        counts = {len(life.batches(rank)) for rank in range(SIZE)}
        assert len(counts) == 1, f"the ranks stopped after different steps: {counts}"
        for rank in range(SIZE):
            found = life.batches(rank)
            assert found == self._expected[rank][self.step : self.step + len(found)], life.log()
        self.step += counts.pop() - fails
        if ends:
            assert self.step == BATCHES
            assert life.weights() == self._weights
