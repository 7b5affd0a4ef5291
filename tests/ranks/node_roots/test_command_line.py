"""The command line where a node's folder has the shares of some ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_engine.checkpointer import Checkpointer
from tests.cli.conftest import Outcome, ckpt
from tests.ranks.node_roots.committing import Nodes
from tests.ranks.test_checkpointer import check

Ckpt = Callable[..., Outcome]
__all__ = ["ckpt"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    """A run of four ranks on two nodes, with two snapshots."""
    made = Nodes(tmp_path_factory.mktemp("run"), (0, 0, 1, 1))
    made.save(1)
    made.save(2)
    made.close()
    return made


@pytest.mark.parametrize(("node", "shares"), [(0, "ranks 0, 1 of 4"), (1, "ranks 2, 3 of 4")])
def test_ls_show_and_verify_say_whose_shares_are_here(nodes: Nodes, ckpt: Ckpt, node: int, shares: str) -> None:
    """The verbs list, show and check the shares that are here as those of other snapshots."""
    root = nodes.root(node)
    assert ckpt("ls", root).out.count(f"manual; {shares}") == 2
    listed = ckpt("ls", root, "--json").json["snapshots"]
    assert [one["partial"] for one in listed] == [{"ranks": [2 * node, 2 * node + 1], "size": 4}] * 2
    shown = ckpt("show", root).out
    assert f"{shares} only" in shown
    assert f"data/{listed[1]['id']}-r0000{2 * node}" in shown
    assert ckpt("show", root, "--json").json["snapshot"]["partial"]["size"] == 4
    checked = ckpt("verify", root)
    assert checked.code == 0
    assert checked.out.count(f"ok: the shares of {shares}") == 2
    assert ckpt("verify", root, "--json").json["snapshots"][0]["partial"]["ranks"] == [2 * node, 2 * node + 1]


def test_verify_finds_damage_in_a_share(nodes: Nodes, tmp_path: Path, ckpt: Ckpt) -> None:
    """One flipped byte of a share is found."""
    mine = Nodes(tmp_path, (0, 1))
    mine.save(1)
    mine.close()
    (file,) = (mine.root(1) / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[-50] ^= 1
    file.write_bytes(data)
    assert ckpt("verify", mine.root(1)).code == 1
    assert ckpt("verify", mine.root(0)).code == 0


def test_what_needs_the_whole_says_what_to_do(nodes: Nodes, tmp_path: Path, ckpt: Ckpt) -> None:
    """Export and diff refuse, and name the command that helps."""
    root = nodes.root(1)
    for command in (("export", root, tmp_path / "out", "--to", "torch"), ("diff", f"{root}#step=1", f"{root}#step=2")):
        done = ckpt(*command)
        assert done.code != 0
        assert "has the shares of ranks 2, 3 of 4 only" in done.err, command
        assert "`ckpt cp` the folders of all nodes" in done.err
    assert not (tmp_path / "out").exists()


def test_folders_of_all_nodes_copied_to_one_place_are_the_run(nodes: Nodes, tmp_path: Path, ckpt: Ckpt) -> None:
    """With the last folder the snapshots exist there; in any order, and again."""
    target = tmp_path / "whole"
    first = ckpt("cp", nodes.root(1), target)
    assert first.code == 0
    assert first.out.count("has the shares of ranks 2, 3 of 4 there: copy the folders of the other nodes, too") == 2
    assert ckpt("cp", nodes.root(1), target).out.count("has the shares of ranks 2, 3 of 4 there") == 2
    last = ckpt("cp", nodes.root(0), target)
    assert last.code == 0
    assert "2 snapshots copied" in last.out
    assert not list((target / "parts").iterdir())
    with Checkpointer(target) as alone:
        check(alone.load(), 2, 0)
        assert [info.step for info in alone.snapshots()] == [1, 2]
    assert "2 there already" in ckpt("cp", nodes.root(0), target).out
    out = tmp_path / "weights"
    assert ckpt("export", target, out, "--to", "torch").code == 0


def test_prune_says_that_others_are_not_known(nodes: Nodes, ckpt: Ckpt) -> None:
    """It does what it is asked for."""
    done = ckpt("prune", nodes.root(0), "--keep", "last=1", "--dry-run")
    assert "what other nodes still have of these snapshots is not known here" in done.out
