"""Writers of several machines over real sockets: who gets in, what is kept, and what a lost partner means."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine import Checkpointer
from ckpt_engine.copy.job import Mirrored
from ckpt_engine.errors import ConfigError, WriterError
from ckpt_engine.ranks.session import Session
from ckpt_engine.ranks.world import partner_of
from ckpt_engine.restore.memory_of_ranks import ShareSource, plan_shares
from ckpt_engine.snapshot import save_request
from ckpt_engine.snapshot.save_request import SharedSnapshots
from ckpt_engine.store.lease import read_holder
from ckpt_engine.store.names import session_id
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import part_records
from ckpt_engine.writer.peer_service import connect
from tests.ranks.runs import SharedStore, ThreadRanks, on_all
from tests.restore.peers.writers import SECRET, Writer, meet, until
from tests.writer.staged import WAIT_SECONDS


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    made = [Writer(rank, 2) for rank in range(2)]
    meet(made)
    yield made
    for one in made:
        one.close()


def test_a_partner_has_the_share_and_rank_0_hears_when_all_have(writers: list[Writer]) -> None:
    """Bit for bit, with its part record; both directions count."""
    snapshot = writers[0].offer(3)
    until(lambda: writers[1].kept == [snapshot])
    assert writers[0].mirrored == []
    writers[1].offer(3)
    until(lambda: writers[0].mirrored == [snapshot])
    found = writers[1].peers.parity.get(snapshot)
    assert found is not None
    (share,) = found.shares
    assert os.pread(found.fd, share.nbytes, 0) == os.pread(writers[0].stage.fd, share.nbytes, 0)
    assert part_records.decode(share.part.encode(), "here").rank == 0
    os.close(found.fd)


def test_the_two_newest_are_kept(writers: list[Writer]) -> None:
    """Ranks may be one snapshot apart; memory of older ones is used again."""
    found = []
    for step in range(1, 6):
        found.append(writers[0].offer(step))
        until(lambda: found[-1] in writers[1].kept)
    assert writers[1].kept == [found[4], found[3]]
    assert writers[1].peers.parity.get(found[2]) is None


def test_a_slot_that_may_have_changed_is_not_sent(writers: list[Writer]) -> None:
    """The copy of a slot that changed meanwhile becomes no snapshot."""
    writers[0].changes = True
    writers[0].offer(1)
    until(lambda: writers[0].asked == 1)
    writers[0].changes = False
    second = writers[0].offer(2)
    until(lambda: writers[1].kept)
    assert writers[1].kept == [second]


def test_who_does_not_know_the_secret_gets_nothing(writers: list[Writer]) -> None:
    """A stranger without the secret fails as a client, as a server, and as one that sends back what it receives."""
    with pytest.raises((WriterError, OSError)):
        connect("127.0.0.1", writers[1].peers.server.port, "another")
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def echo() -> None:
            sock, _ = fake.accept()
            with sock:
                while data := sock.recv(4096):
                    sock.sendall(data)

        thread = threading.Thread(target=echo, daemon=True)
        thread.start()
        with pytest.raises((WriterError, OSError)):
            connect("127.0.0.1", fake.getsockname()[1], SECRET)
        thread.join(WAIT_SECONDS)


def test_rank_0_hears_from_more_ranks_than_others_do() -> None:
    """Each rank keeps a connection to rank 0, which accepts more of them than the limit of other ranks allows."""
    lead = Writer(0, 100)
    lines = [connect("127.0.0.1", lead.peers.server.port, SECRET) for _ in range(99)]
    snapshot = IDS[1]
    lead.peers._mirrored.note(snapshot)
    for rank, line in enumerate(lines, 1):
        assert lead.mirrored == []
        line.send({"what": "mirrored", "rank": rank, "snapshot": snapshot})
        assert line.receive()["ok"]
    assert lead.mirrored == [snapshot]
    for line in lines:
        line.close()
    lead.close()


def attempts_of(writer: Writer) -> list[bool]:
    """What became of each attempt of its sender that has ended."""
    peers, found = writer.peers, list[bool]()
    attempt = peers._attempt

    def note(*args: Any) -> bool:
        kept = attempt(*args)
        found.append(kept)
        return kept

    peers._attempt = note  # type: ignore[method-assign]
    return found


def test_a_partner_that_is_gone_is_reported_once_and_its_successor_is_used(writers: list[Writer]) -> None:
    """The next writer of that rank says where it is; the shares that come then go there."""
    attempts = attempts_of(writers[0])
    writers[0].offer(1)
    until(lambda: attempts == [True])  # its sender waits for nothing of the partner any more
    writers[1].peers.close()
    writers[0].peers._keepers[1].hang_up()
    for step in (2, 3):
        writers[0].offer(step)
        until(lambda step=step: len(attempts) == step)
    assert attempts == [True, False, False]
    assert len([one for one in writers[0].notices if "memory of this machine only" in one]) == 1
    successor = Writer(1, 2)
    meet([writers[0], successor], moved=1)
    until(lambda: writers[0].peers._keepers[1].address == ("127.0.0.1", successor.peers.server.port))
    snapshot = writers[0].offer(4)
    until(lambda: snapshot in successor.kept)
    until(lambda: any("is back" in one for one in writers[0].notices))
    successor.close()


@given(st.integers(1, 4), st.integers(1, 3))
def test_partners_are_on_other_machines_and_each_keeps_one_share(machines: int, each: int) -> None:
    """The shares of a lost machine are all on one other machine."""
    nodes = [f"node{machine}" for machine in range(machines) for _ in range(each)]
    found = [partner_of(rank, nodes) for rank in range(len(nodes))]
    if machines == 1:
        assert set(found) == {None}
        return
    assert sorted(one for one in found if one is not None) == list(range(len(nodes)))
    for machine in range(machines):
        of_one = {nodes[found[rank] or 0] for rank in range(machine * each, (machine + 1) * each)}
        assert len(of_one) == 1
        assert nodes[machine * each] not in of_one


def test_ranks_in_unequal_numbers_have_no_partners() -> None:
    """One of them would keep two shares."""
    assert [partner_of(rank, ["a", "a", "b"]) for rank in range(3)] == [None, None, None]


IDS = [session_id("s", number, number) for number in range(5)]


def test_the_newest_snapshot_that_everybody_gets_is_planned() -> None:
    """On one's own machine or from one that serves; without network only what is on every machine."""

    def source(writer: int, held: list[str], parity: list[str], port: int = 1) -> ShareSource:
        return ShareSource(writer, held, "host", port, "secret", [writer, 1 - writer], parity)

    here = source(0, [IDS[3], IDS[2]], [IDS[2], IDS[1]])
    found = plan_shares(2, [[here], []])
    assert found is not None
    assert (found.snapshot, found.missing) == (IDS[2], [])
    assert (set(found.remote), found.lost, set(found.parity)) == ({"0"}, {"1": [0, 1]}, {"0"})
    alone = [source(0, [IDS[3]], [], port=0), source(1, [IDS[3]], [], port=0)]
    lacking, whole = plan_shares(2, [alone, []]), plan_shares(2, [alone, alone])
    assert lacking is not None and lacking.missing == [0, 1]
    assert whole is not None and whole.missing == []
    assert plan_shares(2, [[], []]) is None


def test_every_second_machine_may_be_lost() -> None:
    """Only one machine of two that follow each other has to be left; whether it has its own share does not matter."""
    there = [ShareSource(rank, [IDS[1]], "host", 1, "secret", [rank, (rank - 1) % 4], [IDS[1]]) for rank in range(4)]
    found = plan_shares(4, [[there[1]], [there[3]]])
    assert found is not None
    assert found.lost == {"0": [1, 0], "2": [3, 2]}
    bare = replace(there[1], held=[])
    again = plan_shares(4, [[bare], [there[2], there[3]]])
    assert again is not None
    assert again.lost == {"0": [1, 0], "1": [2, 1]}
    lacking = plan_shares(4, [[there[2]], [there[3]]])
    assert lacking is not None
    assert (lacking.snapshot, lacking.missing) == (IDS[1], [0])


def test_the_next_snapshot_waits_for_the_partners_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 holds back; a newer snapshot that all have counts too."""
    ranks: Any = ThreadRanks(0, 2, SharedStore())
    gate = SharedSnapshots(Session(ranks, machines=2), lambda *_: None)
    gate.took(IDS[2], None)
    assert not gate.keeps_up
    gate.heard(Mirrored(IDS[1]))
    assert not gate.keeps_up
    gate.heard(Mirrored(IDS[3]))
    assert gate.keeps_up
    gate.took(IDS[4], None)
    monkeypatch.setattr(save_request, "PATIENCE_SECONDS", -1.0)
    assert gate.keeps_up
    other = SharedSnapshots(Session(ranks), lambda *_: None)
    other.took(IDS[2], None)
    assert other.keeps_up


def test_replication_needs_several_ranks(tmp_path: Any) -> None:
    """A run of one process gets an error that says so."""
    with pytest.raises(ConfigError, match="several ranks on several machines"):
        Checkpointer(tiers=[{"url": "memory", "replicate": 1}, str(tmp_path / "run")])


@pytest.mark.slow
def test_replication_needs_several_machines(tmp_path: Any) -> None:
    """Ranks on one machine get an error that says so when they start, and no writer is left."""
    tiers = [{"url": "memory", "replicate": 1}, str(tmp_path / "run")]
    store = SharedStore()
    made = [Checkpointer(tiers=tiers, ranks=ThreadRanks(rank, 2, store)) for rank in range(2)]

    def start(rank: int) -> None:
        with pytest.raises(ConfigError, match="ranks on several machines in equal numbers"):
            made[rank].engine.start()

    on_all(start, 2)
    for one in made:
        one.close()
    assert read_holder(LocalStorage(str(tmp_path / "run"))) is None, "a writer is left"


@pytest.mark.parametrize("tier", [{"url": "memory", "replicate": 2}, {"url": "/x", "replicate": 1}])
def test_impossible_replication_is_refused(tier: dict[str, Any]) -> None:
    """One partner, and for the memory tier."""
    tiers = [tier, "/y"] if tier["url"] == "memory" else [tier]
    with pytest.raises(ConfigError, match="replicate is 1, and for the memory tier only"):
        Checkpointer(tiers=tiers)
