"""Machines are lost with their trainers and writers: all ranks resume from the memory of the others, if it can be."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from ckpt_engine.store import names
from ckpt_engine.store.storage.seal_keys import KeyPair
from tests.restore.peers.cluster import Cluster

REPLICATE = {"url": "memory", "replicate": 1}
PARITY = {"url": "memory", "parity": 3}


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """Where the ranks of all lives meet."""
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def lose_one_in_each_life(cluster: Cluster, draw: random.Random, lives: int = 3) -> None:
    """Each life loses one machine at a random moment, and no durable snapshot was taken by then.

    What comes back is the newest snapshot, or the one before, if it was on its way to other machines.
    """
    taken: list[int] = []
    for life in range(lives):
        what, step, place = cluster.start()
        assert what == "resumed"
        if life:
            assert (place, int(step) in taken[-2:]) == ("memory", True), (life, step, place, taken)
        cluster.nodes[0].until_taken(draw.randint(3, 9))
        time.sleep(draw.uniform(0.0, 0.15))  # a random moment of a step
        taken = cluster.kill({draw.randrange(cluster.machines)})
    assert "come from the memory of other machines; there is no other copy" in cluster.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "seed"), [(2, 0), (2, 1), (4, 2), (4, 3), (4, 4)])
def test_a_lost_machine_costs_a_step(tmp_path: Path, store: TCPStore, size: int, seed: int) -> None:
    """Each rank has a partner, so a lost machine costs one step at most."""
    with Cluster(tmp_path / "run", store, size, REPLICATE) as cluster:
        lose_one_in_each_life(cluster, random.Random(seed))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("size", "machines", "seed"), [(3, 3, 0), (3, 3, 1), (3, 3, 2), (6, 3, 3)])
def test_a_lost_machine_of_a_parity_group_costs_a_step(
    tmp_path: Path, store: TCPStore, size: int, machines: int, seed: int
) -> None:
    """Its share is made from what the others have, whichever it is."""
    with Cluster(tmp_path / "run", store, size, PARITY, machines) as cluster:
        lose_one_in_each_life(cluster, random.Random(seed))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_writer_that_takes_the_place_of_another_is_part_of_the_group(tmp_path: Path, store: TCPStore) -> None:
    """A writer dies alone, and a machine later: its successor has what the lost share is made from."""
    with Cluster(tmp_path / "run", store, 3, PARITY, 3) as cluster:
        assert cluster.start()[2] == "nowhere"
        cluster.nodes[0].until_taken(3)
        cluster.nodes[1].kill_writers()
        cluster.nodes[0].until_taken(len(cluster.nodes[0].taken) + 5)
        taken = cluster.kill({2})
        _, step, place = cluster.start()
        assert (place, int(step) in taken[-2:]) == ("memory", True), (step, place, taken)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_lost_machines_of_a_parity_group_leave_what_is_durable(tmp_path: Path, store: TCPStore) -> None:
    """Nothing hangs, nothing wrong is put together, and the log says whose shares are gone."""
    with Cluster(tmp_path / "run", store, 3, PARITY, 3, durable_every=5) as cluster:
        assert cluster.start()[2] == "nowhere"
        while not list((tmp_path / "run" / "snapshots").glob("*")):
            cluster.nodes[0].until_taken(len(cluster.nodes[0].taken) + 1)
        taken = cluster.kill({1, 2})
        what, step, place = cluster.start()
        assert (what, place) == ("resumed", (tmp_path / "run").as_uri())
        assert int(step) in [one for one in taken if one % 5 == 0]
    log = cluster.log.read_text()
    assert "the shares of ranks 1, 2 of" in log
    assert "what is durable is resumed from" in log


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("memory", "machines"), [(REPLICATE, 2), ({"url": "memory", "parity": 4}, 4)])
def test_shares_of_a_sealed_run_are_kept_in_memory_and_sealed_on_disk(
    tmp_path: Path, store: TCPStore, memory: dict[str, Any], machines: int
) -> None:
    """A lost machine costs a step; where all writers are lost too the sealed snapshot of all ranks is resumed."""
    KeyPair.make(str(tmp_path / "key"))
    with Cluster(tmp_path / "run", store, machines, memory, machines, durable_every=15) as cluster:
        cluster.job["seal"] = {"key": str(tmp_path / "key")}
        assert cluster.start()[2] == "nowhere"
        cluster.nodes[0].until_taken(4)
        taken = cluster.kill({machines - 1})
        _, step, place = cluster.start()
        assert (place, int(step) in taken[-2:]) == ("memory", True), (step, place, taken)
        while not list((tmp_path / "run" / "snapshots").glob("*")):
            cluster.nodes[0].until_taken(len(cluster.nodes[0].taken) + 1)
        cluster.kill(set(range(machines)))
        what, _, place = cluster.start()
        assert (what, place) == ("resumed", (tmp_path / "run").as_uri())
    data = list((tmp_path / "run" / "data").iterdir())
    assert len(data) >= machines
    assert all(path.read_bytes().startswith(names.SEALED) for path in data)
