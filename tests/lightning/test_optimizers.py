"""Optimizers and weights that `load_state_dict` alone would not put back, in Lightning."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.runs import Case, Model, every_batch, make_trainer, only, resumer, saved, tail, train
from tests.state.optimizers.nested import Sharpness, Slow
from tests.state.optimizers.runs import plain
from tests.state.optimizers.wrapped import LowBit, Moments, Scaled, nested, scaled
from tests.support.digests import seed_everything

BATCHES = 6
"""Of an epoch."""


class Wrapped(Model):
    """Weights, buffers and moments of other tensors."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.low, self.observed = LowBit(scaled(6), as_parameter=True), LowBit(nested(6), as_parameter=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, ids = batch
        with torch.no_grad():
            x = self.observed(self.low(x)) / 300
        return super().training_step((x, y, ids), batch_idx)

    def configure_optimizers(self) -> Any:
        return Moments(self.net.parameters(), Scaled)


class Started(Wrapped):
    """A hook that could change them at each start."""

    def on_train_start(self) -> None:
        """Does nothing."""


class Texts(torch.optim.SGD):
    """State that is neither a tensor nor a number."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state["kind"] = torch.Size([1])
            state["seen"] = {"text": "a" * (len(state.get("seen", {}).get("text", "")) + 1)}
            state["pair"] = [torch.ones(1, dtype=torch.int64), ("b", 1 + 2j)]
        return loss


class WithTexts(Model):
    def configure_optimizers(self) -> Any:
        return Texts(self.net.parameters(), lr=1e-2, momentum=0.9)


def fit(
    kind: type[Model], *args: Any, seed: int = 0, ckpt_path: str | None = None, optimizers: bool = True
) -> tuple[list[Any], str]:
    """The trace of a fit, and where it ended."""
    seed_everything(seed)
    case, trace = Case(model=kind), list[Any]()
    model = kind(case, trace)
    trainer = make_trainer(case, *args, None, max_epochs=2)
    train(trainer, model, case, ckpt_path)
    states = [one.state_dict() for one in trainer.optimizers if optimizers]
    return trace, repr(plain([dict(model.state_dict()), states]))


def without_rates(trace: list[Any]) -> list[Any]:
    """Groups may be in another order."""
    return [entry[:-1] for entry in trace]


def one_snapshot(kind: type[Model], folder: Path, batch: int = 2) -> Path:
    """The folder of a run that was killed there, in its second epoch."""
    fit(kind, every_batch(folder / "run", every_n_steps=BATCHES + batch))
    snapshot = next(one for one in saved(folder / "run") if (one.epoch, one.batch) == (1, batch))
    return only(folder / "run", snapshot, folder / "one")


def assert_exact(kind: type[Model], folder: Path, batch: int = 2) -> None:
    """A resumed fit is the uninterrupted one, bit for bit."""
    trace, end = fit(kind, [])
    root = one_snapshot(kind, folder, batch)
    found, found_end = fit(kind, [resumer(root)], seed=7, ckpt_path="auto")
    assert found == tail(trace, 1, batch)
    assert found_end == end


@pytest.mark.cells(1)
@pytest.mark.parametrize("kind", [Wrapped, Started, WithTexts])
def test_state_of_other_kinds_is_resumed_bit_for_bit(kind: type[Model], tmp_path: Path) -> None:
    assert_exact(kind, tmp_path)


class Sharp(Model):
    """Its optimizer begins a step with the gradients that the one before has left: Lightning's closure clears them."""

    def configure_optimizers(self) -> Any:
        return Sharpness(list(self.net.parameters()))


class SharpByInner(Model):
    def configure_optimizers(self) -> Any:
        return Sharpness(self.net.parameters(), delegates=True)


class SharpAndScheduled(Model):
    """Its groups change, too."""

    def configure_optimizers(self) -> Any:
        optimizer = Sharpness(self.net.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Around(Model):
    def configure_optimizers(self) -> Any:
        return Slow(self.net.parameters())


class Shuffled(Model):
    """Takes its parameters, and its groups, in an order that differs from process to process."""

    order = 0

    def configure_optimizers(self) -> Any:
        dice = random.Random(self.order)
        named = dict(self.net.named_parameters())
        groups = [[p for name, p in named.items() if name.endswith(end)] for end in ("weight", "bias")]
        for group in groups:
            dice.shuffle(group)
        rows = [{"params": group, "weight_decay": 0.1 * n} for n, group in enumerate(groups)]
        return torch.optim.AdamW(rows[::-1] if self.order % 2 else rows, lr=1e-2)


@pytest.mark.cells(2)
@pytest.mark.parametrize("kind", [Sharp, SharpByInner, SharpAndScheduled, Around])
@pytest.mark.parametrize("batch", [1, 4])
def test_optimizers_within_others_are_resumed_bit_for_bit(kind: type[Model], batch: int, tmp_path: Path) -> None:
    assert_exact(kind, tmp_path, batch)


@pytest.mark.cells(1)
@pytest.mark.parametrize("order", [1, 2, 5])
def test_parameters_in_another_order_get_their_own_state(
    order: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, weights = fit(Shuffled, [], optimizers=False)
    root = one_snapshot(Shuffled, tmp_path)
    monkeypatch.setattr(Shuffled, "order", order)
    found, found_weights = fit(Shuffled, [resumer(root)], seed=7, ckpt_path="auto", optimizers=False)
    assert without_rates(found) == without_rates(tail(trace, 1, 2))
    assert found_weights == weights
    notes = json.loads((root / "resume-report.json").read_text())["notes"]
    assert [note for note in notes if "gives its parameters in another order" in note]


class Unshared(Model):
    def configure_optimizers(self) -> Any:
        return Sharpness(list(self.net.parameters()), shares=False)


def test_an_inner_optimizer_whose_state_no_snapshot_has_is_named(tmp_path: Path) -> None:
    root = one_snapshot(Unshared, tmp_path)
    fit(Unshared, [resumer(root)], seed=7, ckpt_path="auto")
    lost = json.loads((root / "resume-report.json").read_text())["not_restored"]
    assert [row for row in lost if "base_optimizer" in row["name"] + row["why"]]
