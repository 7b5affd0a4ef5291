"""Ranks of one node that restore from a real S3 server: each byte comes from it once, however many ranks there are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.ranks.session import Session
from ckpt_engine.restore import shared_reads
from tests.ranks.launch import Launcher
from tests.ranks.machines.restore_rank import state
from tests.ranks.runs import PATIENCE_SECONDS, SharedStore, ThreadRanks, on_all
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire
from tests.snapshot.passage import same


@pytest.fixture
def options(moto: S3Server, bucket: str, wire: Wire) -> dict[str, Any]:  # noqa: F811
    return {"tiers": [{"url": f"s3://{bucket}/run", "storage_options": moto.options(wire.url)}]}


def taken(wire: Wire) -> tuple[int, int]:  # noqa: F811
    """Bytes and requests of data files that have come through the wire."""
    data = [nbytes for method, path, nbytes in wire.answers if method == "GET" and "/data/" in path]
    return sum(data), len(data)


def restored(options: dict[str, Any], size: int, into: bool) -> list[Any]:
    """What each of so many ranks gets."""
    store = SharedStore()
    ckpts = [Checkpointer(options, ranks=ThreadRanks(rank, size, store)) for rank in range(size)]

    def load(rank: int) -> Any:
        return ckpts[rank].load(into=state(3 << 20) if into and rank else None)

    return on_all(load, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_byte_is_read_once_per_node(options: dict[str, Any], wire: Wire, size: int) -> None:  # noqa: F811
    """1, 2 and 4 ranks: bytes from the server are those of the state, and everybody gets it whole."""
    nbytes = 30 << 20
    with Checkpointer(options, writer="thread") as ckpt:
        ckpt.save(state(nbytes), step=1).wait()
    wire.answers.clear()
    for found in restored(options, size, into=False):
        same(found, state(nbytes))
    read_bytes, requests = taken(wire)
    assert nbytes <= read_bytes <= 1.01 * nbytes
    assert requests <= 6
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("ckpt-node-")]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_processes_read_each_byte_once(options: dict[str, Any], wire: Wire, tmp_path: Path, size: int) -> None:  # noqa: F811
    """Ranks that are processes, as a launcher starts them, read each byte once together."""
    nbytes = 30 << 20
    with Checkpointer(options, writer="thread") as ckpt:
        ckpt.save(state(nbytes), step=1).wait()
    wire.answers.clear()
    launcher = Launcher("tests.ranks.machines.restore_rank")
    try:
        launcher.start({"options": options, "nbytes": nbytes}, size, tmp_path / "log")
        assert launcher.join() == [0] * size, "".join(one.read_text()[-2000:] for one in tmp_path.glob("log*"))
    finally:
        launcher.close()
    read_bytes, requests = taken(wire)
    print(f"{size} ranks: {read_bytes / nbytes:.4f} x S in {requests} requests")
    assert nbytes <= read_bytes <= 1.01 * nbytes


@pytest.mark.slow
def test_ranks_that_read_into_live_tensors_share_as_well(options: dict[str, Any], wire: Wire) -> None:  # noqa: F811
    """Some ranks with `into`, some without."""
    with Checkpointer(options, writer="thread") as ckpt:
        ckpt.save(state(3 << 20), step=1).wait()
    wire.answers.clear()
    for found in restored(options, 2, into=True):
        same(found, state(3 << 20))
    assert taken(wire)[0] <= 1.01 * (3 << 20) + 8192


@pytest.mark.slow
def test_ranks_of_different_nodes_do_not_wait_for_each_other(
    options: dict[str, Any],
    wire: Wire,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where memory cannot be shared each rank is a node of its own."""
    with Checkpointer(options, writer="thread") as ckpt:
        ckpt.save(state(3 << 20), step=1).wait()
    wire.answers.clear()
    monkeypatch.setattr(shared_reads, "node_name", lambda: os.urandom(8).hex())
    for found in restored(options, 2, into=False):
        same(found, state(3 << 20))
    assert taken(wire)[0] >= 2 * (3 << 20)


def test_a_rank_that_comes_late_is_not_waited_for() -> None:
    """Rank 0 goes on alone after the time to meet, and the late one finds that it is alone too."""
    store = SharedStore()
    first, second = (Session(ThreadRanks(rank, 2, store)) for rank in range(2))
    assert shared_reads.meet(first, timeout=0.05) is None
    assert shared_reads.meet(second, timeout=0.05) is None


def test_a_rank_with_nothing_to_share_meets_the_others_all_the_same() -> None:
    """Without it the others would wait, and their questions to rank 0 would be counted differently."""
    store = SharedStore()
    sessions = [Session(ThreadRanks(rank, 3, store)) for rank in range(3)]
    seats = on_all(lambda rank: shared_reads.meet(sessions[rank], wanted=rank != 1), 3)
    assert [seat is not None and seat.count for seat in seats] == [2, False, 2]
    assert on_all(lambda rank: sessions[rank].agree(lambda: "next", PATIENCE_SECONDS), 3) == ["next"] * 3
    for seat in seats:
        if seat is not None:
            os.close(seat.fd)


def test_who_meets_gets_a_seat_and_the_file_has_no_name() -> None:
    """Two ranks of one node have the same file open, of which nothing is left once they close it."""
    store = SharedStore()
    sessions = [Session(ThreadRanks(rank, 2, store)) for rank in range(2)]
    first, second = on_all(lambda rank: shared_reads.meet(sessions[rank]), 2)
    assert first is not None
    assert second is not None
    assert (first.index, first.count, second.index, second.count) == (0, 2, 1, 2)
    assert os.fstat(first.fd).st_ino == os.fstat(second.fd).st_ino
    assert os.fstat(first.fd).st_nlink == 0
    os.close(first.fd)
    os.close(second.fd)
