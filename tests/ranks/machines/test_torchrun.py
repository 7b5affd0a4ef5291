"""torchrun on two machines: a lost worker or machine is replaced, the ranks are restarted, and they go on exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckpt_engine.checkpointer import Checkpointer
from tests.ranks.elastic_runs import step_of
from tests.ranks.launch import Launcher, free_port
from tests.ranks.machines.lives import MACHINES, PER_MACHINE, SIZE, kill, machines
from tests.ranks.machines.netns import LINK, Nodes
from tests.ranks.train_elastic import digest

EPOCHS = 3
SAMPLES = 192
LINES = EPOCHS * SAMPLES // 4 // SIZE
PATIENCE_SECONDS = 240.0
LINGER_SECONDS = 60.0
"""How long writers may take to end once their trainers have."""
_NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torch 2.13 with gloo: else restarted ranks find the addresses of dead ones in the store, which agents keep."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with machines(MACHINES) as made:
        yield made


def job_of(folder: Path, trainer: str, pace: float) -> dict[str, Any]:
    return {
        "module": "tests.ranks.train_elastic",
        "trainer": trainer,
        "root": str(folder / "run"),
        "trace": str(folder / "trace"),
        "size": SIZE,
        "epochs": EPOCHS,
        "samples": SAMPLES,
        "pace": pace,
        "seed": 0,
        "same_buckets": True,
        "options": {"every_n_steps": 2, "keep": {"last": 3}, "writer": "process"},
    }


def lines(folder: Path, rank: int) -> list[str]:
    path = folder / f"trace.{rank}"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def final(folder: Path) -> str:
    """Weights and optimizer of the newest snapshot."""
    with Checkpointer(folder / "run") as ckpt:
        state = ckpt.load()
    assert state is not None
    return digest(state["model"], state["optimizer"])


@pytest.fixture(scope="module", params=["plain", "accelerate"])
def trainer(request: pytest.FixtureRequest) -> str:
    """Who trains."""
    return str(request.param)


@pytest.fixture(scope="module")
def reference(trainer: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], str]:
    """The lines of each rank of a run without failures, on one machine, and where it ends."""
    folder = tmp_path_factory.mktemp("reference")
    launcher = Launcher("tests.ranks.train_elastic")
    try:
        launcher.start(job_of(folder, trainer, 0.0), SIZE, folder / "log")
        assert launcher.join() == [0] * SIZE
    finally:
        launcher.close()
    found = [lines(folder, rank) for rank in range(SIZE)]
    assert [len(one) for one in found] == [LINES] * SIZE
    return found, final(folder)


class Torchrun:
    """torchrun on each machine; the first one has the rendezvous."""

    def __init__(self, nodes: Nodes, folder: Path, trainer: str) -> None:
        self._nodes = nodes
        self._folder = folder
        self._job = job_of(folder, trainer, 0.1)
        self._port = free_port()
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        """The agent of a machine, which starts two ranks."""
        launch = {
            "--nnodes": MACHINES,
            "--nproc-per-node": PER_MACHINE,
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"{self._nodes.name(0)}:{self._port}",
            "--rdzv-id": self._folder.name,
            "--max-restarts": 2,
            "-m": "tests.ranks.machines.torchrun_rank",
        }
        words = [str(word) for pair in launch.items() for word in pair]
        command = [*self._nodes.command(node), sys.executable, "-m", "torch.distributed.run", *words]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": LINK,
            "PYTHONWARNINGS": "ignore",
            **_NEW_STORE,
        }
        with (self._folder / f"log.{node}").open("ab") as log:
            self._agents[node] = subprocess.Popen(
                [*command, json.dumps(self._job)], stdout=log, stderr=log, env=environment
            )

    def until_durable(self, step: int) -> None:
        """There is a snapshot of this step or a later one."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._newest() < step:
            assert time.monotonic() < deadline, self.text()
            assert all(one.poll() is None for one in self._agents.values()), self.text()
            time.sleep(0.005)

    def worker(self, node: int) -> int:
        """The process id of a rank there."""
        (agent,) = psutil.Process(self._agents[node].pid).children()
        return agent.children()[0].pid

    def lose(self, node: int) -> None:
        """The machine with its agent."""
        self._nodes.lose(node)
        self._agents.pop(node).wait(PATIENCE_SECONDS)

    def end(self, node: int) -> int:
        """The exit status of a machine's agent."""
        try:
            return self._agents.pop(node).wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun hangs on machine {node}: {self.text()}") from None

    def require_nothing_left(self) -> None:
        """No rank and no writer stays behind."""
        deadline = time.monotonic() + LINGER_SECONDS
        while left := [one for node in range(MACHINES) for one in self._nodes.processes(node)]:
            commands = []
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    commands.append(one.cmdline())
            assert time.monotonic() < deadline, f"left behind: {commands}"
            time.sleep(0.05)

    def text(self) -> str:
        return "".join(f"== {one}\n{one.read_text()[-6000:]}" for one in sorted(self._folder.glob("log.*")))

    def _newest(self) -> int:
        names = [path.name for path in (self._folder / "run" / "snapshots").glob("[!.]*.json")]
        return max((step_of(name) for name in names), default=0)


@pytest.fixture
def torchrun(nodes: Nodes, tmp_path: Path, trainer: str) -> Iterator[Torchrun]:
    made = Torchrun(nodes, tmp_path, trainer)
    yield made
    for node in range(MACHINES):
        nodes.lose(node)


def require_exact(folder: Path, expected: list[list[str]], resumes: int, text: str) -> None:
    """Every rank has gone the way of the reference to its end, and has begun again so often, never with a gap."""
    for rank in range(SIZE):
        at, begun = 0, 0
        for line in lines(folder, rank):
            assert line in expected[rank], f"rank {rank} trained otherwise: {line}\n{text}"
            found = expected[rank].index(line)
            assert found <= at, f"rank {rank} left out steps {at} to {found}: {text}"
            begun += found < at
            at = found + 1
        assert at == LINES, text
        assert begun <= resumes, f"rank {rank} began again {begun} times: {text}"


@pytest.mark.parametrize("lost", ["worker", "machine", "rendezvous"])
def test_torchrun_restarts_what_was_lost(
    lost: str, torchrun: Torchrun, reference: tuple[list[list[str]], str], tmp_path: Path
) -> None:
    """A rank is lost; or a machine, which is replaced; or that of the rendezvous, after which all torchruns restart."""
    for node in range(MACHINES):
        torchrun.start(node)
    torchrun.until_durable(6)
    if lost == "worker":
        kill([torchrun.worker(1)])
    elif lost == "machine":
        torchrun.lose(1)
        torchrun.start(1)
    else:
        torchrun.lose(0)
        assert torchrun.end(1) != 0
        for node in range(MACHINES):
            torchrun.start(node)
    for node in range(MACHINES):
        assert torchrun.end(node) == 0, torchrun.text()
    require_exact(tmp_path, reference[0], 1, torchrun.text())
    assert final(tmp_path) == reference[1]
    assert json.loads((tmp_path / "run" / "resume-report.json").read_text())["step"] >= 6
    torchrun.require_nothing_left()


def test_torchrun_restarts_again_and_again(
    torchrun: Torchrun, reference: tuple[list[list[str]], str], tmp_path: Path
) -> None:
    """A machine is replaced, then a rank dies: two restarts of the same torchrun."""
    for node in range(MACHINES):
        torchrun.start(node)
    torchrun.until_durable(6)
    torchrun.lose(1)
    torchrun.start(1)
    torchrun.until_durable(16)
    kill([torchrun.worker(0)])
    for node in range(MACHINES):
        assert torchrun.end(node) == 0, torchrun.text()
    require_exact(tmp_path, reference[0], 2, torchrun.text())
    assert final(tmp_path) == reference[1]
    torchrun.require_nothing_left()
