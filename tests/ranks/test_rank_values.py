"""Values that differ over the ranks are each rank's own after a resume; those that are too large for that are named."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Carry
from ckpt_engine.loop.capture import LARGE_BYTES, Packer, alike, merged, own_values, unpack
from ckpt_engine.loop.components import NamedParts
from lightning_ckpt import restart
from tests.ranks.launch import Launcher
from tests.ranks.runs import SharedStore, ThreadRanks
from tests.ranks.test_kill import SIZE, job_of, lines, logs


def state_of(rank: int, large: float = 0.0) -> dict[str, Any]:
    return {
        "model": OrderedDict(weight=torch.full((9,), 7.0), mean=torch.full((3,), float(rank))),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "stopping": {"wait": rank, "best": [torch.tensor(rank + 0.5), "x"], "seen": list(range(rank))},
        "average": {"weight": torch.full((LARGE_BYTES,), large), "mean": torch.full((3,), rank + 0.5)},
    }


def resumed(saved: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What rank 1, which has saved this, gets beside the values of rank 0; and the names of what it lacks."""

    def divided(path: tuple[Any, ...]) -> bool:
        return path == ("model", "weight") or path[:2] == ("optimizer", "state")

    kept, _ = own_values(saved, ThreadRanks(1, 2, SharedStore(), alike=divided))
    packed = Packer("own").pack({"values": kept})
    assert packed.nbytes < LARGE_BYTES
    found = state_of(0)
    missing = merged(found, unpack(packed)[0]["values"])
    return found, [one.name for one in missing]


def test_a_rank_gets_back_what_it_had() -> None:
    """Numbers, buffers and lists of its own; what is common to all ranks is not kept twice."""
    found, missing = resumed(state_of(1))
    assert repr(found) == repr(state_of(1))
    assert missing == []


def test_what_is_large_and_differs_is_named() -> None:
    """It is that of rank 0; all else is the rank's own."""
    found, missing = resumed(state_of(1, large=1.0))
    assert repr(found) == repr(state_of(1))
    assert found["average"]["weight"][0] == 0.0
    assert missing == ["average/weight"]


def test_rank_0_keeps_nothing_twice() -> None:
    """The snapshot has its values anyway."""
    assert own_values(state_of(0), ThreadRanks(0, 2, SharedStore(), alike=lambda path: False)) == ({}, {})
    assert own_values(state_of(0), None) == ({}, {})


def test_in_a_plain_loop_only_what_is_trained_is_the_same_on_all_ranks() -> None:
    """The statistics of a batch norm and what the loop carries are each rank's own hidden state."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    parts = NamedParts({"model": model, "optimizer": torch.optim.Adam(model.parameters()), "carry": Carry(hidden=1)})
    same = alike(parts)
    assert same(("model", "0.weight")) and same(("model", "1.bias")) and same(("optimizer", "state", 0, "exp_avg"))
    assert not any(map(same, [("model", "1.running_mean"), ("carry", "hidden"), ("optimizer", "param_groups", 0)]))


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_rank_has_its_own_buffers_also_where_ddp_has_exchanged_them(*, wrapped: bool) -> None:
    """Lightning wraps the model after it has loaded it, and DDP begins with the buffers of rank 0 on all ranks."""
    net = torch.nn.BatchNorm1d(2)
    own = {name: tensor.clone() + 1 for name, tensor in net.state_dict().items()}
    net.load_state_dict(own)
    loaded_as = restart.dtypes_of(net)
    net.running_mean.zero_()  # type: ignore[union-attr]
    restart.load_again_where_changed(net, own, loaded_as, buffers=wrapped)
    assert net.running_mean.tolist() == ([1.0, 1.0] if wrapped else [0.0, 0.0])  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", ["train_lightning", "train_accelerate"])
def test_each_rank_goes_on_with_its_own(script: str, tmp_path: Path) -> None:
    """Early stopping that looks at a rank's own loss; averaged weights with the statistics of a rank's own batches."""
    launcher = Launcher(f"tests.ranks.{script}")
    try:
        lives: dict[str, list[list[str]]] = {}
        for life, more in {"whole": {}, "first": {"dies_after": 13}, "second": {"seed": 500}}.items():
            root = str(tmp_path / ("whole" if life == "whole" else "run"))
            changes = {"values": True, "patient": True, "pace": 0.05, "trace": str(tmp_path / life), "root": root}
            job = job_of(tmp_path, **{**changes, **more})
            launcher.start(job, SIZE, tmp_path / "log")
            assert launcher.join() == [0] * SIZE, logs(tmp_path)
            lives[life] = [lines(job["trace"], rank) for rank in range(SIZE)]
    finally:
        launcher.close()
    for rank in range(SIZE):
        expected, done = lives["whole"][rank], lives["second"][rank]
        assert 10 < len(done) < len(expected)
        assert done == expected[-len(done) :], logs(tmp_path)
    assert lives["whole"][0][-1] != lives["whole"][1][-1], "the ranks have the same values: this shows nothing"
    assert json.loads((tmp_path / "second.end").read_text()) == json.loads((tmp_path / "whole.end").read_text())
