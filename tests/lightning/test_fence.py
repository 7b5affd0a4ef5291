"""Nothing changes a lazily copied tensor before its copy is complete, wherever a trainer mutates weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from ckpt_engine.errors import StateError
from ckpt_engine.snapshot.stage import Staging, StepFence
from lightning_ckpt import AdaptiveCheckpoint
from lightning_ckpt.callback import FenceGuard
from tests.lightning.cases import HAS_AVERAGING, averaging
from tests.lightning.runs import Case, Model, every_batch, fit, make_trainer, train


class SlowCopies(Callback):
    """Holds the background copy back until a validation runs or a fence completes it.

    Any missing fence then is a torn snapshot: nothing is copied before weights change, or while others stand in.
    """

    def __init__(self, queued: list[Staging], copy: Any) -> None:
        self.queued, self.copy = queued, copy

    def on_validation_batch_start(self, *args: Any) -> None:
        for staging in self.queued:
            self.copy(staging)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowCopies:
    queued: list[Staging] = []
    callback = SlowCopies(queued, Staging.help_lazily)
    monkeypatch.setattr(Staging, "help_lazily", lambda staging: queued.append(staging))
    return callback


MUTATIONS = {
    "automatic": Case(),
    "fused": Case(fused=True),
    "validation": Case(val=1, callbacks=averaging if HAS_AVERAGING else list),
    "accumulation and averaging": Case(
        val=1, callbacks=averaging if HAS_AVERAGING else list, trainer={"accumulate_grad_batches": 2}
    ),
    "scaler": Case(amp=True),
    "by hand": Case(manual="two"),
    "by hand, raw": Case(manual="raw"),
}


def sparse(root: Path, **options: Any) -> AdaptiveCheckpoint:
    """Snapshots at every boundary where a slot is free; debug compares every lazily copied byte."""
    return AdaptiveCheckpoint(str(root), every_n_steps=1, writer="thread", lazy="on", debug=True, **options)


@pytest.mark.parametrize("name", MUTATIONS)
def test_no_snapshot_is_torn(name: str, tmp_path: Path, slow: SlowCopies) -> None:
    """Every byte is compared with an immediate copy while nothing but the fence completes the copying."""
    reference = fit(MUTATIONS[name])
    ckpt = sparse(tmp_path)
    watched = fit(MUTATIONS[name], [ckpt, slow])
    assert watched.trace == reference.trace
    assert watched.digest == reference.digest


def without(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    """The guard has no such hook."""
    made = FenceGuard.__init__

    def init(guard: FenceGuard, hooks: dict[str, Any]) -> None:
        made(guard, {name: do for name, do in hooks.items() if name != hook})

    monkeypatch.setattr(FenceGuard, "__init__", init)


@pytest.mark.parametrize("name", ["automatic", "validation", "by hand, raw"])
def test_the_comparison_sees_a_missing_fence(
    name: str, tmp_path: Path, slow: SlowCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the fences the same runs differ, so the test above can fail."""
    without(monkeypatch, "on_before_optimizer_step")
    monkeypatch.setattr(StepFence, "install", lambda self: None)
    with pytest.raises(StateError, match="changed between the snapshot instant and the fence"):
        fit(MUTATIONS[name], [sparse(tmp_path), slow])


def test_the_comparison_sees_a_validation_without_a_fence(
    tmp_path: Path, slow: SlowCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged weights stand in for the real ones there."""
    without(monkeypatch, "on_validation_start")
    case = MUTATIONS["accumulation and averaging"]
    if not HAS_AVERAGING:
        pytest.skip("this Lightning has no weight averaging")
    with pytest.raises(StateError, match="changed between the snapshot instant and the fence"):
        fit(case, [sparse(tmp_path), slow])


class MutatesFirst(torch.optim.SGD):
    """Perturbs the weights before it runs its closure, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1e-3)
        return super().step(closure)


class Sharp(Model):
    def configure_optimizers(self) -> Any:
        return MutatesFirst(self.parameters(), lr=1e-2)


def test_an_optimizer_that_changes_weights_before_its_closure(tmp_path: Path, slow: SlowCopies) -> None:
    """An unknown `step` gets its fence before the closure."""
    model = Sharp(Case(), [])
    train(make_trainer(Case(), [sparse(tmp_path), slow], False), model, Case(), None)


class Momentum(Model):
    """Updates a second set of weights in forward, as momentum encoders do."""

    def __init__(self, case: Case, trace: list[Any]) -> None:
        super().__init__(case, trace)
        self.target = torch.nn.Linear(6, 8).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.net[0].parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


def test_weights_that_no_optimizer_manages_are_copied_at_once(tmp_path: Path, slow: SlowCopies) -> None:
    """They may change before any optimizer step."""
    train(make_trainer(Case(), [sparse(tmp_path), slow], False), Momentum(Case(), []), Case(), None)


def test_lazy_off_copies_everything_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No fence is needed then."""
    without(monkeypatch, "on_before_optimizer_step")
    monkeypatch.setattr(StepFence, "install", lambda self: None)
    fit(Case(), every_batch(tmp_path, lazy="off"))
