"""Nodes with roots of their own: each commits what its ranks have written, and together that is the snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.errors import SnapshotFailedError
from ckpt_engine.observe.events import Notice
from ckpt_engine.store import names
from ckpt_engine.store.manifest import RANKS, Partial
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.writer import part_records
from ckpt_engine.writer.part_records import PartRecord
from tests.ranks.node_roots.committing import Nodes
from tests.ranks.runs import Patience, on_all
from tests.ranks.test_checkpointer import state_of
from tests.writer import staged


def only_needed(nodes: Nodes, node: int) -> None:
    """Nothing lies about that no manifest names."""
    repository = nodes.repository(node)
    needed = {name for parsed in repository.ids() for name in repository.files_of(parsed.id)}
    there = {f"data/{path.name}" for path in (nodes.root(node) / "data").iterdir()}
    assert there == needed
    assert not list((nodes.root(node) / "parts").iterdir())


@pytest.mark.parametrize("of", [(0, 0, 1, 1), (0, 1, 0), (0, 1)])
def test_each_node_has_its_part_and_all_parts_are_the_snapshot(tmp_path: Path, of: tuple[int, ...]) -> None:
    """The manifests of the nodes make that of all ranks; ids and the run are the same everywhere."""
    nodes = Nodes(tmp_path, of)
    nodes.save(1)
    nodes.save(2)
    nodes.close()
    for node in set(of):
        repository = nodes.repository(node)
        manifest = repository.read(repository.ids()[-1].id)
        mine = tuple(rank for rank, at in enumerate(of) if at == node)
        assert manifest.info.partial == Partial(mine, len(of))
        assert set(manifest.tree[RANKS]) == {str(rank) for rank in mine}
        assert ("model" in manifest.tree) == (node == 0)
        assert nodes.steps(node) == [1, 2]
        only_needed(nodes, node)
    assert len({nodes.repository(node).run_id for node in of}) == 1
    whole = nodes.whole(2)
    assert whole.info.partial is None
    assert set(whole.tree[RANKS]) == {str(rank) for rank in range(len(of))}
    assert whole.entries["model/weight"].shape == (257, 33)
    messages = [e.message for e in nodes.sinks[0].events if isinstance(e, Notice) and e.level == "INFO"]
    assert any("a lost node takes all of them with it" in message for message in messages)


def test_what_fails_at_one_node_is_absent_there_and_the_next_one_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that does not come costs its node the part; the wait for it ends, and other nodes keep theirs."""
    patience = Patience(monkeypatch)
    nodes = Nodes(tmp_path, (0, 0, 1, 1))
    nodes.save(1)
    here = [0, 1]
    for handle in on_all(lambda i: nodes.ranks[here[i]].save(state_of(2, here[i]), step=2), 2):
        handle.wait(60)
    patience.over = True
    late = nodes.ranks[2].save(state_of(2, 2), step=2)
    with pytest.raises(SnapshotFailedError, match=r"no part of .* came from rank 3 in time"):
        late.wait(60)
    patience.over = False
    nodes.ranks[3].save(state_of(2, 3), step=2).wait(60)
    nodes.save(3)
    nodes.close()
    assert nodes.steps(0) == [1, 2, 3]
    assert nodes.steps(1) == [1, 3]


def test_no_node_removes_the_newest_that_all_have(tmp_path: Path) -> None:
    """Retention goes on once something newer is known to be on all nodes; quotas and full disks have to wait, too."""
    nodes = Nodes(tmp_path, (0, 1), keep={"last": 1})
    nodes.save(1)
    for step in (2, 3, 4):  # the node of rank 1 does not say what becomes of them there
        nodes.ranks[0].save(state_of(step, 0), step=step).wait(60)
    settle(nodes)
    assert nodes.steps(0) == [1, 2, 3, 4]
    assert nodes.steps(1) == [1]
    for step in (2, 3, 4):  # as late as that
        nodes.ranks[1].save(state_of(step, 1), step=step).wait(60)
    nodes.save(5)
    settle(nodes)
    assert nodes.steps(0) == nodes.steps(1) == [4, 5]
    nodes.save(6)
    nodes.close()
    assert nodes.steps(0) == nodes.steps(1) == [5, 6]
    for node in (0, 1):
        only_needed(nodes, node)


@pytest.mark.parametrize("how", ["skipped", "failed"])
def test_what_a_node_lacks_for_good_the_others_do_not_keep(tmp_path: Path, how: str) -> None:
    """However long it is busy, or its disk full: they keep the newest of all nodes, and one more than they would."""
    nodes = Nodes(tmp_path, (0, 1), keep={"last": 1}, on_error="warn")
    nodes.save(1)
    (nodes.root(1) / "data").rename(nodes.root(1) / "away")
    (nodes.root(1) / "data").write_text("in the way")
    for step in range(2, 14):
        if how == "skipped":
            nodes.ranks[1].engine.miss(step, "busy")
        else:
            with pytest.raises(SnapshotFailedError):
                nodes.ranks[1].save(state_of(step, 1), step=step).wait(60)
        nodes.ranks[0].save(state_of(step, 0), step=step).wait(60)
    settle(nodes)
    assert nodes.steps(0) == [1, 12, 13]
    (nodes.root(1) / "data").unlink()
    (nodes.root(1) / "away").rename(nodes.root(1) / "data")
    nodes.save(14)
    nodes.save(15)
    nodes.close()
    assert nodes.steps(0) == nodes.steps(1) == [14, 15]
    for node in (0, 1):
        only_needed(nodes, node)


def settle(nodes: Nodes) -> None:
    """Retention after what was saved is over."""
    for rank in nodes.ranks:
        writer = rank.engine._pipeline._writer
        assert writer is not None and writer.client is not None
        staged.settle(writer.client)


def test_room_for_the_next_is_not_made_of_the_newest_that_all_have(tmp_path: Path) -> None:
    """A quota that has no room beside it fails the snapshot, not what the run would resume from."""
    nodes = Nodes(tmp_path, (0, 1), keep={"last": 1, "quota": "600 kB"})
    nodes.save(1)
    nodes.save(2)
    settle(nodes)
    handle = None
    for step in range(3, 12):  # the node of rank 1 says nothing
        handle = nodes.ranks[0].save(state_of(step, 0), step=step)
        try:
            handle.wait(60)
        except SnapshotFailedError as err:
            assert "does not fit" in str(err)
            break
    else:
        pytest.fail("the quota was not reached")
    assert 2 in nodes.steps(0)
    assert 2 in nodes.steps(1)
    nodes.close()


@pytest.mark.parametrize("left", [(2, 3), (2,)])
def test_what_a_dead_leader_left_complete_is_committed_at_the_next_start(tmp_path: Path, left: tuple[int, ...]) -> None:
    """Records say whose parts make the manifest of their root; where one is missing all of them go, and their data."""
    nodes = Nodes(tmp_path, (0, 0, 1, 1))
    kept: dict[str, bytes] = {}
    put = part_records.put

    def keep(storage: Storage, part: PartRecord) -> None:
        kept[names.part_name(part.manifest.info.id, part.rank)] = part_records.encode(part)
        put(storage, part)

    part_records.put = keep
    try:
        nodes.save(1)
        nodes.close()
    finally:
        part_records.put = put
    repository = nodes.repository(1)
    snapshot = repository.ids()[0].id
    (nodes.root(1) / names.manifest_name(snapshot)).unlink()
    for rank in left:
        name = names.part_name(snapshot, rank)
        (nodes.root(1) / name).write_bytes(kept[name])
    again = Nodes(tmp_path, (0, 0, 1, 1))
    on_all(lambda rank: again.ranks[rank].engine.start(), 4)
    again.close()
    assert again.steps(1) == ([1] if len(left) == 2 else [])
    only_needed(again, 1)
    if len(left) == 2:
        assert again.whole(1).info.step == 1
