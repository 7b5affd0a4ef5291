"""Models whose state is neither a fixed set of dense tensors nor known to torch."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from ckpt_engine.errors import UnstorableLeafError
from lightning_ckpt import AdaptiveCheckpoint
from lightning_ckpt.sharded import ranks_of
from tests.lightning.runs import Case, EverySnapshotIsDurable, Model, every_batch, fit, only, resumer, saved, tail


class Extra(nn.Module):
    """Remembers how often it was called, in what `get_extra_state` returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls = torch.zeros(1)

    def forward(self) -> None:
        grown = torch.cat([self.calls, torch.ones(1)])
        self.calls = grown if self.kind != "tensor" else self.calls + 1

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "list": self.calls.tolist()} if self.kind == "dictionary" else self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"] if self.kind == "dictionary" else state


class WithExtra(Model):
    kind = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.extra = Extra(self.kind)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.extra()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "kind", ["dictionary", *(pytest.param(one, marks=pytest.mark.slow) for one in ("tensor", "growing tensor"))]
)
def test_extra_state_is_of_any_shape(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_extra_state` decides whether it fits, not a comparison with what a fresh model has."""
    monkeypatch.setattr(WithExtra, "kind", kind)
    case = Case(model=WithExtra)
    reference = fit(case, max_epochs=2)
    fit(case, every_batch(tmp_path / "run", every_n_steps=8), max_epochs=2)
    snapshot = next(one for one in saved(tmp_path / "run") if (one.epoch, one.batch) == (1, 2))
    root = only(tmp_path / "run", snapshot, tmp_path / "one")
    resumed = fit(case, [resumer(root)], ckpt_path="auto", seed=7, max_epochs=2)
    assert resumed.trace == tail(reference.trace, 1, 2)
    assert resumed.digest == reference.digest
    assert isinstance(resumed.model, WithExtra)
    assert isinstance(reference.model, WithExtra)
    assert torch.equal(resumed.model.extra.calls, reference.model.extra.calls)


class Sparse(Model):
    """An embedding with sparse gradients, which wait for a second batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.table = nn.Embedding(30, 6, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y, ids = batch
        twice = torch.cat([ids, ids.flip(0)])
        loss = ((self.net(x + self.table(twice)[: len(ids)] + self.table(ids // 2)) - y) ** 2).mean()
        self.trace.append(("train", self.current_epoch, batch_idx, self.global_step, float(loss).hex()))
        self.manual_backward(loss)
        for optimizer in self.optimizers()[0 if batch_idx % 2 else 1 :]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.table.parameters(), lr=0.1), torch.optim.Adam(self.net.parameters(), lr=0.01)]


def test_sparse_gradients_that_wait_are_part_of_a_snapshot(tmp_path: Path) -> None:
    """As they are: adding up what belongs to one row would round in another order."""
    case = Case(model=Sparse, manual="by hand")
    reference = fit(case, max_epochs=2)
    fit(case, every_batch(tmp_path / "run"), max_epochs=2)
    for batch in (3, 4):
        snapshot = next(one for one in saved(tmp_path / "run") if (one.epoch, one.batch) == (1, batch))
        root = only(tmp_path / "run", snapshot, tmp_path / str(batch))
        resumed = fit(case, [resumer(root)], ckpt_path="auto", seed=7, max_epochs=2)
        assert resumed.trace == tail(reference.trace, 1, batch)
        assert resumed.digest == reference.digest


class TurnsOdd(Callback):
    """From some step on its state holds what cannot be stored."""

    def __init__(self, step: int) -> None:
        self.step, self.now = step, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.now = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"odd": object() if self.now >= self.step else None}


@pytest.mark.parametrize(("step", "on_error"), [(5, "warn"), (5, "raise"), (1, "warn")])
def test_what_cannot_be_stored_any_more_does_not_end_a_long_run(
    step: int, on_error: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From the start on it is an error at once; later `on_error` decides."""
    ckpt = AdaptiveCheckpoint(str(tmp_path), every_n_steps=1, writer="thread", at_end=False, on_error=on_error)
    callbacks = [TurnsOdd(step), ckpt, EverySnapshotIsDurable(ckpt)]
    if (step, on_error) == (5, "warn"):
        with caplog.at_level(logging.ERROR):
            fit(dataclasses.replace(Case()), callbacks, max_epochs=2)
        assert [one.step for one in saved(tmp_path)][-1] == 4
        assert sum("no snapshot of step" in one.getMessage() and "odd" in one.getMessage() for one in caplog.records)
    else:
        with pytest.raises(UnstorableLeafError, match="odd"):
            fit(Case(), callbacks, max_epochs=2)


def test_a_strategy_of_one_device_is_one_process(tmp_path: Path) -> None:
    """That is so whatever world size the trainer reports."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.strategy.world_size = 2  # type: ignore[attr-defined]
    assert trainer.world_size == 2
    assert ranks_of(trainer) is None
