"""Nothing changes a lazily copied tensor before its copy is complete, wherever a trainer mutates weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from ckpt_engine.snapshot.step_fence import StepFence
from lightning_ckpt import AdaptiveCheckpoint
from lightning_ckpt.callback import FenceGuard
from tests.lightning.cases import HAS_AVERAGING, averaging
from tests.lightning.runs import Case, Model, fit, make_trainer, train
from tests.support.delayed_devices import DelayedDevices, Instants, delay_copies, record_instants

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


class EachIsDurable(Callback):
    """Waits at the end of a batch, so that a snapshot is taken at the next boundary."""

    def __init__(self, ckpt: AdaptiveCheckpoint) -> None:
        self.ckpt = ckpt

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.ckpt._run is not None and self.ckpt._run.engine.wait(30)


def every_boundary(root: Path, **options: Any) -> list[Callback]:
    """A snapshot of every boundary; copies are delayed until a fence waits for them."""
    options = {"lazy": "on", "on_error": "warn", **options}
    ckpt = AdaptiveCheckpoint(str(root), every_n_steps=1, keep={"last": 1000}, writer="thread", **options)
    return [ckpt, EachIsDurable(ckpt)]


@pytest.fixture
def instants(monkeypatch: pytest.MonkeyPatch) -> Instants:
    """Of a run on a device whose copies are delayed."""
    delay_copies(monkeypatch)
    return record_instants(monkeypatch)


def torn(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "changed while it was copied" in message]


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", MUTATIONS)
def test_no_snapshot_is_torn(name: str, tmp_path: Path, instants: Instants, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing but the fence completes the copying, and it comes early enough everywhere."""
    reference = fit(MUTATIONS[name])
    watched = fit(MUTATIONS[name], every_boundary(tmp_path))
    assert watched.trace == reference.trace
    assert watched.digest == reference.digest
    assert instants.torn(tmp_path) == [] and torn(caplog) == []


def without(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    """The guard has no such hook."""
    made = FenceGuard.__init__

    def init(guard: FenceGuard, hooks: dict[str, Any]) -> None:
        made(guard, {name: do for name, do in hooks.items() if name != hook})

    monkeypatch.setattr(FenceGuard, "__init__", init)


@pytest.mark.long
@pytest.mark.parametrize("name", ["automatic", "by hand, raw"])
def test_a_missing_fence_is_seen(
    name: str, tmp_path: Path, instants: Instants, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the fences the same runs have a torn copy, so the test above can fail."""
    without(monkeypatch, "on_before_optimizer_step")
    monkeypatch.setattr(StepFence, "install", lambda self: None)
    fit(MUTATIONS[name], every_boundary(tmp_path))
    assert len(torn(caplog)) == 1 and instants.torn(tmp_path) == []


class CopiesInValidation(Callback):
    """The copies that are delayed run while a validation does."""

    def __init__(self, devices: DelayedDevices) -> None:
        self.devices = devices

    def on_validation_batch_start(self, *_: Any) -> None:
        self.devices.pump()


def test_a_validation_without_a_fence_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Averaged weights stand in for the real ones there."""
    without(monkeypatch, "on_validation_start")
    if not HAS_AVERAGING:
        pytest.skip("this Lightning has no weight averaging")
    late, instants = CopiesInValidation(delay_copies(monkeypatch)), record_instants(monkeypatch)
    fit(MUTATIONS["accumulation and averaging"], [every_boundary(tmp_path)[0], late])
    assert len(torn(caplog)) == 1 and instants.torn(tmp_path) == []


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


def test_an_optimizer_that_changes_weights_before_its_closure(
    tmp_path: Path, instants: Instants, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown `step` gets its fence before the closure."""
    model = Sharp(Case(), [])
    train(make_trainer(Case(), every_boundary(tmp_path), False), model, Case(), None)
    assert instants.torn(tmp_path) == [] and torn(caplog) == []


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


def test_weights_that_no_optimizer_manages_are_copied_at_once(
    tmp_path: Path, instants: Instants, caplog: pytest.LogCaptureFixture
) -> None:
    """They may change before any optimizer step."""
    train(make_trainer(Case(), every_boundary(tmp_path), False), Momentum(Case(), []), Case(), None)
    assert instants.torn(tmp_path) == [] and torn(caplog) == []


def test_lazy_off_copies_everything_at_once(
    tmp_path: Path, instants: Instants, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No fence is needed then."""
    without(monkeypatch, "on_before_optimizer_step")
    monkeypatch.setattr(StepFence, "install", lambda self: None)
    fit(Case(), every_boundary(tmp_path, lazy="off"))
    assert instants.torn(tmp_path) == [] and torn(caplog) == []
