"""The commands on snapshots of DTensors: what is said, checked, copied and exported is of whole tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate, Shard

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.cli.main import commands
from tests.ranks.sharded.pretend import mesh_of, part, pretended
from tests.ranks.sharded.test_save_load import save

WEIGHT = torch.arange(77.0).view(7, 11)
MOMENT = torch.arange(300.0, dtype=torch.float64).view(12, 25)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Columns over two ranks that two others repeat, and rows over four."""
    with pretended(4):
        states: list[dict[str, Any]] = []
        for rank in range(4):
            pairs, flat = mesh_of([[0, 1], [2, 3]], rank), mesh_of([0, 1, 2, 3], rank)
            weight = part(WEIGHT, pairs, [Replicate(), Shard(1)])
            states.append({"state_dict": {"w": weight, "tied": weight, "rows": part(MOMENT, flat, [Shard(0)])}})
        save(tmp_path / "run", states)
    yield tmp_path / "run"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(commands, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_verify_reads_every_byte(folder: Path) -> None:
    """A flipped bit in the share of one rank is found."""
    run("verify", str(folder))
    share = next((folder / "data").glob("*r00002*"))
    data = bytearray(share.read_bytes())
    data[-3] ^= 1
    share.write_bytes(data)
    assert CliRunner().invoke(commands, ["verify", str(folder)]).exit_code != 0


def test_show_tells_whole_shapes(folder: Path) -> None:
    """Every tensor once, with the shape that the model has."""
    shown = json.loads(run("show", str(folder), "--json"))["entries"]
    assert {name: entry["shape"] for name, entry in shown.items()} == {
        "state_dict/w": [7, 11],
        "state_dict/rows": [12, 25],
    }
    assert "state_dict: dict (3), 3 arrays" in run("show", str(folder))


def test_export_puts_the_parts_together(folder: Path, tmp_path: Path) -> None:
    """As safetensors, and as a file for torch."""
    run("export", str(folder), str(tmp_path / "out.safetensors"), "--to", "safetensors")
    exported = load_file(tmp_path / "out.safetensors")
    assert torch.equal(exported["w"], WEIGHT)
    assert torch.equal(exported["rows"], MOMENT)
    run("export", str(folder), str(tmp_path / "out.pt"), "--to", "torch")
    state = torch.load(tmp_path / "out.pt")["state_dict"]
    assert torch.equal(state["tied"], WEIGHT)
    assert torch.equal(state["rows"], MOMENT)


def test_a_copy_is_the_same_snapshot(folder: Path, tmp_path: Path) -> None:
    """Copied to another place it loads, and does not differ."""
    copy = tmp_path / "copy"
    run("cp", str(folder), str(copy))
    with Checkpointer(copy) as alone:
        state = alone.load()
    assert state is not None
    assert torch.equal(state["state_dict"]["w"], WEIGHT)
