"""The recipe of docs/launchers.md on a real Slurm of one machine: end of the time, a killed trainer, `scancel`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.recipes.lives import REPOSITORY, SCRIPT, lines, pid, trained, unbroken, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1024
PartitionName=all Nodes=ALL Default=YES
"""


class Slurm:
    """Its commands.

    Args:
        folder: with slurm.conf, and the logs of its daemons.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(REPOSITORY)}

    def ask(self, *command: object) -> str:
        """What it answers; nothing while it does not."""
        words = list(map(str, command))
        done = subprocess.run(words, env=self._environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def start(self, name: str, folder: Path) -> subprocess.Popen[bytes]:
        """One of its daemons, which logs into the folder."""
        ports = {"munged": ("--foreground", "--force", *_munge(folder))}
        options = ports.get(name, ("-D",))
        with (folder / f"{name}.out").open("wb") as log:
            return subprocess.Popen(
                [shutil.which(name) or f"/usr/sbin/{name}", *options], env=self._environment, stdout=log, stderr=log
            )

    def submit(self, folder: Path, options: str) -> str:
        """The number of a job that runs what docs/launchers.md says, and trains into FOLDER/JOB.TASK."""
        page = (REPOSITORY / "docs" / "launchers.md").read_text().partition("## Slurm")[2]
        recipe = page.partition("```\n")[2].partition("```")[0]
        place = f'"{folder}/$SLURM_ARRAY_JOB_ID.$SLURM_ARRAY_TASK_ID"'
        command = f"{sys.executable} -m {SCRIPT} {place}/run {place}/lines 2"
        assert recipe.count("python train.py") == 1
        script = folder / "job.sh"
        script.write_text(recipe.replace("srun", f"mkdir -p {place}; srun").replace("python train.py", command))
        return self.ask("sbatch", "--parsable", f"--output={folder}/out", *options.split(), script)

    def state(self, job: str) -> str:
        """Such as PENDING."""
        return self.ask("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")

    def begins_again(self, job: str, log: Path) -> None:
        """Slurm lets a job that is queued again wait for two minutes; here it has no end of its time any more."""
        until(lambda: self.state(job) == "PENDING", log)
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60")


def _munge(folder: Path) -> list[str]:
    return [
        f"--{name}={folder}/munge.{suffix}"
        for name, suffix in (
            ("key-file", "key"),
            ("socket", "socket"),
            ("pid-file", "pid"),
            ("log-file", "log"),
            ("seed-file", "seed"),
        )
    ]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Its daemons, on free ports."""
    missing = [name for name in DAEMONS if not Path("/usr/sbin", name).exists()]
    if missing or os.getuid():
        pytest.skip(f"{', '.join(missing) or 'root'} is missing: see tests/real/README.md")
    folder = tmp_path_factory.mktemp("slurm")
    with ExitStack() as ports:
        bound = [ports.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, ports=bound, folder=folder))
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "state").mkdir()
    cluster, running = Slurm(folder), []
    try:
        for name in DAEMONS:
            running.append(cluster.start(name, folder))
            until((folder / "munge.socket").exists, folder / "munged.out")
        until(lambda: cluster.ask("sinfo", "--noheader", "--format=%T") == "idle", folder / "slurmctld.out")
        yield cluster
    finally:
        for daemon in reversed(running):
            daemon.terminate()
            daemon.wait(60)


def test_a_job_goes_on_after_the_end_of_its_time_and_after_a_kill(slurm: Slurm, tmp_path: Path) -> None:
    """Two tasks of an array: one is signalled before its time ends, the trainer of the other is killed.

    Both are queued again, by their own script, and are at the end what no one has interrupted.
    """
    log = tmp_path / "out"
    log.touch()
    array = slurm.submit(tmp_path, "--array=1-2 --time=2 --signal=TERM@60")
    signalled, killed = (tmp_path / f"{array}.{task}" for task in (1, 2))
    until(lambda: len(lines(killed)) > 4, log)
    os.kill(pid(killed), signal.SIGKILL)
    slurm.begins_again(f"{array}_2", log)
    slurm.begins_again(f"{array}_1", log)
    until(lambda: {slurm.state(f"{array}_{task}") for task in (1, 2)} == {"COMPLETED"}, log)
    for folder in (signalled, killed):
        assert trained(folder) == unbroken(), log.read_text()
        assert [line.split()[0] for line in lines(folder) if not line[0].isdigit()][-2:] == ["process", "done"]
    assert "exit 143" in lines(signalled)
    steps = [int(line.split()[0]) for line in lines(signalled) if line[0].isdigit()]
    assert steps == sorted(set(steps))


def test_a_cancelled_job_is_saved_and_not_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    """`scancel` stops it in time; the same script, submitted again, could go on."""
    log = tmp_path / "out"
    log.touch()
    array = slurm.submit(tmp_path, "--array=1 --time=10")
    folder = tmp_path / f"{array}.1"
    until(lambda: len(lines(folder)) > 3, log)
    slurm.ask("scancel", array)
    until(lambda: lines(folder)[-1] == "exit 143", log)
    until(lambda: slurm.state(f"{array}_1") == "CANCELLED", log)
    assert f"SIGTERM: step {len(lines(folder)) - 2} is durable" in log.read_text()
