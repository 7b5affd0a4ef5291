"""Two machines with two ranks each, and an S3 server on a third one: whatever fails, also the way to the server."""

from __future__ import annotations

import random
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.machines.lives import MACHINES, SERVER, Cluster, Place, launching, machines, sweep
from tests.servers.s3 import START_SECONDS, STOP_SECONDS, S3Server, free_port, listens, program

KINDS = ("rank", "writer", "writers", "node", "moved", "link", "all", "server", "path")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with machines(MACHINES + 1) as nodes, launching("tests.ranks.machines.train", nodes) as made:
        yield made


@pytest.fixture(scope="module")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A moto server on the third machine."""
    nodes, port = cluster.nodes, free_port()
    log = tmp_path_factory.mktemp("moto") / "log"
    command = [*nodes.command(SERVER), program("moto_server"), "-H", "0.0.0.0", "-p", str(port)]
    with log.open("ab") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not listens(nodes.address(SERVER), port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield S3Server("moto", f"http://{nodes.address(SERVER)}:{port}")
        finally:
            process.kill()
            process.wait(STOP_SECONDS)


@pytest.fixture
def place(server: S3Server) -> Place:
    bucket = server.make_bucket(f"b{uuid.uuid4().hex[:12]}")
    return Place(f"s3://{bucket}/run", server.options(), waits=False, pace=0.05)


@pytest.mark.parametrize("kind", [*KINDS, "long"])
def test_a_run_with_a_remote_server_survives(kind: str, cluster: Cluster, place: Place, tmp_path: Path) -> None:
    """One failure of each kind, and then the run ends by itself with the exact weights."""
    sweep(cluster, place, tmp_path, [kind], 1)


@pytest.mark.parametrize("seed", range(4))
def test_many_failures(seed: int, cluster: Cluster, place: Place, tmp_path: Path) -> None:
    """Eight random ones in a row."""
    draw = random.Random(seed)
    sweep(cluster, place, tmp_path, [draw.choice(KINDS) for _ in range(8)], seed)
