"""A real SIGTERM to a run of two ranks by every way to start it: to one rank, to the other, to all, to the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.launch import writers_of
from tests.ranks.stopped import SIZE, Account, Traces, gone, job_of, snapshots

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 240.0
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", str(SIZE), "--standalone"]
WAYS = {
    "script": ("lightning", []),
    "torchrun": ("lightning", TORCHRUN),
    "accelerate": ("accelerate", TORCHRUN),
    "plain": ("plain", TORCHRUN),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Life:
    """A run that its launcher has started."""

    def __init__(self, way: str, folder: Path, number: int, pace: float = 0.05) -> None:
        loop, launcher = WAYS[way]
        job = job_of(folder, number, loop, pace=pace)
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
        return self.process.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("way", WAYS)
def test_sigterm_loses_nothing(way: str, tmp_path: Path) -> None:
    """All ranks stop after the same step with one last snapshot, say 143, and leave no process; lives add up."""
    (tmp_path / "reference").mkdir()
    reference = Life(way, tmp_path / "reference", 0, pace=0.0)
    assert reference.end() == 0, reference.traces.log()
    account = Account(reference.traces)
    targets = ["1", "0", "all", *(["launcher"] if way != "script" else [])]
    for number, target in enumerate(targets):
        life = Life(way, tmp_path, number)
        life.traces.reach(2)
        ranks = [life.traces.pid(rank) for rank in range(SIZE)]
        processes = [*ranks, *writers_of(ranks)]
        life.signal(target)
        status = life.end()
        log = life.traces.log()
        assert status == (143 if way == "script" else 1), log
        assert [life.traces.exit(rank) for rank in range(SIZE)] == ["143"] * SIZE, log
        account.add(life.traces)
        assert snapshots(tmp_path)[number:] == [(account.step, "signal")], log
        assert "SIGKILL" not in log and "forcefully" not in log.lower(), log
        assert gone(processes), log
    last = Life(way, tmp_path, len(targets), pace=0.0)
    assert last.end() == 0, last.traces.log()
    account.add(last.traces, ends=True)
