"""Replaying `on_train_epoch_start` sets up what a snapshot lacks and changes nothing that the snapshot contains."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback

from ckpt_engine.errors import MismatchError
from tests.lightning.cases import FineTunedModel
from tests.lightning.runs import (
    Case,
    Entry,
    Model,
    Recorder,
    every_batch,
    fit,
    make_trainer,
    only,
    resumer,
    saved,
    seed_everything,
    tail,
    train,
)
from tests.lightning.test_hidden import report


class Counts(Callback):
    """Counts epochs, and saves the count."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class Restless(Model):
    """Its hook changes weights, buffers, learning rates and random streams, all of which a snapshot holds."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        torch.rand(1)
        with torch.no_grad():
            self.net[0].weight.mul_(0.9)
            self.net[1].running_mean.add_(1.0)
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


class Draws(Model):
    """Its hook draws from all global random streams, and logs."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.log("drawn", torch.rand(1) + float(np.random.rand()) + random.random())


class Clears(Model):
    """Its hook forgets the optimizer's state, as at the start of a phase."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()


class Decays(Model):
    """Its hook changes the optimizer's state in place, and steps a scheduler."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        for optimizer in self.trainer.optimizers:
            for state in optimizer.state.values():
                state["exp_avg"].mul_(0.5)
                state["step"].zero_()
        for config in self.trainer.lr_scheduler_configs:
            config.scheduler.step()


class Renews(Model):
    """Its hook makes another optimizer."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.trainer.strategy.setup_optimizers(self.trainer)


class AtStart(Model):
    """Its hook at the start of training resets everything; Lightning calls it in a resumed run too."""

    def on_train_start(self) -> None:
        torch.rand(3)
        with torch.no_grad():
            self.net[0].weight.zero_()
            self.net[1].running_mean.add_(1.0)
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["lr"] = 0.5
        for config in self.trainer.lr_scheduler_configs:
            config.scheduler.step()


class Shadow(Callback):
    """Averaged weights, which begin with the start of training."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = [p.detach().clone() for p in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for mine, live in zip(self.weights, pl_module.parameters(), strict=True):
            mine.lerp_(live.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weights = state_dict["weights"]


class LateShadow(Shadow):
    """The same, where what was loaded is put in place at the start of training."""

    loaded: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if self.loaded is not None:
            self.weights = self.loaded

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["weights"]


SCHEDULED = Case(schedule=("exponential", "epoch", ""))
HOOKS: dict[str, tuple[Case, Any]] = {
    "draws and logs": (Case(model=Draws), list),
    "clears the optimizer": (Case(model=Clears), list),
    "decays the optimizer, steps a scheduler": (dataclasses.replace(SCHEDULED, model=Decays), list),
    "makes another optimizer": (Case(model=Renews), list),
    "resets at the start": (dataclasses.replace(SCHEDULED, model=AtStart), list),
    "averages": (Case(), lambda: [Shadow()]),
    "averages what it loads late": (Case(), lambda: [LateShadow()]),
    "averages, and the model resets": (Case(model=AtStart), lambda: [Shadow()]),
}


QUICK = ("draws and logs", "decays the optimizer, steps a scheduler", "averages, and the model resets")


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in HOOKS]
)
def test_hooks_that_run_again_leave_the_snapshots_state(name: str, tmp_path: Path) -> None:
    """`on_train_start`, which Lightning calls, and `on_train_epoch_start`, which we do; in the middle of an epoch."""
    case, callbacks = HOOKS[name]
    averages = callbacks()
    reference = fit(case, averages)
    fit(case, [*callbacks(), *every_batch(tmp_path / "run", every_n_steps=3)])
    snapshot = next(s for s in saved(tmp_path / "run") if (s.epoch, s.batch) == (1, 3))
    again = callbacks()
    root = only(tmp_path / "run", snapshot, tmp_path / "one")
    resumed = fit(case, [*again, resumer(root)], ckpt_path="auto", seed=7)
    assert resumed.trace == tail(reference.trace, 1, 3)
    assert resumed.trace
    assert resumed.digest == reference.digest
    for one, other in zip(averages, again, strict=True):
        assert all(map(torch.equal, one.weights, other.weights))


class Curriculum(Callback):
    """Sets what no snapshot holds."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.began = True

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.level = trainer.current_epoch
        trainer.accumulate_grad_batches = 1 + trainer.current_epoch


def test_what_a_snapshot_does_not_hold_stays_as_the_hooks_have_set_it(tmp_path: Path) -> None:
    """A curriculum, an accumulation factor: that is why the hooks run again."""
    fit(Case(), [Curriculum(), *every_batch(tmp_path / "run")])
    snapshot = next(s for s in saved(tmp_path / "run") if s.epoch == 1 and s.batch == 2)
    seen = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append((batch_idx, pl_module.began, pl_module.level, trainer.accumulate_grad_batches))

    root = only(tmp_path / "run", snapshot, tmp_path / "one")
    fit(Case(), [Curriculum(), Looks(), resumer(root)], ckpt_path="auto", max_epochs=2)
    assert seen == [(batch, True, 1, 2) for batch in range(2, 6)]


def run(callback: Any, seed: int, ckpt_path: str | None) -> tuple[list[Entry], Counts, Model]:
    seed_everything(seed)
    trace: list[Entry] = []
    model, counts = Restless(Case(), trace), Counts()
    train(make_trainer(Case(), [counts, *callback], Recorder(trace)), model, Case(), ckpt_path)
    return trace, counts, model


def test_a_replay_leaves_restored_state_alone(tmp_path: Path) -> None:
    """Weights, buffers, options of optimizers, random streams and callbacks' states are those of the snapshot."""
    reference, counted, final = run([], 0, None)
    run(every_batch(tmp_path / "run", every_n_steps=3), 0, None)
    snapshot = next(s for s in saved(tmp_path / "run") if (s.epoch, s.batch) == (1, 3))
    trace, counts, model = run([resumer(only(tmp_path / "run", snapshot, tmp_path / "one"))], 7, "auto")
    start = next(i for i, entry in enumerate(reference) if entry[:3] == ("train", 1, 3))
    assert trace == reference[start:]
    assert counts.epochs == counted.epochs == 3
    for name, weight in final.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


class Unfreezes(BaseFinetuning):
    """Adds a group of parameters in the middle of an epoch, where Lightning's callback does not look for one."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None: ...

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 1):
            self.unfreeze_and_add_param_group(pl_module.backbone, trainer.optimizers[0], lr=0.02)


class AddsGroup(Callback):
    """Adds a group by itself, in a hook that runs again in a resumed run."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.backbone.requires_grad_(False)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._add(trainer, pl_module, here=self.hook == "train start")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._add(trainer, pl_module, here=self.hook == "epoch start" and trainer.current_epoch == 1)

    def _add(self, trainer: Any, pl_module: Any, *, here: bool) -> None:
        if here:
            pl_module.backbone.requires_grad_(True)
            (optimizer,) = trainer.optimizers
            optimizer.add_param_group({"params": list(pl_module.backbone.parameters()), "lr": 0.03})


GROUPS: dict[str, Any] = {
    "in the middle of an epoch": Unfreezes,
    "at the start of an epoch": lambda: AddsGroup("epoch start"),
    "at the start of training": lambda: AddsGroup("train start"),
}


@pytest.mark.cells(1)
@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_parameters_that_training_adds_are_put_back(name: str, tmp_path: Path) -> None:
    """Two generations deep, before the group was added and after that."""
    case = Case(model=FineTunedModel, callbacks=lambda: [GROUPS[name]()])
    reference = fit(case)
    fit(case, every_batch(tmp_path / "run", every_n_steps=7))
    root, places = tmp_path / "run", {(1, 1): 9, (1, 3): 14, (2, 2): 10**9}
    for number, (place, following) in enumerate(places.items()):
        snapshot = next(s for s in saved(root) if (s.epoch, s.batch) == place)
        root = only(root, snapshot, tmp_path / str(number))
        resumed = fit(case, every_batch(root, every_n_steps=following), ckpt_path="auto", seed=7 + number)
        assert resumed.trace == tail(reference.trace, *place)
        assert resumed.trace
        assert resumed.digest == reference.digest


def test_optimizers_that_do_not_fit_are_one_clear_error(tmp_path: Path) -> None:
    """The saved run had one group of all parameters, and this script makes two."""

    class Halves(Model):
        def configure_optimizers(self) -> Any:
            first, *others = self.parameters()
            return torch.optim.Adam([{"params": [first]}, {"params": others}], lr=0.01)

    fit(Case(), every_batch(tmp_path), max_epochs=1)
    with pytest.raises(MismatchError, match=r"optimizers of the snapshot .* configure_optimizers"):
        fit(Case(model=Halves), [resumer(tmp_path)], ckpt_path="auto", max_epochs=2)


def test_an_optimizer_that_the_script_makes_otherwise_is_seen(tmp_path: Path) -> None:
    """Another class is refused; other options are named, and those of the snapshot hold."""

    class Decayed(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Faster(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    fit(Case(model=Decayed), every_batch(tmp_path), max_epochs=1)
    with pytest.raises(MismatchError, match=r"'optimizers\[0\]' of the class AdamW, and the script now has Adam"):
        fit(Case(), [resumer(tmp_path)], ckpt_path="auto", max_epochs=2)
    fit(Case(model=Faster), [resumer(tmp_path)], ckpt_path="auto", max_epochs=2)
    assert any("['lr'] is 0.01 as in the snapshot, not 0.05" in row["why"] for row in report(tmp_path)["not_restored"])


def test_a_scheduler_of_another_class_is_named(tmp_path: Path) -> None:
    """It has what the snapshot has of the other one."""

    class Halved(Model):
        schedule: Any = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            return [optimizer], [type(self).schedule(optimizer)]

    class Decayed(Halved):
        schedule = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)

    fit(Case(model=Halved), every_batch(tmp_path), max_epochs=1)
    fit(Case(model=Decayed), [resumer(tmp_path)], ckpt_path="auto", max_epochs=2)
    assert any("is a ExponentialLR now" in row["why"] for row in report(tmp_path)["not_restored"])


def test_schedulers_that_the_script_makes_or_leaves_out_now_are_named(tmp_path: Path) -> None:
    """The saved one is in no schedule now, or the new one begins at its first step: Lightning says nothing."""
    scheduled = Case(schedule=("decay", "step", ""))
    for folder, before, now, why in (
        (tmp_path / "out", scheduled, Case(), "the snapshot has 1 of them, and configure_optimizers() makes 0 now"),
        (tmp_path / "in", Case(), scheduled, "the snapshot has 0 of them, and configure_optimizers() makes 1 now"),
    ):
        fit(before, every_batch(folder), max_epochs=1)
        fit(now, [resumer(folder)], ckpt_path="auto", max_epochs=2)
        assert ("schedulers", why) in [(row["name"], row["why"]) for row in report(folder)["not_restored"]]
