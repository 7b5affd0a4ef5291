"""Optimizers and weights that `load_state_dict` alone would not put back, in Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.runs import Case, Model, every_batch, make_trainer, only, resumer, saved, tail, train
from tests.optimizers.runs import plain
from tests.optimizers.wrapped import LowBit, Moments, Scaled, nested, scaled
from tests.support.digests import seed_everything


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


def fit(kind: type[Model], *args: Any, seed: int = 0, ckpt_path: str | None = None) -> tuple[list[Any], str]:
    """The trace of a fit, and where it ended."""
    seed_everything(seed)
    case, trace = Case(model=kind), list[Any]()
    model = kind(case, trace)
    trainer = make_trainer(case, *args, None, max_epochs=2)
    train(trainer, model, case, ckpt_path)
    states = [one.state_dict() for one in trainer.optimizers]
    return trace, repr(plain([dict(model.state_dict()), states]))


@pytest.mark.parametrize("kind", [Wrapped, Started, WithTexts])
def test_state_of_other_kinds_is_resumed_bit_for_bit(kind: type[Model], tmp_path: Path) -> None:
    trace, end = fit(kind, [])
    fit(kind, every_batch(tmp_path / "run"))
    snapshot = next(one for one in saved(tmp_path / "run") if (one.epoch, one.batch) == (1, 2))
    root = only(tmp_path / "run", snapshot, tmp_path / "one")
    found, found_end = fit(kind, [resumer(root)], seed=7, ckpt_path="auto")
    assert found == tail(trace, 1, 2)
    assert found_end == end
