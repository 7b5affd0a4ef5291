"""Nodes with a root each restore a snapshot together: what is elsewhere comes from there, or from a further tier."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import NoUsableSnapshotError, ResumeError, StorageError
from ckpt_engine.ranks.session import Beacon
from ckpt_engine.restore import folder_service
from ckpt_engine.restore.folder_service import FolderClient, FolderServer
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.writer.peer_service import PeerConnection
from tests.ranks.node_roots.nodes import check_all, load_all, open_nodes
from tests.ranks.runs import on_all
from tests.ranks.test_checkpointer import check, close_all, save_all, state_of

NODES = ("n0", "n1")


def saved(folder: Path, steps: tuple[int, ...] = (1, 2), each: int = 2, **options: Any) -> None:
    """Snapshots of two nodes."""
    ranks = open_nodes(folder, NODES, each, **options)
    for step in steps:
        save_all(ranks, step)
    on_all(lambda rank: ranks[rank].wait(60), len(ranks))
    close_all(ranks)


def test_every_rank_gets_back_what_it_saved(tmp_path: Path) -> None:
    """Over two nodes of two ranks: bitwise, twice, each time after another snapshot."""
    saved(tmp_path)
    for step in (2, 3):
        again = open_nodes(tmp_path, NODES, 2)
        check_all(again, step)
        assert {ckpt.loaded.info.step for ckpt in again if ckpt.loaded is not None} == {step}
        save_all(again, step + 1)
        close_all(again)


def test_a_run_that_has_started_restores_as_well(tmp_path: Path) -> None:
    """`start` before `choose` and `load`, as trainers do."""
    saved(tmp_path)
    again = open_nodes(tmp_path, NODES, 2)
    on_all(lambda rank: again[rank].engine.start(), 4)
    chosen = on_all(lambda rank: again[rank].engine.choose(), 4)
    assert {one.info.step for one in chosen if one is not None} == {2}
    assert {one.manifest.info.partial for one in chosen if one is not None} == {None}
    check_all(again, 2)
    close_all(again)


@pytest.mark.parametrize(
    ("nodes", "each"),
    [(NODES, 3), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((NODES, 1), (("n1", "n0"), 2)))],
)
def test_another_number_of_ranks(tmp_path: Path, nodes: tuple[str, ...], each: int) -> None:
    """Fewer and more ranks on the same nodes, and the nodes in another order."""
    saved(tmp_path)
    again = open_nodes(tmp_path, nodes, each)
    check_all(again, 2, saved=4)
    close_all(again)


def test_more_nodes_than_before(tmp_path: Path) -> None:
    """A node that has nothing takes part: it reads all from the others."""
    saved(tmp_path)
    again = open_nodes(tmp_path, ("new", *NODES), 1)
    check_all(again, 2, saved=4)
    save_all(again, 3)
    close_all(again)
    again = open_nodes(tmp_path, ("new", *NODES), 1)
    check_all(again, 3)
    close_all(again)


def test_what_one_node_lacks_is_no_candidate(tmp_path: Path) -> None:
    """The newest snapshot whose shares are all there is taken; the reason for passing over is said."""
    saved(tmp_path)
    newest = Repository(open_storage(tmp_path / "n1")).ids()[-1].id
    (tmp_path / "n1" / names.manifest_name(newest)).unlink()
    again = open_nodes(tmp_path, NODES, 2)
    check_all(again, 1)
    loaded = again[0].loaded
    assert loaded is not None
    assert "the shares of ranks 2, 3 of 4 are in the folder of no node that takes part" in loaded.rejected[0].reason
    close_all(again)


def test_a_damaged_share_makes_all_take_the_one_before(tmp_path: Path) -> None:
    """One byte of a data file of the other node."""
    saved(tmp_path)
    newest = Repository(open_storage(tmp_path / "n1")).ids()[-1].id
    file = tmp_path / "n1" / names.data_name(newest, 2)
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    again = open_nodes(tmp_path, NODES, 2)
    check_all(again, 1)
    close_all(again)


@pytest.mark.parametrize("lost", ["n1", pytest.param("n0", marks=pytest.mark.slow)])
def test_a_lost_node_without_another_tier_is_reported(tmp_path: Path, lost: str) -> None:
    """Nothing is usable: every rank raises, names the missing shares, and does not start from scratch.

    The next attempt, when a writer has made a folder on the node again, ends in the same way.
    """
    saved(tmp_path)
    shutil.rmtree(tmp_path / lost)
    ranks = "0, 1" if lost == "n0" else "2, 3"
    for _ in range(2):
        refused(open_nodes(tmp_path, NODES, 2), f"shares of ranks {ranks} of 4 are in the folder of no node")


def refused(ranks: list[Checkpointer], why: str) -> None:
    """All ranks start, and none of them loads anything."""
    on_all(lambda rank: ranks[rank].engine.start(), len(ranks))

    def load(rank: int) -> None:
        with pytest.raises(NoUsableSnapshotError, match=why):
            ranks[rank].load()

    on_all(load, len(ranks))
    close_all(ranks)


def test_snapshots_that_were_pruned_apart_are_refused(tmp_path: Path) -> None:
    """No snapshot is on both nodes, as each lost other ones: every rank raises instead of starting from scratch."""
    saved(tmp_path, (1, 2, 3), 1)
    first, second = (Repository(open_storage(tmp_path / node)) for node in NODES)
    second.forget([second.ids()[-1].id])
    first.forget([parsed.id for parsed in first.ids()[:-1]])
    ranks = open_nodes(tmp_path, NODES, 1)
    folder = tmp_path / "n0"

    def load(rank: int) -> None:
        with pytest.raises(NoUsableSnapshotError, match=f"remove file://{folder} on every node to start a new run"):
            ranks[rank].load()

    on_all(load, 2)
    second.forget([parsed.id for parsed in second.ids()])  # and where one has nothing at all, too
    on_all(load, 2)


def test_a_full_folder_does_not_hide_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No beacon can be left: what nodes have is found as ever."""
    saved(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Beacon, "__init__", full)
    check_all(open_nodes(tmp_path, NODES, 2), 2)


@pytest.mark.slow
def test_a_shared_folder_that_can_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machines count as places then, which have the same whole snapshots."""
    (tmp_path / "n0").mkdir()
    (tmp_path / "n1").symlink_to(tmp_path / "n0")
    saved(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Beacon, "__init__", refuse)
    check_all(open_nodes(tmp_path, NODES, 2), 2)


@pytest.mark.parametrize("further", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_leader_that_cannot_be_reached_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, further: bool
) -> None:
    """It is not asked for each snapshot; it counts as away, and the error says where it should have been."""
    tiers = [str(tmp_path / "shared")] if further else []
    saved(tmp_path, (1, 2, 3), further=tiers, keep={"last": 3})
    tried: list[int] = []

    def drop(host: str, port: int, secret: str) -> PeerConnection:
        tried.append(port)
        raise TimeoutError("timed out")  # a firewall

    monkeypatch.setattr(folder_service, "connect", drop)
    monkeypatch.setattr(folder_service, "PATIENCE_SECONDS", 0.0)
    again = open_nodes(tmp_path, NODES, 2, further=tiers, keep={"last": 3})
    if further:
        check_all(again, 3)
        loaded = again[0].loaded
        assert loaded is not None
        assert [one.url for one in loaded.away] == ["the folder of rank 2"]
        return
    away = "the folder of rank 2: .CKPT300. the folder of rank 2 at 127.0.0.1 does not answer on port [0-9]+: timed out"

    def load(rank: int) -> None:
        with pytest.raises(NoUsableSnapshotError, match=f"(?s)shares of ranks 2, 3 of 4 cannot be had.*{away}"):
            again[rank].load()

    on_all(load, 4)
    assert len(tried) == 1


@pytest.mark.parametrize("starts", [True, False])
def test_a_first_snapshot_that_was_never_finished_is_no_snapshot(tmp_path: Path, starts: bool) -> None:
    """All ranks were killed when only one node had committed: the run starts from scratch, and goes on."""
    saved(tmp_path, steps=(1,))
    for path in (tmp_path / "n0").glob("*/0*"):
        path.unlink()
    again = open_nodes(tmp_path, NODES, 2)
    if starts:
        on_all(lambda rank: again[rank].engine.start(), 4)
    assert on_all(lambda rank: again[rank].engine.choose(), 4) == [None] * 4
    assert load_all(again) == [None] * 4
    save_all(again, 1)
    close_all(again)
    again = open_nodes(tmp_path, NODES, 2)
    check_all(again, 1)
    close_all(again)


@pytest.mark.parametrize("lost", ["n0", pytest.param("n1", marks=pytest.mark.slow)])
def test_a_replaced_node_takes_its_shares_from_a_further_tier(tmp_path: Path, lost: str) -> None:
    """The node's folder is gone, with or without a writer started first; a shared second tier has all."""
    further = [str(tmp_path / "shared")]
    saved(tmp_path, further=further)
    shutil.rmtree(tmp_path / lost)
    again = open_nodes(tmp_path, NODES, 2, further=further)
    if lost == "n0":
        on_all(lambda rank: again[rank].engine.start(), 4)
    check_all(again, 2)
    for ckpt in again:
        assert ckpt.loaded is not None
        came = {repair.file[-17:-12] for repair in ckpt.loaded.repairs if repair.good.endswith("shared")}
        assert came == ({"00000", "00001"} if lost == "n0" else {"00002", "00003"})
    save_all(again, 3)
    close_all(again)
    again = open_nodes(tmp_path, NODES, 2)
    check_all(again, 3)
    close_all(again)


def test_each_byte_is_lent_once_to_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks of a node share what comes from the other one; a rank's own folder is read directly."""
    saved(tmp_path)
    lent: list[int] = []
    found = FolderServer._found

    def count(self: FolderServer, request: dict[str, Any]) -> Any:
        lent.append(request.get("nbytes", 0))
        return found(self, request)

    monkeypatch.setattr(FolderServer, "_found", count)
    again = open_nodes(tmp_path, NODES, 3)
    check_all(again, 2, saved=4)
    close_all(again)
    newest = Repository(open_storage(tmp_path / "n0")).ids()[-1].id
    sizes = [(tmp_path / f"n{rank // 2}" / names.data_name(newest, rank)).stat().st_size for rank in range(4)]
    assert sum(lent) == sum(sizes)


@pytest.mark.parametrize("further", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_leader_that_lends_nothing_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, further: bool) -> None:
    """A further tier takes its place; without one loading fails on every rank, and no older snapshot is taken."""
    tiers = [str(tmp_path / "shared")] if further else []
    saved(tmp_path, further=tiers)

    def gone(*_: Any) -> None:
        raise StorageError("the folder of rank 0 at 127.0.0.1 does not answer: gone")

    monkeypatch.setattr(FolderClient, "get_into", gone)
    again = open_nodes(tmp_path, NODES, 2, further=tiers)
    if further:
        check_all(again, 2)
    else:

        def load(rank: int) -> None:
            with pytest.raises(StorageError, match="does not answer: gone"):
                again[rank].load()

        on_all(load, 4)
    close_all(again)


def test_live_tensors_are_filled(tmp_path: Path) -> None:
    """`into` takes what is in the own folder and what is not."""
    saved(tmp_path)
    again = open_nodes(tmp_path, NODES, 2)
    live = [state_of(9, rank) for rank in range(4)]
    for rank, state in enumerate(on_all(lambda rank: again[rank].load(into=live[rank]), 4)):
        check(state, 2, rank)
        assert state["model"]["weight"] is live[rank]["model"]["weight"]
    close_all(again)


def test_a_step_that_is_asked_for(tmp_path: Path) -> None:
    """`load(step=...)` finds an older one; one that is nowhere is an error on every rank."""
    saved(tmp_path)
    again = open_nodes(tmp_path, NODES, 2)
    for rank, state in enumerate(load_all(again, step=1)):
        check(state, 1, rank)

    def load(rank: int) -> None:
        with pytest.raises(ResumeError, match="no snapshot of step 7"):
            again[rank].load(step=7)

    on_all(load, 4)
    close_all(again)


def test_one_process_cannot_load_a_nodes_part(tmp_path: Path) -> None:
    """It says whose shares the folder has."""
    saved(tmp_path)
    with (
        Checkpointer(tmp_path / "n1") as alone,
        pytest.raises(NoUsableSnapshotError, match=r"n1 has the shares of ranks 2, 3 of 4 only"),
    ):
        alone.load()


def test_nothing_there_is_a_fresh_start(tmp_path: Path) -> None:
    """No folder is made by looking."""
    ranks = open_nodes(tmp_path, NODES, 2)
    assert load_all(ranks) == [None] * 4
    assert list(tmp_path.iterdir()) == []
