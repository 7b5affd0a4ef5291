"""Nodes with roots of their own, and a further tier that all of them see: there a snapshot is committed whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.copy.job import RankConfig
from ckpt_engine.copy.transfer import RunText, adopt_run, copy_data
from ckpt_engine.observe.events import Notice, SnapshotReplicated, TierDegraded
from ckpt_engine.store import names
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.writer import commit_of_ranks, part_records
from ckpt_engine.writer.node_member_tier import NodeMemberTier
from ckpt_engine.writer.replicate import Replicator
from ckpt_engine.writer.secondary_tier import SecondaryTier
from tests.ranks.node_roots.committing import Nodes, Sink
from tests.ranks.runs import on_all
from tests.ranks.test_checkpointer import check

NODES = (0, 0, 1, 1)


def far(tmp_path: Path) -> Repository:
    return Repository(open_storage(tmp_path / "far"))


def nothing_left(tmp_path: Path) -> None:
    """Every data file has its manifest, and neither questions nor answers lie about."""
    repository = far(tmp_path)
    needed = {name for parsed in repository.ids() for name in repository.files_of(parsed.id)}
    assert {f"data/{path.name}" for path in (tmp_path / "far" / "data").iterdir()} == needed
    assert not list((tmp_path / "far" / "parts").iterdir())


def test_a_shared_tier_gets_whole_snapshots(tmp_path: Path) -> None:
    """One process reads there what four ranks on two nodes have written; each node has sent its own share."""
    nodes = Nodes(tmp_path, NODES, tiers=[str(tmp_path / "far")])
    nodes.save(1)
    nodes.save(2)
    nodes.close()
    repository = far(tmp_path)
    newest = repository.read(repository.ids()[-1].id)
    assert newest.info.step == 2
    assert newest.info.partial is None
    assert newest == nodes.whole(2)
    assert repository.run_id == nodes.repository(1).run_id
    nothing_left(tmp_path)
    with Checkpointer(tmp_path / "far") as alone:
        check(alone.load(), 2, 0)
    sent = [event.sent_bytes for event in nodes.sinks[0].events if isinstance(event, SnapshotReplicated)]
    assert 0 < sent[0] < 0.6 * sum(file.nbytes for file in newest.files)


@pytest.mark.slow
def test_a_node_that_does_not_answer_makes_the_copy_absent_and_the_next_one_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's tier stops waiting, and says which ranks it misses; the nodes' own snapshots stay."""
    answers = threading.Event()
    advance = NodeMemberTier.advance
    monkeypatch.setattr(NodeMemberTier, "advance", lambda self: advance(self) if answers.is_set() else None)
    nodes = Nodes(tmp_path, NODES, tiers=[str(tmp_path / "far")], wait_seconds=0.3)
    nodes.save(1)
    deadline = time.monotonic() + 30
    while not any(isinstance(event, TierDegraded) for event in nodes.sinks[0].events):
        assert time.monotonic() < deadline
        nodes.ranks[0].engine.poll()
    (degraded,) = [event for event in nodes.sinks[0].events if isinstance(event, TierDegraded)]
    assert "came from ranks 2, 3 in time" in degraded.message
    assert far(tmp_path).ids() == ()
    assert not list((tmp_path / "far" / "parts").iterdir())
    answers.set()
    nodes.save(2)
    nodes.close()
    assert far(tmp_path).ids()[-1].step == 2
    assert nodes.steps(1) == [1, 2]


def test_a_node_that_has_lost_its_part_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is given up at once, and the next snapshot is copied."""
    answers = threading.Event()
    advance = NodeMemberTier.advance
    monkeypatch.setattr(NodeMemberTier, "advance", lambda self: advance(self) if answers.is_set() else None)
    nodes = Nodes(tmp_path, (0, 1), tiers=[str(tmp_path / "far")])
    nodes.save(1)
    until(lambda: list((tmp_path / "far" / "parts").glob("*wanted.json")))
    (nodes.root(1) / names.manifest_name(nodes.repository(1).ids()[0].id)).unlink()
    answers.set()
    nodes.save(2)
    nodes.close()
    assert [one.step for one in far(tmp_path).ids()] == [2]
    nothing_left(tmp_path)
    messages = [event.message for event in nodes.sinks[0].events if isinstance(event, Notice)]
    assert any("rank 1 has no part in it: it is not on its node" in message for message in messages)


@pytest.mark.slow
def test_a_node_ends_when_rank_0_has_asked_for_all_it_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's tier is late: writers of other nodes wait for its question although their trainers have closed.

    It may not even have made the run's place there.
    """
    closing = threading.Event()
    finish, open_tier = Replicator.finish, SecondaryTier._open

    def late(self: SecondaryTier) -> Repository:
        assert closing.wait(60)
        return open_tier(self)

    def finishing(self: Replicator) -> None:
        finish(self)
        if isinstance(self.tier, NodeMemberTier):
            threading.Timer(0.3, closing.set).start()  # time to end in, which it must not

    monkeypatch.setattr(SecondaryTier, "_open", late)
    monkeypatch.setattr(Replicator, "finish", finishing)
    nodes = Nodes(tmp_path, (0, 1), tiers=[str(tmp_path / "far")], wait_seconds=3.0)
    nodes.save(1)
    nodes.close()
    assert [one.step for one in far(tmp_path).ids()] == [1]
    nothing_left(tmp_path)


def until(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for(tmp_path: Path, step: int) -> None:
    """Until a snapshot is at the further tier."""
    until(lambda: (tmp_path / "far" / "snapshots").exists() and step in [one.step for one in far(tmp_path).ids()])


def lay_out(tmp_path: Path) -> tuple[Nodes, str]:
    """A run of two nodes without a further tier, and the newest snapshot."""
    nodes = Nodes(tmp_path, NODES)
    nodes.save(1)
    nodes.close()
    return nodes, nodes.repository(0).ids()[-1].id


@pytest.mark.parametrize("left", [(0, 1), pytest.param((1,), marks=pytest.mark.slow)])
def test_what_a_dead_session_left_is_completed_or_dropped(tmp_path: Path, left: tuple[int, ...]) -> None:
    """All nodes had copied their parts and rank 0's writer died before it committed; or some had not."""
    nodes, snapshot = lay_out(tmp_path)
    target = adopt_run(RunText.of(nodes.repository(0)), open_storage(tmp_path / "far"))
    target.storage.put(names.wanted_name(snapshot), [memoryview(b"{}")])
    for node in left:
        near = nodes.repository(node)
        commit_of_ranks.give(near, target, snapshot, partial(copy_data, near, target))
    if len(left) == 1:  # no node has it any more
        for node in (0, 1):
            (nodes.root(node) / names.manifest_name(snapshot)).unlink()
    again = Nodes(tmp_path, NODES, tiers=[str(tmp_path / "far")])
    again.save(5)
    again.close()
    assert [one.step for one in far(tmp_path).ids()] == ([1, 5] if len(left) == 2 else [5])
    nothing_left(tmp_path)
    messages = [e.message for e in again.sinks[0].events if isinstance(e, Notice)]
    assert any("is committed there now" in message for message in messages) == (len(left) == 2)


@pytest.mark.slow
def test_a_part_whose_data_is_gone_is_asked_for_again(tmp_path: Path) -> None:
    """A record that was left behind is not believed: its data may have been collected since."""
    nodes, snapshot = lay_out(tmp_path)
    target = adopt_run(RunText.of(nodes.repository(0)), open_storage(tmp_path / "far"))
    part = part_records.of_manifest(nodes.repository(1).read(snapshot))
    again = Nodes(tmp_path, NODES, tiers=[str(tmp_path / "far")])
    ask = commit_of_ranks.Gather._ask

    def late(self: commit_of_ranks.Gather, storage: object, wanted: str) -> None:
        ask(self, storage, wanted)  # type: ignore[arg-type]
        if not once:
            once.append(1)
            part_records.put(target.storage, part)  # of a writer that was left behind

    once: list[int] = []
    commit_of_ranks.Gather._ask = late  # type: ignore[method-assign]
    try:
        on_all(lambda rank: again.ranks[rank].engine.start(), 4)
        wait_for(tmp_path, 1)
    finally:
        commit_of_ranks.Gather._ask = ask  # type: ignore[method-assign]
    again.close()
    assert once
    nothing_left(tmp_path)


@pytest.mark.parametrize("codec", ["byteplane-zstd", "delta"])
def test_a_shared_tier_encodes_what_nodes_send(tmp_path: Path, codec: str) -> None:
    """Each node encodes its part by itself; the whole comes back as it was saved."""
    nodes = Nodes(tmp_path, NODES, tiers=[{"url": str(tmp_path / "far"), "codec": codec}])
    for step in (1, 2):
        nodes.save(step)
        until(lambda step=step: far(tmp_path).ids()[-1:] and far(tmp_path).ids()[-1].step == step)
    nodes.close()
    repository = far(tmp_path)
    newest = repository.read(repository.ids()[-1].id)
    assert (newest.info.step, newest.info.partial) == (2, None)
    assert newest.info == nodes.whole(2).info
    used = {(piece.codec, names.data_rank(newest.files[piece.file].name)) for _, piece in stored_pieces(newest)}
    assert {rank for kind, rank in used if kind != "raw"} == {0, 2}, used
    nothing_left(tmp_path)
    with Checkpointer(tmp_path / "far") as alone:
        check(alone.load(), 2, 0)


def test_who_starts_alone_where_a_node_was_copies_nothing_of_its_part(tmp_path: Path) -> None:
    """A snapshot of some ranks is of no use at a tier that keeps whole ones."""
    nodes, _ = lay_out(tmp_path)
    sink = Sink()
    with Checkpointer(tiers=[str(nodes.root(0)), str(tmp_path / "far")], writer="thread") as alone:
        alone.engine.events = sink
        alone.save({"w": 1}, step=9).wait(60)
    notices = [event.message for event in sink.events if isinstance(event, Notice)]
    assert not [text for text in notices if str(tmp_path / "far") in text]
    assert [one.step for one in far(tmp_path).ids()] == [9]


def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The snapshots that rank 0's tier asks other nodes for."""
    asked: list[str] = []
    ask = commit_of_ranks.Gather._ask

    def note(self: commit_of_ranks.Gather, storage: Storage, snapshot: str) -> None:
        asked.append(snapshot)
        ask(self, storage, snapshot)

    monkeypatch.setattr(commit_of_ranks.Gather, "_ask", note)
    return asked


def test_no_node_is_asked_for_what_more_nodes_have_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is gone: what the others still have of its time can never be whole, and new snapshots are copied."""
    before = Nodes(tmp_path, (0, 1, 2))
    before.save(1)
    before.close()
    asked = asked_for(monkeypatch)
    after = Nodes(tmp_path, (0, 1), tiers=[str(tmp_path / "far")])
    after.save(4)
    after.close()
    assert [one.step for one in far(tmp_path).ids()] == [4]
    assert {int(snapshot[10:20]) for snapshot in asked} == {4}
    assert not [event for event in after.sinks[0].events if isinstance(event, TierDegraded)]


def test_a_node_that_never_had_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier session has left on one node only does not come any more, even if the other has nothing newer."""
    nodes, snapshot = lay_out(tmp_path)
    (nodes.root(1) / names.manifest_name(snapshot)).unlink()
    asked = asked_for(monkeypatch)
    again = Nodes(tmp_path, NODES, tiers=[str(tmp_path / "far")])
    on_all(lambda rank: again.ranks[rank].engine.start(), 4)

    def notices() -> list[str]:
        again.ranks[0].engine.poll()
        events = again.sinks[0].events
        late = [event.message for event in events if isinstance(event, TierDegraded)]
        return late + [event.message for event in events if isinstance(event, Notice) and "copied" in event.message]

    until(notices)
    assert asked == [snapshot]
    assert "rank 2 has no part in it: it is not on its node" in notices()[0]
    again.close()


def test_what_leaders_of_another_job_say_does_not_count(tmp_path: Path) -> None:
    """A writer that still ends declines what its successor has."""
    nodes, snapshot = lay_out(tmp_path)
    storage = open_storage(tmp_path / "far")
    first, second = (part_records.of_manifest(nodes.repository(node).read(snapshot)) for node in (0, 1))
    job = RankConfig(0, 4, "new", None, 1.0, place=(0, 1), places=((0, 1), (2, 3)))
    run = nodes.repository(0).run_id
    part_records.put(storage, part_records.no_part(snapshot, "gone", run, replace(job, rank=1, place=(1,))))
    part_records.put(storage, part_records.no_part(snapshot, "gone", run, replace(job, rank=3, size=6, place=(3,))))
    looks: list[float] = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            part_records.put(storage, second)

    assert commit_of_ranks.Gather(job, pause)._others(storage, first, time.monotonic() + 60.0) == [second]
    assert len(looks) == 2
