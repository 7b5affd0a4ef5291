"""Weights that are not the same on all ranks are named with the step and the array, by the writer that commits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.loop.capture import alike, own_values
from ckpt_engine.loop.components import NamedParts
from ckpt_engine.observe.events import Notice
from ckpt_engine.store.manifest import OWN_KEY
from ckpt_engine.store.replicas import REPLICAS
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.ranks.launch import Launcher
from tests.ranks.runs import SharedStore, ThreadRanks, on_all
from tests.support.heard import Heard

SAID = "replicas differ"
Change = Callable[[NamedParts], object]


def trained() -> NamedParts:
    """What each rank trains, the same on all: the seed is."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 600),
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 2, 4, 4)).sum().backward()
    optimizer.step()
    return NamedParts({"model": model, "optimizer": optimizer})


def heard(root: Path, size: int, changes: dict[int, Change], own: tuple[str, ...] = ()) -> list[str]:
    """The warnings about replicas, where these ranks change something before the second of two snapshots."""
    store = SharedStore()
    parts = [trained() for _ in range(size)]
    ranks = [ThreadRanks(rank, size, store, own, alike=alike(parts[rank])) for rank in range(size)]
    ckpts = [Checkpointer(root, ranks=one if size > 1 else None, writer="thread") for one in ranks]
    sink = Heard()
    ckpts[0].engine.events = sink
    for step in (10, 20):

        def save(rank: int, step: int = step) -> None:
            if step == 20 and rank in changes:
                with torch.no_grad():
                    changes[rank](parts[rank])
            state = parts[rank].state()
            tables = own_values(state, ranks[rank] if size > 1 else None)[1]
            ckpts[rank].save({**state, OWN_KEY: {REPLICAS: tables}}, step=step).wait(60)

        on_all(save, size)
    on_all(lambda rank: ckpts[rank].close(), size)
    assert [one.step for one in Repository(LocalStorage(str(root))).list()] == [10, 20]
    return [one.message for one in sink.events if isinstance(one, Notice) and "replicas" in one.message]


def last_bit(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32).view(-1)[-1] ^= 1


def weight(number: int) -> Callable[[NamedParts], torch.Tensor]:
    return lambda parts: list(parts.modules["model"].parameters())[number]


def moment(name: str) -> Callable[[NamedParts], torch.Tensor]:
    return lambda parts: list(parts.optimizers["optimizer"].state.values())[-1][name]


@pytest.mark.parametrize(
    ("size", "rank", "change", "said"),
    [
        (2, 1, lambda parts: last_bit(weight(5)(parts)), "model/3.bias is not the same on rank 1 as on rank 0"),
        (2, 0, lambda parts: weight(4)(parts).mul_(1.001), "model/3.weight is not the same on rank 1 as on rank 0"),
        (
            3,
            0,
            lambda parts: weight(0)(parts)[1].add_(1.0),
            "model/0.weight is not the same on rank 0 as on ranks 1, 2",
        ),
        (
            3,
            2,
            lambda parts: last_bit(moment("exp_avg_sq")(parts)),
            "optimizer/state/5/exp_avg_sq is not the same on rank 2 as on ranks 0, 1",
        ),
    ],
    ids=["one bit", "a large weight", "channels_last", "a moment"],
)
def test_a_rank_that_differs_in_one_array_is_named(
    tmp_path: Path, size: int, rank: int, change: Change, said: str
) -> None:
    """With the step, the array and the ranks, once; the snapshot is taken all the same."""
    (line,) = heard(tmp_path, size, {rank: change})
    assert line.startswith(f"replicas differ at step 20: {said}. ")


def test_several_arrays_are_counted(tmp_path: Path) -> None:
    """The first one is named, of each component."""

    def change(parts: NamedParts) -> None:
        for parameter in parts.modules["model"].parameters():
            parameter.add_(1.0)

    (line,) = heard(tmp_path, 2, {1: change})
    assert "model/0.weight and 5 more" in line


def buffers(parts: NamedParts) -> None:
    for buffer in parts.modules["model"].buffers():
        buffer.add_(1)


def rate(parts: NamedParts) -> None:
    parts.optimizers["optimizer"].param_groups[0]["lr"] = 0.5


@pytest.mark.parametrize(
    ("size", "change", "own"),
    [(2, buffers, ()), (2, rate, ()), (2, lambda parts: weight(0)(parts).zero_(), ("model",)), (1, buffers, ())],
    ids=["statistics of a batch norm", "a learning rate", "each rank has its own module", "one rank alone"],
)
def test_what_may_differ_is_no_alarm(tmp_path: Path, size: int, change: Change, own: tuple[str, ...]) -> None:
    """Buffers, components of a rank's own, what is no weight and no moment, and a process alone."""
    assert heard(tmp_path, size, {size - 1: change}, own) == []


def test_a_replica_that_comes_apart_in_ddp_is_named_at_once_and_at_the_resume(tmp_path: Path) -> None:
    """By real processes. Statistics of a batch norm, noise and data are each rank's own, and give no alarm."""
    launcher = Launcher("tests.ranks.train_replicas")
    said = []
    try:
        for breaks in (3, 0):
            log = tmp_path / f"log{len(said)}"
            launcher.start({"root": str(tmp_path / "run"), "breaks": breaks, "ends": 5}, 2, log)
            assert launcher.join() == [0, 0], Path(f"{log}.0").read_text() + Path(f"{log}.1").read_text()
            said.append(Path(f"{log}.0").read_text())
    finally:
        launcher.close()
    (line,) = [line for line in said[0].splitlines() if SAID in line]
    assert f"{SAID} at step 4: model/2.bias is not the same on rank 1 as on rank 0. " in line
    report = json.loads((tmp_path / "run" / "resume-report.json").read_text())
    (why,) = [row["why"] for row in report["not_restored"] if row["name"] == "model"]
    assert "each rank wrote a part of it" in why
