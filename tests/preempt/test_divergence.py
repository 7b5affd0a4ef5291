"""The guard over losses: what is a spike, what is a bad batch, and what becomes of a run that diverges."""

from __future__ import annotations

import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ckpt_engine.errors import DivergedError, RollbackRequestedError
from ckpt_engine.loop.boundary import Losses
from ckpt_engine.loop.diverging import Rollbacks
from ckpt_engine.preempt.divergence import LEAST, PATIENCE, LossGuard, On, limit_of
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.runs import Case, Model, every_batch, fit, resumer, saved


def trained(on: On = On.LOSS_SPIKE, number: int = 60) -> LossGuard:
    """A guard that has seen a loss fall from 3 to 2, with noise."""
    guard, noise = LossGuard(on), random.Random(1)
    for step in range(number):
        assert guard.judge(step, 3.0 - step / number + noise.gauss(0, 0.1)) is None
    return guard


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("on", list(On))
def test_a_loss_that_is_not_finite_is_divergence_at_once(on: On, loss: float) -> None:
    """That is so for the first loss too: the weights are lost with it."""
    found = LossGuard(on).judge(5, loss)
    assert found is not None and found.text() == f"the loss of step 5 is {loss}"


def test_losses_that_stay_far_above_are_divergence() -> None:
    """The first ones are suspicious only; the message has what was usual."""
    guard = trained()
    for step in range(100, 100 + PATIENCE - 1):
        assert guard.judge(step, 30.0) is None
        assert guard.suspicious
    found = guard.judge(100 + PATIENCE - 1, 31.0)
    assert found is not None and (found.first_step, found.loss) == (100, 31.0)
    assert found.text().startswith("the loss is far above its usual 2.")


def test_a_bad_batch_is_none() -> None:
    """The loss comes back, and what was far above is not usual afterwards."""
    guard = trained()
    assert guard.judge(100, 30.0) is None
    assert guard.judge(101, 2.1) is None
    assert not guard.suspicious
    for step in range(200, 200 + PATIENCE - 1):
        guard.judge(step, 30.0)
    assert guard.judge(300, 30.0) is not None


def test_only_nan_may_be_asked_for() -> None:
    """With `nan` no finite loss is a divergence."""
    guard = trained(On.NAN)
    assert all(guard.judge(step, 1e30) is None for step in range(20))
    assert not guard.suspicious


def test_nothing_is_far_above_too_little() -> None:
    """The first losses of a run are all over the place."""
    assert limit_of([1.0] * (LEAST - 1)) == math.inf
    assert limit_of([1.0] * LEAST) == pytest.approx(2.0)


losses = st.lists(st.floats(0.01, 10), min_size=LEAST, max_size=200)


@given(losses, st.floats(0.1, 10))
def test_the_limit_has_no_unit(usual: list[float], factor: float) -> None:
    """It scales with the losses, and half of them being huge does not move it out of reach."""
    assert limit_of([loss * factor for loss in usual]) == pytest.approx(limit_of(usual) * factor)
    assert limit_of(usual) >= 2.0 * sorted(usual)[(len(usual) - 1) // 2]


@given(losses)
def test_what_is_below_the_limit_never_stops_a_run(usual: list[float]) -> None:
    """A run whose losses keep within twice their median goes on."""
    guard = LossGuard(On.LOSS_SPIKE)
    assert all(guard.judge(step, 1.0 + loss / 20) is None for step, loss in enumerate(usual))


def test_losses_of_any_form_are_found() -> None:
    """A tensor, a mapping with one, or nothing to judge."""
    watched = Losses(On.NAN)
    for outputs in (None, {}, {"loss": torch.tensor([1.0, 2.0])}, torch.tensor(1.0), {"loss": torch.tensor([2.0])}):
        watched.add(1, outputs)
    assert watched.veto(due=True) is False
    watched.add(2, {"loss": torch.tensor(math.nan)})
    assert watched.divergence is None
    assert watched.veto(due=False) is True
    assert watched.divergence is not None and watched.divergence.text() == "the loss of step 2 is nan"
    watched.add(3, torch.tensor(1.0))
    assert watched.veto(due=False) is True  # the update after it was of no use: nothing is saved any more
    assert watched.divergence.step == 2


# ---------------------------------------------------------------------- in training


class Explodes(Model):
    """Its loss grows a thousandfold from the 18th batch on, or is lost in it."""

    factor = 1000.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.fit_loop.total_batch_idx < 18:
            return loss
        return loss * self.factor + 1000.0


class Loses(Explodes):
    factor = math.nan


LONG = {"max_epochs": 6}


@pytest.mark.long
@pytest.mark.parametrize(("model", "guard", "last"), [(Loses, "nan", 18), (Explodes, "loss_spike", 18)])
def test_a_run_that_diverges_ends_before_it_is_saved(
    model: type[Model], guard: str, last: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest snapshot is from before, so a restart resumes there; the error says so."""
    case = Case(model=model, trainer=LONG)
    with pytest.raises(DivergedError) as caught:
        fit(case, every_batch(tmp_path, guard=guard))
    assert saved(tmp_path)[-1].step == last
    assert f"step {last} is durable on {tmp_path}" in str(caught.value)
    assert "ckpt_path='auto'" in str(caught.value)
    resumed = fit(Case(trainer={"max_epochs": 4}), [resumer(tmp_path)], ckpt_path="auto")
    assert resumed.trace[0][3] == last  # the step it goes on with


def test_a_signal_while_it_ends_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who calls `fit` again after a rollback would go on training."""
    found = Rollbacks.error

    def late(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return found(*args)

    monkeypatch.setattr(Rollbacks, "error", late)
    with pytest.raises(SIGTERMException) as caught:
        fit(Case(model=Loses, trainer=LONG), every_batch(tmp_path, rollback={"on": "nan"}))
    assert caught.value.code == 143
    assert isinstance(caught.value.__cause__, RollbackRequestedError)
    assert (tmp_path / "rollback.json").exists()


def test_a_guarded_run_is_the_same_run(tmp_path: Path) -> None:
    """Bit for bit; and without a guard nothing is judged."""
    assert AdaptiveCheckpoint(str(tmp_path)).config.guard == "off"
    reference = fit(Case())
    guarded = fit(Case(), every_batch(tmp_path, guard="loss_spike"))
    assert guarded.trace == reference.trace and guarded.digest == reference.digest
