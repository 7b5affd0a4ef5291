"""A run that ends by an exception: its last finished boundary becomes durable where it resumes exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from ckpt_engine.loop import failing_loop
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.runs import (
    BATCH,
    Augmented,
    Case,
    EverySnapshotIsDurable,
    Model,
    Outcome,
    fit,
    resumer,
    saved,
    tail,
)

PLACE = (1, 3)
BOUNDARY = 9
"""The step that is complete before this batch."""


class Failure(RuntimeError):
    """What ends the run."""


class Bomb:
    """Raises at one place, if it is armed."""

    where = ""

    def at(self, where: str, trainer: Any) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        if self.where == where and (trainer.current_epoch, progress) == PLACE:
            raise Failure(where)


BOMB = Bomb()


@pytest.fixture(autouse=True)
def disarm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Steps of this model take no longer than a record of one; the policy has tests of its own."""
    monkeypatch.setattr(failing_loop, "affordable", lambda *_: True)
    yield
    BOMB.where = ""


class Fragile(Model):
    """Fails in `training_step`, before and after forward, and in hooks of the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        BOMB.at("training_step", self.trainer)
        loss = super().training_step(batch, batch_idx)
        BOMB.at("after forward", self.trainer)
        return loss

    def on_after_backward(self) -> None:
        BOMB.at("after backward", self.trainer)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        BOMB.at("before the step", self.trainer)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.trainer.training is False and self.trainer.current_epoch == 1:
            BOMB.at("validation", self.trainer)


EPOCH = torch.zeros(1).share_memory_()
"""Which epoch it is, for workers of loaders too."""


class Ends(Callback):
    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        EPOCH.fill_(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        BOMB.at("batch start", trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        BOMB.at("batch end", trainer)


class Broken(Augmented):
    """Fails to give one sample, after it has drawn its noise."""

    def __getitem__(self, i: int) -> Any:
        sample = super().__getitem__(i)
        if BOMB.where == "sample" and i == self.broken and EPOCH.item() == PLACE[0]:
            raise Failure("sample")
        return sample

    broken = -1


def broken_loader(workers: int = 0) -> Callable[[], Any]:
    return lambda: DataLoader(Broken(), batch_size=BATCH, shuffle=True, num_workers=workers)


def fails(case: Case, root: Path, where: str, callbacks: Callable[[], list[Callback]] = list, **options: Any) -> None:
    """A run that takes one snapshot, of step 4, and then fails."""
    BOMB.where = where
    EPOCH.zero_()  # workers fetch batches of the first epoch before a hook says that it begins
    ckpt = AdaptiveCheckpoint(str(root), writer="thread", **{"every_n_steps": 4, "at_end": False, **options})
    with pytest.raises((Failure, RuntimeError), match=where):
        fit(case, [Ends(), *callbacks(), ckpt, EverySnapshotIsDurable(ckpt)], max_epochs=2)
    BOMB.where = ""


def resumed(case: Case, root: Path, callbacks: Callable[[], list[Callback]] = list) -> Outcome:
    return fit(case, [Ends(), *callbacks(), resumer(root)], ckpt_path="auto", seed=7)


def assert_exact(case: Case, root: Path, step: int = BOUNDARY) -> None:
    """The run goes on with the batch in which it has failed, bit for bit."""
    reference = fit(case, [Ends()])
    newest = saved(root)[-1]
    assert (newest.step, newest.reason) == (step, "exception")
    again = resumed(case, root)
    assert again.trace == tail(reference.trace, *PLACE)
    assert again.trace
    assert again.digest == reference.digest


WHOLE = ["training_step", "after forward", "after backward", "batch start", "sample"]
CHANGED = ["before the step", "batch end"]


@pytest.mark.parametrize(
    "where",
    [one if one in ("after backward", "sample") else pytest.param(one, marks=pytest.mark.slow) for one in WHOLE],
)
def test_a_step_that_fails_before_it_changes_weights_loses_nothing(where: str, tmp_path: Path) -> None:
    """Dropout has drawn, batch norm and metrics have moved, gradients exist: all of that is put back."""
    case = Case(model=Fragile, loader=broken_loader(), schedule=("exponential", "step", ""))
    if where == "sample":
        Broken.broken = next(one[4][1] for one in fit(case).trace if one[:3] == ("train", *PLACE))
    fails(case, tmp_path, where)
    assert_exact(case, tmp_path)


def test_a_buffer_that_is_another_tensor_in_each_step_is_that_of_the_boundary(tmp_path: Path) -> None:
    """It is read where it is now, not where it was when the run began."""
    case = Case(model=Replaces)
    fails(case, tmp_path, "after forward")
    assert_exact(case, tmp_path)


def test_modes_are_those_of_the_boundary(tmp_path: Path) -> None:
    """The step that failed has set others."""
    case = Case(model=Evaluates)
    fails(case, tmp_path, "in eval mode")
    assert_exact(case, tmp_path)


def test_what_a_hook_does_with_a_batch_before_it_counts_is_put_back(tmp_path: Path) -> None:
    """Lightning counts a batch behind the hooks that move it."""
    case = Case(model=Counts)
    fails(case, tmp_path, "transfer")
    assert_exact(case, tmp_path)


@pytest.mark.parametrize("where", CHANGED)
def test_a_step_that_may_have_changed_weights_is_not_saved(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says which step is the newest durable one, and why it is not the last."""
    with caplog.at_level(logging.INFO):
        fails(Case(model=Fragile), tmp_path, where)
    assert [one.step for one in saved(tmp_path)] == [4, 8]
    said = [one.getMessage() for one in caplog.records if "step 8 is durable" in one.getMessage()]
    assert len(said) == 1
    assert "1 step behind" in said[0]
    assert "weights" in said[0]


def _nan(trainer: Any) -> None:
    with torch.no_grad():
        trainer.model.net[0].weight[0, 0] = float("nan")


class Poisons(Callback):
    """The weights are not finite from step 9 on, and no guard looks."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == BOUNDARY:
            _nan(trainer)


class Writes(Callback):
    """Writes weights without an optimizer, when the batch that fails begins."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == BOUNDARY:
            with torch.no_grad():
                trainer.model.net[0].weight.mul_(0.5)


class Remembers(Callback):
    """Its state changes when a batch begins."""

    def __init__(self) -> None:
        self.begun = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun += 1

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.begun = state_dict["begun"]


class SavesMore(Fragile):
    """Saves more state, and only the user knows what of it a step changes."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["more"] = 1


class Evaluates(Fragile):
    """Is in eval mode where it fails, and nowhere else."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            BOMB.at("in eval mode", self.trainer)
        except Failure:
            self.net.eval()
            raise
        return super().training_step(batch, batch_idx)


class Replaces(Fragile):
    """A buffer that is another tensor after each batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("level", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.level = 0.5 * self.level + batch[0].mean()
        return super().training_step(batch, batch_idx) + 0.1 * self.level * self.net(batch[0]).mean()


class Counts(Fragile):
    """Counts its batches before Lightning does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("batches", torch.zeros(1))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.batches += 1
            BOMB.at("transfer", self.trainer)
        return batch


class Unfreezes(Callback):
    """Gives the optimizer the parameters of a layer late."""

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1 and len(trainer.optimizers[0].param_groups) == 1:
            trainer.optimizers[0].add_param_group({"params": list(trainer.model.late.parameters())})


class Frozen(Fragile):
    """Has a layer that no optimizer trains at first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.late = torch.nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), 1e-2)


class Adapted(Frozen):
    """Saves what it trains only."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.strict_loading = False

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **options)
        return {name: one for name, one in state.items() if not name.startswith("late")}


class Wide(Fragile):
    """A buffer that is too large to be copied at every step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("bank", torch.zeros(1 << 20))


NOT_SAVED: dict[str, tuple[Case, Callable[[], list[Callback]], str]] = {
    "weights that are not finite": (Case(model=Fragile), lambda: [Poisons()], "not finite"),
    "weights that were written": (Case(model=Fragile), lambda: [Writes()], "weights have changed"),
    "a callback that has moved": (Case(model=Fragile), lambda: [Remembers()], "Remembers"),
    "what only the user knows": (Case(model=SavesMore), list, "on_save_checkpoint"),
    "a large buffer": (Case(model=Wide), list, "too large"),
    "gradients of an accumulation": (Case(model=Fragile, trainer={"accumulate_grad_batches": 4}), list, "gradients"),
    "manual optimisation": (Case(model=Fragile, manual="accumulate"), list, "gradients"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if n < 3 else pytest.mark.slow) for n, name in enumerate(NOT_SAVED)]
)
def test_what_cannot_be_had_exactly_is_not_saved(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says why no snapshot was taken."""
    case, callbacks, why = NOT_SAVED[name]
    with caplog.at_level(logging.INFO):
        fails(case, tmp_path, "training_step" if case.manual else "after forward", callbacks, every_n_steps=1000)
    assert saved(tmp_path) == []
    assert any(why in one.getMessage() and "no snapshot is durable" in one.getMessage() for one in caplog.records)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "gradients of an accumulation",
        pytest.param("manual optimisation", marks=pytest.mark.slow),
        pytest.param("what only the user knows", marks=pytest.mark.slow),
    ],
)
def test_a_batch_that_does_not_come_has_changed_nothing(name: str, workers: int, tmp_path: Path) -> None:
    """There the state can be had in all these cases."""
    case = NOT_SAVED[name][0]
    case = Case(model=case.model, manual=case.manual, trainer=case.trainer, loader=broken_loader(workers))
    reference = fit(case)
    Broken.broken = next(one[4][2] for one in reference.trace if one[:3] == ("train", *PLACE))
    fails(case, tmp_path, "sample", every_n_steps=1000)
    assert_exact(case, tmp_path, next(one[3] for one in reference.trace if one[:3] == ("train", *PLACE)))


def test_a_step_that_a_snapshot_holds_already_is_not_saved_again(tmp_path: Path) -> None:
    """The newest snapshot is the one that was due at the last boundary, and no other one follows it."""
    fails(Case(model=Fragile), tmp_path, "after forward", every_n_steps=3)
    assert [(one.step, one.reason) for one in saved(tmp_path)][-1] == (9, "every_n_steps")


@pytest.mark.parametrize(
    ("model", "callbacks"), [(Frozen, lambda: [Unfreezes()]), (Adapted, list)], ids=["unfrozen late", "not saved"]
)
def test_what_an_optimizer_does_not_train_from_the_start_loses_nothing(
    model: type[Model], callbacks: Callable[[], list[Callback]], tmp_path: Path
) -> None:
    """The last boundary is saved, whatever the optimizer has got since and the `state_dict` leaves out."""
    fails(Case(model=model), tmp_path, "after forward", callbacks, every_n_steps=1000)
    assert [(one.step, one.reason) for one in saved(tmp_path)] == [(BOUNDARY, "exception")]
