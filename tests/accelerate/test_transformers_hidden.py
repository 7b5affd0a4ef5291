"""What callbacks of a `transformers.Trainer` and its model remember outside of any state is restored, or named."""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PretrainedConfig, Trainer, TrainerCallback, TrainingArguments

from accelerate_ckpt import TransformersCallback
from tests.loop.runs import every_boundary, only, report, resume_only, saved
from tests.support.digests import seed_everything

STEPS = 6


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((3,), float(index))}


class Net(nn.Module):
    """Its loss is scaled by an attribute that a callback sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": self.layer(x).square().mean() * self.scale}


class Scales(TrainerCallback):  # type: ignore[misc]
    """Counts steps, and scales the loss by their number; keeps a log of weights, and the time."""

    def __init__(self, ours: list[TransformersCallback]) -> None:
        self.ours, self.steps, self.log, self.last = ours, 0, list[float](), time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps, self.last = self.steps + 1, time.time()
        model.scale = 1 / (1 + self.steps)
        self.log.append(model.layer.weight.sum().item())
        for ckpt in self.ours:
            assert ckpt.tracker is not None
            ckpt.tracker.before_update()
            assert ckpt.tracker._engine.wait(30)


def train(
    folder: Path, options: Any, seed: int = 0, kind: Any = Trainer, arguments: Any = TrainingArguments
) -> list[float]:
    """One process: the log of the callback."""
    seed_everything(seed)
    ours = [TransformersCallback(options)]
    callback = Scales(ours)
    made = arguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=1e-3,
        max_grad_norm=0.0,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        seed=seed,
        dataloader_pin_memory=False,
    )
    trainer = kind(Net(), made, train_dataset=Points(), callbacks=[*ours, callback])
    trainer.train(resume_from_checkpoint=ours[0].resume_from(trainer))
    return callback.log


@pytest.mark.parametrize("hidden", ["auto", "off"])
def test_what_a_callback_remembers_is_restored_or_named(hidden: str, tmp_path: Path) -> None:
    """Its count and its log continue; the time is no state."""
    whole = train(tmp_path / "out", every_boundary(tmp_path / "run", hidden=hidden))
    assert len(whole) == STEPS
    middle = [one for one in saved(tmp_path / "run") if one.reason != "end"][2]
    folder = only(tmp_path / "run", middle, tmp_path / "again")
    log = train(tmp_path / "out", {**resume_only(folder), "hidden": hidden}, seed=7)
    found = {one.name: one.why for one in report(folder).not_restored}
    if hidden == "off":
        assert log != whole[middle.step :]
        assert "state()" in found["callback Scales"]
    else:
        assert log == whole
        assert found == {}


class Clipped(Trainer):  # type: ignore[misc]
    """A trainer that a library derives: it scales the loss by what it has counted itself."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._losses: Any = {"train": collections.defaultdict(list)}
        self._state_of_ours = 0
        self.began = time.time()

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(*args, **options)
        self._losses["train"]["loss"].append(loss.item())
        self._state_of_ours += 1
        return loss / (self._state_of_ours + len(self._losses["train"]["loss"]))


def test_what_a_derived_trainer_counts_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private names included, of a class in an installed package too; not what transformers' own code sets."""
    monkeypatch.setattr(sys.modules[__name__], "__file__", "/usr/lib/python3/site-packages/library.py")
    whole = train(tmp_path / "out", every_boundary(tmp_path / "run"), kind=Clipped)
    middle = [one for one in saved(tmp_path / "run") if one.reason != "end"][2]
    folder = only(tmp_path / "run", middle, tmp_path / "again")
    assert train(tmp_path / "out", resume_only(folder), seed=7, kind=Clipped) == whole
    found = next(one.detail for one in report(folder).restored if one.name == "hidden state")
    ours = sorted(path for path in found.split(", ") if path.startswith("trainer."))
    assert ours == ["trainer._losses", "trainer._state_of_ours"]


class OfTheClass(Trainer):  # type: ignore[misc]
    """A trainer whose class has what it counts: a number, a window and a tensor."""

    calls = 0
    window: ClassVar[Any] = collections.deque([1.0], maxlen=3)
    mean = torch.zeros(3)

    @classmethod
    def as_in_a_new_process(cls) -> None:
        cls.calls, cls.window, cls.mean = 0, collections.deque([1.0], maxlen=3), torch.zeros(3)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        OfTheClass.calls += 1
        self.mean.lerp_(inputs["x"].mean(0), 0.1)
        inputs["x"] = inputs["x"] - self.mean
        loss = super().compute_loss(model, inputs, *args, **options) / (self.calls + sum(self.window))
        self.window.append(loss.item())
        return loss


def test_what_a_derived_trainer_has_in_its_class_is_restored(tmp_path: Path) -> None:
    """All objects of the class share it, and no object has it."""
    OfTheClass.as_in_a_new_process()
    whole = train(tmp_path / "out", every_boundary(tmp_path / "run"), kind=OfTheClass)
    middle = [one for one in saved(tmp_path / "run") if one.reason != "end"][2]
    folder = only(tmp_path / "run", middle, tmp_path / "again")
    OfTheClass.as_in_a_new_process()
    assert train(tmp_path / "out", resume_only(folder), seed=7, kind=OfTheClass) == whole
    found = next(one.detail for one in report(folder).restored if one.name == "hidden state")
    assert {"OfTheClass.calls", "OfTheClass.window", "OfTheClass.mean"} <= set(found.split(", "))


@dataclasses.dataclass
class Softness(TrainingArguments):  # type: ignore[misc]
    softness: float = 1.0


class Anneals(Trainer):  # type: ignore[misc]
    """It scales the loss by an argument and an entry of the model's configuration that change as it trains."""

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        model.config = PretrainedConfig()
        model.config.scale = 1.0

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        self.args.softness *= 0.9
        self.args.max_grad_norm += 0.1
        self.model.config.scale *= 0.8
        return super().compute_loss(*args, **options) * self.args.softness * self.model.config.scale


def test_arguments_that_change_as_it_trains_are_restored(tmp_path: Path) -> None:
    """Those of the script's own class, how gradients are clipped, and what the model's configuration has."""
    whole = train(tmp_path / "out", every_boundary(tmp_path / "run"), kind=Anneals, arguments=Softness)
    middle = [one for one in saved(tmp_path / "run") if one.reason != "end"][2]
    folder = only(tmp_path / "run", middle, tmp_path / "again")
    assert train(tmp_path / "out", resume_only(folder), seed=7, kind=Anneals, arguments=Softness) == whole
    (restored,) = [one.detail for one in report(folder).restored if one.name == "hidden state"]
    for name in ("trainer.args.softness", "args.max_grad_norm", "model.config.scale"):
        assert name in restored
