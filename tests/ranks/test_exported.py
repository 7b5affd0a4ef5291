"""Snapshots of several ranks for other programs: shares are merged, and a rank's own components are no weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open
from torch.distributed.checkpoint import FileSystemReader

from ckpt_engine.cli.main import main
from tests.ranks.runs import on_all, open_ranks

Ckpt = Callable[..., str]


def state_of(rank: int) -> dict[str, Any]:
    return {
        "state_dict": {"weight": torch.arange(200_000.0).reshape(2000, 100), "bias": torch.ones(8)},
        "optimizer": {"state": {0: {"mean": torch.arange(100_000.0)}}, "param_groups": [{"lr": 0.1}]},
        "own": {"stream": torch.full((50,), rank)},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One snapshot of three ranks."""
    folder = tmp_path_factory.mktemp("ranks") / "run"
    ranks = open_ranks(folder, 3)
    for handle in on_all(lambda rank: ranks[rank].save(state_of(rank), step=1), 3):
        handle.wait(60)
    on_all(lambda rank: ranks[rank].close(), 3)
    return folder


@pytest.fixture
def ckpt(capfd: pytest.CaptureFixture[str]) -> Ckpt:
    """Runs `ckpt`; what it says."""

    def call(*arguments: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        said = "".join(capfd.readouterr())
        assert (end.value.code or 0) == code, said
        return said

    return call


def test_weights_are_merged(run: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    """Rows that three ranks have written are one tensor again."""
    ckpt("export", run, tmp_path / "model.safetensors", "--to", "safetensors")
    found = load_file(tmp_path / "model.safetensors")
    expected = state_of(0)["state_dict"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("rank", [0, 2])
def test_all_tensors_are_those_of_one_rank(run: Path, tmp_path: Path, ckpt: Ckpt, rank: int) -> None:
    """The others' own components are no weights; any rank's can be had."""
    said = ckpt("export", run, tmp_path / "all.safetensors", "--to", "safetensors", "--only", "*", "--rank", rank)
    found = load_file(tmp_path / "all.safetensors")
    assert set(found) == {"state_dict/weight", "state_dict/bias", "optimizer/state/0/mean", "own/stream"}
    assert torch.equal(found["own/stream"], torch.full((50,), rank))
    assert f"of 3 ranks: what each of them had of its own is that of rank {rank}" in said


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_whole_states_are_those_of_one_rank(run: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    """As a file of torch and as a folder of dcp."""
    ckpt("export", run, tmp_path / "state.pt", "--to", "torch", "--rank", 1)
    state = torch.load(tmp_path / "state.pt")
    assert state.keys() == state_of(1).keys()
    assert torch.equal(state["own"]["stream"], torch.full((50,), 1))
    assert torch.equal(state["optimizer"]["state"][0]["mean"], torch.arange(100_000.0))
    ckpt("export", run, tmp_path / "dcp", "--to", "dcp")
    names = set(FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata)
    assert "own.stream" in names
    assert not any(name.startswith("ranks") for name in names)


def test_a_rank_that_was_not_there_is_refused(run: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    """The message says which there are, and nothing is written."""
    assert "taken by ranks 0 to 2" in ckpt("export", run, tmp_path / "x", "--to", "torch", "--rank", 3, code=2)
    assert not (tmp_path / "x").exists()


def test_a_share_is_a_file_of_its_own(run: Path) -> None:
    """Any safetensors reader reads the rows of one rank without the others' files."""
    expected = state_of(0)["state_dict"]["weight"]
    rows = {}
    for rank, file in enumerate(sorted((run / "data").iterdir())):
        with safe_open(file, "pt") as share:
            parts = [name for name in share.keys() if name.startswith("state_dict/weight")]  # noqa: SIM118 - no mapping
            rows[rank] = torch.cat([share.get_tensor(name) for name in parts]) if parts else torch.empty(0, 100)
            own = share.get_tensor(f"ranks/{rank}/own/stream")
            assert torch.equal(own, torch.full((50,), rank))
    assert sum(map(len, rows.values())) == 2000
    assert sum(len(one) > 0 for one in rows.values()) > 1, "one rank has written all of it"
    assert torch.equal(torch.cat([rows[rank] for rank in sorted(rows)]), expected)


def test_show_says_whose_is_what(run: Path, ckpt: Ckpt) -> None:
    """The shares by file, and the own components as such."""
    said = ckpt("show", run)
    assert "world size 3" in said
    assert said.count("-r0000") == 3
    assert "own of 3 ranks" in said
