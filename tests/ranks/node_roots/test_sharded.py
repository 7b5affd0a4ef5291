"""DTensors of ranks whose nodes have a folder each: any layout reads what any other has written, over the nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_engine.state.sharding import here
from tests.ranks.node_roots.nodes import open_nodes
from tests.ranks.runs import on_all
from tests.ranks.sharded.test_save_load import LAYOUTS, divided, four_ranks  # noqa: F401
from tests.ranks.test_checkpointer import close_all

NODES = ("n0", "n1")


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("layout", "others"),
    [
        pytest.param("strided", ["columns"], id="quick"),
        *(pytest.param(one, list(LAYOUTS), id=one, marks=pytest.mark.slow) for one in LAYOUTS),
    ],
)
def test_any_layout_reads_what_another_has_written(tmp_path: Path, layout: str, others: list[str]) -> None:
    """Live DTensors are filled in place, with what is in the own folder and what is not."""
    ranks = open_nodes(tmp_path, NODES, 2)
    for handle in on_all(lambda rank: ranks[rank].save(divided(rank, layout), step=1), 4):
        handle.wait(60)
    close_all(ranks)
    for other in others:
        again = open_nodes(tmp_path, NODES, 2)
        live = [divided(rank, other, seed=1) for rank in range(4)]
        wanted = [divided(rank, other) for rank in range(4)]
        for rank, state in enumerate(on_all(lambda rank: again[rank].load(into=live[rank]), 4)):  # noqa: B023
            for name, tensor in state["model"].items():
                assert tensor is live[rank]["model"][name]
                assert torch.equal(here(tensor), here(wanted[rank]["model"][name])), (other, name, rank)
            assert state["own"] == {"rank": rank}
        close_all(again)
