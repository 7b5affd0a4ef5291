"""Loops without an optimizer of torch: each step that they announce is a row, which a resume compares."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckpt_engine import Checkpointer
from ckpt_engine.errors import ConfigError
from ckpt_engine.observe.resume_report import FILE_NAME
from tests.probe.lives import END, SNAPSHOT, replay_of
from tests.restore.memory_tier.lives import until as wait_until

RATE, SCALE = 0.05, 1.0
ROWS = torch.randn(40, 3, generator=torch.Generator().manual_seed(3))


class Descent:
    """An optimizer of the user's own, with moments."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.means = model, [torch.zeros_like(p) for p in model.parameters()]

    @torch.no_grad()
    def step(self) -> None:
        for p, mean in zip(self.model.parameters(), self.means, strict=True):
            assert p.grad is not None
            mean.mul_(0.9).add_(p.grad)
            p.sub_(mean, alpha=RATE)

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means = list(state["means"])


def scaled(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(rows) * SCALE


def by_data(model: nn.Module, loss: torch.Tensor, _: Descent) -> None:
    loss.backward()
    for p in model.parameters():
        p.data -= RATE * p.grad
        p.grad = None


def in_place(model: nn.Module, loss: torch.Tensor, _: Descent) -> None:
    with torch.no_grad():
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.add_(grad, alpha=-RATE)


def exchanged(model: Any, loss: torch.Tensor, _: Descent) -> None:
    """Other parameters after each step."""
    loss.backward()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach() - RATE * layer.weight.grad)


def by_descent(model: nn.Module, loss: torch.Tensor, descent: Descent) -> None:
    model.zero_grad()
    loss.backward()
    descent.step()


UPDATES = [by_data, in_place, exchanged, by_descent]
Update = Callable[[nn.Module, torch.Tensor, Descent], None]


def life(
    root: Path, update: Update, until: int, *, loader: bool, seed: int = 0, fault: int = 0, **given: Any
) -> tuple[list[torch.Tensor], Any]:
    """One process: the weights at its end, and its resume report."""
    torch.manual_seed(seed)
    (root / FILE_NAME).unlink(missing_ok=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    descent = Descent(model)
    rows = DataLoader(ROWS, batch_size=4, shuffle=True, collate_fn=scaled)  # type: ignore[arg-type]
    tracked = {"model": model, "descent": descent, **({"loader": rows} if loader else {})}
    options = {"every_n_steps": SNAPSHOT, "at_end": False, "writer": "thread", **given}

    def batches(begin: int) -> Iterator[torch.Tensor]:
        while loader:
            yield from rows
        yield from (torch.randn(4, 3) for _ in range(begin, until))

    with Checkpointer(root, **options) as ckpt:
        run = ckpt.track(**tracked)
        for x in batches(run.global_step):
            wait_until(ckpt.engine.ready, lambda: "no snapshot could be taken")
            update(model, (model(x) - 1).square().mean(), descent)
            if run.global_step == fault - 1:
                model[0].weight.data[3, 1] += 1e-3
            run.step()
            if run.global_step == until:
                break
    path = root / FILE_NAME
    weights = [one.detach().clone() for one in (*model.parameters(), *descent.means)]
    return weights, json.loads(path.read_text()) if path.exists() else None


@pytest.mark.cells(2)
@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize("update", UPDATES)
def test_a_loop_without_an_optimizer_of_torch_resumes_and_is_compared(
    update: Update, loader: bool, tmp_path: Path
) -> None:
    """Bit for bit; the words of its weights, the batches and the random streams are those of each step."""
    whole, _ = life(tmp_path / "whole", update, END + 3, loader=loader)
    life(tmp_path / "run", update, END, loader=loader)
    again, report = life(tmp_path / "run", update, END + 3, loader=loader, seed=5)
    assert all(map(torch.equal, again, whole))
    replay = replay_of(report)
    assert (replay.result, replay.steps) == ("exact", END - SNAPSHOT)
    assert report["not_restored"] == []


@pytest.mark.parametrize("update", UPDATES)
def test_a_weight_that_differs_in_a_repeated_step_is_named(update: Update, tmp_path: Path) -> None:
    """With its step and the tensor."""
    life(tmp_path, update, END, loader=True)
    replay = replay_of(life(tmp_path, update, END + 1, loader=True, fault=SNAPSHOT + 2)[1])
    assert replay.result == "different"
    assert replay.first is not None
    assert (replay.first.what, replay.first.name.split(".")[0]) == ("weights", "model")
    assert SNAPSHOT + 2 <= replay.first.step <= SNAPSHOT + 4


def test_other_batches_are_found_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tracked loader."""
    life(tmp_path, in_place, END, loader=True)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    replay = replay_of(life(tmp_path, in_place, END + 1, loader=True)[1])
    assert replay.first is not None
    assert (replay.first.what, replay.first.step) == ("batch", SNAPSHOT + 1)


def test_an_optimizer_that_trains_tracked_weights_and_is_not_tracked_is_refused(tmp_path: Path) -> None:
    """At its first step, before anything is saved; one that changes other tensors is none of the run's."""
    model, latent = nn.Linear(3, 1), nn.Parameter(torch.zeros(4, 3))
    inner = torch.optim.Adam([latent], 0.1)
    forgotten = torch.optim.Adam(model.parameters(), 0.1)
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        ckpt.track(model=model)
        model(latent).sum().backward()
        inner.step()
        with pytest.raises(ConfigError, match="needs the optimizer") as caught:
            forgotten.step()
    assert "track(model=model, optimizer=optimizer" in str(caught.value)
    assert not list((tmp_path / "snapshots").glob("[!.]*.json"))


def test_a_loop_that_announces_no_step_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its batches may be trained or looked at: only the loop knows. A request to stop ends it nevertheless."""
    model = nn.Linear(3, 1)
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        loader = DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]
        ckpt.track(model=model, loader=loader)
        with caplog.at_level(logging.WARNING):
            for _ in loader:
                pass
    assert [one for one in caplog.messages if "10 batches without a boundary" in one and "call step()" in one]
    taken = 0
    with pytest.raises(SystemExit), Checkpointer(tmp_path, writer="thread") as ckpt:
        ckpt.track(model=model, loader=loader)
        signal.raise_signal(signal.SIGTERM)
        for _ in range(40):
            for _ in loader:
                taken += 1
    assert taken < 400
