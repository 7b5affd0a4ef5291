"""What starts a run again: Slurm's requeueing as a stand-in plays it, and torchrun after a dead rank."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.recipes.lives import SCRIPT, Life, arguments, lines, pid, trained, unbroken, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BATCH_SCRIPT = """#!/bin/bash
srun {command} || {{ code=$?; [ $code -eq 143 ] && scontrol requeue "$SLURM_JOB_ID"; exit $code; }}
"""
STAND_INS = {
    "srun": '#!/bin/bash\ntrap "kill -TERM \\$child" TERM\n"$@" & child=$!\nwait $child\nwait $child\n',
    "scontrol": '#!/bin/bash\necho "$@" >> "$QUEUE"\n',
}


def test_a_job_at_the_end_of_its_time_asks_to_be_queued_again(tmp_path: Path) -> None:
    """With `--signal=TERM@120` srun hands the signal on; 143 makes the script of docs/launchers.md queue it again."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    queue, script = tmp_path / "queue", tmp_path / "job.sh"
    command = " ".join([sys.executable, "-m", SCRIPT, *arguments(tmp_path)])
    script.write_text(BATCH_SCRIPT.format(command=command))
    assert BATCH_SCRIPT.partition("\n")[2].format(command="python train.py") in Path("docs/launchers.md").read_text()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "QUEUE": str(queue)}
    job = Life(["bash", script], tmp_path, **environment)
    job.reaches(6)
    (srun,) = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int(srun), signal.SIGTERM)
    assert job.ends() == 143, job.log.read_text()
    assert queue.read_text() == "requeue 7\n"
    assert Life(["bash", script], tmp_path, **environment).ends() == 0, job.log.read_text()
    assert queue.read_text() == "requeue 7\n"
    assert trained(tmp_path) == unbroken()
    steps = [int(line.split()[0]) for line in lines(tmp_path) if line[0].isdigit()]
    assert steps == sorted(set(steps))


def test_torchrun_starts_all_ranks_again(tmp_path: Path) -> None:
    """A rank is killed, and all go on from the newest snapshot that is whole."""

    def torchrun(folder: Path, pace_seconds: float) -> Life:
        folder.mkdir()
        how = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 3]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *how, "-m", SCRIPT]
        new_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see tests/nodes/test_torchrun.py
        return Life([*torchrun, *arguments(folder, pace_seconds)], folder, **new_store)

    reference = torchrun(tmp_path / "unbroken", 0.0)
    assert reference.ends() == 0, reference.log.read_text()
    life = torchrun(tmp_path / "killed", 0.1)
    life.reaches(6, rank=1)
    os.kill(pid(life.folder, 1), signal.SIGKILL)
    until(lambda: sum("process" in line for line in lines(life.folder)) == 2, life.log)
    assert life.ends() == 0, life.log.read_text()
    assert [trained(life.folder, rank) for rank in (0, 1)] == [trained(reference.folder, rank) for rank in (0, 1)]
