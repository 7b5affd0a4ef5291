"""A run of transformers' own Trainer goes on with ours: from its folder, as it would have gone on by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from accelerate_ckpt import TransformersCallback
from ckpt_engine.cli.main import main
from ckpt_engine.errors import ResumeError
from tests.interop.training import same_tree, tiny_trainer
from tests.loop.runs import every_boundary, only, report, resume_only, saved

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 24
EPOCH = 10
"""Batches; the data draws nothing, so that transformers' own resume is exact too."""
ACCUMULATING = {"gradient_accumulation_steps": 2, "save_steps": 3}
"""Five steps an epoch. No snapshot is taken after the last one of them."""


def trained(folder: Path, options: dict[str, Any] | None = None, *, seed: int = 9, **more: Any) -> Any:
    """A Trainer that is done; with options, it was resumed by our callback."""
    trainer = tiny_trainer(folder, steps=STEPS, seed=seed, **more)
    if options is None:
        trainer.train()
        return trainer
    ckpt = TransformersCallback(options)
    trainer.add_callback(ckpt)
    trainer.train(resume_from_checkpoint=ckpt.resume_from(trainer))
    assert trainer.state.global_step == STEPS
    return trainer


def imported(folder: Path, root: Path) -> Path:
    """The run that `ckpt import` makes of a folder."""
    with pytest.raises(SystemExit) as ended:
        main(["import", str(folder), str(root)])
    assert not ended.value.code
    return root


def same_end(one: Any, other: Any) -> None:
    """Weights, optimizer and what was logged of each step."""
    same_tree(dict(one.model.state_dict()), dict(other.model.state_dict()))
    same_tree(one.optimizer.state_dict(), other.optimizer.state_dict())
    losses = [[(e["step"], e["loss"]) for e in t.state.log_history if "loss" in e] for t in (one, other)]
    assert losses[0] == losses[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "more"),
    [
        (8, {}),
        pytest.param(2 * EPOCH, {}, marks=pytest.mark.slow),
        pytest.param(3, ACCUMULATING, marks=pytest.mark.slow),
        pytest.param(16, {"dataloader_num_workers": 2}, marks=pytest.mark.slow),
    ],
    ids=["within an epoch", "at the end of an epoch", "accumulation", "workers"],
)
def test_an_imported_folder_goes_on_as_trainer_itself_would(step: int, more: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit; and the snapshots that are taken from there on, in the same epoch already, resume exactly too."""
    reference = trained(tmp_path / "out", seed=0, **more)
    root = imported(tmp_path / "out" / f"checkpoint-{step}", tmp_path / "run")
    resumed = trained(tmp_path / "again", every_boundary(root), **more)
    same_end(resumed, reference)
    found = report(root)
    assert {one.name for one in found.restored} == {
        "model",
        "optimizer",
        "scheduler",
        "data position",
        "random streams",
    }
    assert [one.name for one in found.not_restored] == ["running loss"]
    own = [one for one in saved(root) if one.reason not in ("import", "end")]
    assert own[0].step == step + 1
    third = only(root, own[0], tmp_path / "third")
    same_end(trained(tmp_path / "last", resume_only(third), seed=4, **more), reference)
    assert report(third).not_restored == ()


@pytest.mark.parametrize(
    ("step", "more"),
    [
        (8, {}),
        pytest.param(2 * EPOCH, {}, marks=pytest.mark.slow),
        pytest.param(3, ACCUMULATING, marks=pytest.mark.slow),
    ],
    ids=["within an epoch", "at the end of an epoch", "accumulation"],
)
def test_transformers_own_resume_is_left_to_it_and_followed(step: int, more: dict[str, Any], tmp_path: Path) -> None:
    """Its checkpoint that the user names is what goes on, and each snapshot from there on resumes exactly."""
    reference = trained(tmp_path / "out", seed=0, **more)
    trainer = tiny_trainer(tmp_path / "again", steps=STEPS, seed=9, **more)
    trainer.add_callback(TransformersCallback(every_boundary(tmp_path / "run")))
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{step}"))
    same_end(trainer, reference)
    own = [one for one in saved(tmp_path / "run") if one.reason != "end"]
    assert own[0].step > step
    third = only(tmp_path / "run", own[0], tmp_path / "third")
    same_end(trained(tmp_path / "last", resume_only(third), seed=4, **more), reference)
    assert report(third).not_restored == ()


class Counting(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Counts the steps of all lives."""

    def __init__(self, rate: float = 1.0) -> None:
        self.steps, self.rate = 0, rate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"rate": self.rate}, "attributes": {"steps": self.steps}}


def test_callbacks_and_counters_go_on_too(tmp_path: Path) -> None:
    """States of callbacks are put back without being asked for; the history and the count of operations go on."""
    first = tiny_trainer(tmp_path / "out", steps=4)
    first.add_callback(Counting())
    first.train()
    root = imported(tmp_path / "out" / "checkpoint-4", tmp_path / "run")
    trainer = tiny_trainer(tmp_path / "again", steps=6)
    counting, ckpt = Counting(), TransformersCallback(resume_only(root))
    trainer.add_callback(counting)
    trainer.add_callback(ckpt)
    trainer.train(resume_from_checkpoint=ckpt.resume_from(trainer))
    assert counting.steps == 6
    assert trainer.state.total_flos == first.state.total_flos / 4 * 6
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5, 6]


def test_an_argument_that_the_script_makes_otherwise_is_named(tmp_path: Path) -> None:
    """What a callback is made with is the script's, also where training had changed it."""
    for rate, steps in ((1.0, 4), (2.0, 6)):
        trainer = tiny_trainer(tmp_path / "out", steps=steps)
        ckpt = TransformersCallback(every_boundary(tmp_path / "run"))
        for callback in (Counting(rate), ckpt):
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=ckpt.resume_from(trainer))
    missing = [one for one in report(tmp_path / "run").not_restored if "Counting" in one.name]
    assert [(one.name, one.why) for one in missing] == [
        ("rate of Counting", "it was 1.0, and is 2.0 now, as the script made it")
    ]


def test_what_was_imported_from_elsewhere_is_refused(tmp_path: Path) -> None:
    """A file of torch.save has no counters of a Trainer."""
    torch.save({"model": {"w": torch.ones(1)}, "step": 3}, tmp_path / "a.pt")
    root = imported(tmp_path / "a.pt", tmp_path / "run")
    trainer = tiny_trainer(tmp_path / "out", steps=4)
    ckpt = TransformersCallback(resume_only(root))
    trainer.add_callback(ckpt)
    with pytest.raises(ResumeError, match=r"was not taken in a run of transformers\.Trainer"):
        ckpt.resume_from(trainer)
