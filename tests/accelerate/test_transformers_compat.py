"""Every undocumented name of transformers in use is there; a failure names the feature at risk. And what is refused."""

from __future__ import annotations

import ast
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import Trainer, TrainingArguments

import accelerate_ckpt
from accelerate_ckpt import TransformersCallback, private_trainer
from accelerate_ckpt.private_trainer import TRANSFORMERS_NAMES, TrainerInternals
from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.data.private_names import PrivateName, lacking
from ckpt_engine.errors import CkptError, ConfigError, ResumeError
from tests.accelerate.hf import Text, train_hf
from tests.loop.runs import Case, every_boundary, train_plain

PACKAGE = Path(accelerate_ckpt.__file__).parent


def make_trainer(folder: Path, callbacks: list[Any], **arguments: Any) -> Trainer:
    options = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **arguments)
    return Trainer(model=nn.Linear(1, 1), args=options, train_dataset=Text(), callbacks=callbacks)


@pytest.mark.parametrize("entry", TRANSFORMERS_NAMES, ids=lambda e: f"{e.owner}.{e.name}")
def test_a_private_name_is_still_there(entry: PrivateName, tmp_path: Path) -> None:
    """Upstream has not renamed it."""
    missing = lacking([entry], TrainerInternals(make_trainer(tmp_path, [])).owners())
    why = (
        f"transformers {private_trainer.TRANSFORMERS_VERSION} lacks {entry.owner}.{entry.name}: {entry.used_for} fails"
    )
    assert entry not in missing, why


def test_a_missing_name_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which feature needs what, and what to do."""
    monkeypatch.setattr(private_trainer, "TRANSFORMERS_NAMES", (PrivateName("trainer", "_no_such_thing", "resuming"),))
    with pytest.raises(CkptError, match=r"lacks names .*trainer\._no_such_thing \(for resuming\)"):
        TrainerInternals(make_trainer(tmp_path, [])).probe()


def test_nothing_else_touches_private_names_of_transformers() -> None:
    """They are all in one file."""
    names = {entry.name for entry in TRANSFORMERS_NAMES if entry.name.startswith("_")}
    names |= {
        value
        for name, value in vars(private_trainer).items()
        if name.startswith("_") and name.isupper() and isinstance(value, str)
    }
    offenders = [
        f"{path.name}:{node.lineno} {node.attr}"
        for path in PACKAGE.glob("*.py")
        if path.name != "private_trainer.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in names
    ]
    assert offenders == []


def test_a_callback_of_another_trainer_is_refused(tmp_path: Path) -> None:
    """It would never hear of the training."""
    with pytest.raises(ConfigError, match=r"does not know this callback.*callbacks=\[ckpt\]"):
        TransformersCallback(str(tmp_path / "run")).resume_from(make_trainer(tmp_path / "out", []))


@pytest.mark.parametrize(
    ("option", "why"), [("ignore_data_skip", "data again"), ("auto_find_batch_size", "again at step 0 with smaller")]
)
def test_arguments_that_move_the_data_are_refused(option: str, why: str, tmp_path: Path) -> None:
    """No resume could be exact with them."""
    ckpt = TransformersCallback(str(tmp_path / "run"))
    trainer = make_trainer(tmp_path / "out", [ckpt], **{option: True})
    with pytest.raises(ConfigError, match=f"{option}=True begins .*{why}.*no resume is exact"):
        ckpt.resume_from(trainer)


def test_snapshots_of_another_kind_of_loop_are_refused(tmp_path: Path) -> None:
    """The message names the snapshot, and the folder is not touched."""
    train_plain(Case(epochs=1), every_boundary(tmp_path / "run"))
    ckpt = TransformersCallback(str(tmp_path / "run"), writer="thread")
    trainer = make_trainer(tmp_path / "out", [ckpt])
    with pytest.raises(ResumeError, match=r"was not taken in a run of transformers\.Trainer"):
        ckpt.resume_from(trainer)


@pytest.mark.parametrize(("steps", "counted"), [(3, 2), (4, 0)])
def test_other_arguments_than_those_of_the_saved_run_are_refused(steps: int, counted: int, tmp_path: Path) -> None:
    """Transformers would count other batches than the snapshot did."""
    train_hf({"max_steps": steps}, every_boundary(tmp_path / "run", at_end=False), tmp_path / "out")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = set(threading.enumerate())
    why = f"transformers resumes after {counted * 2} batches of the epoch, the snapshot is after {steps - 1}"
    with pytest.raises(ResumeError, match=why):
        train_hf({"gradient_accumulation_steps": 2}, every_boundary(tmp_path / "run"), tmp_path / "out")
    assert {number: signal.getsignal(number) for number in before} == before
    assert [thread.name for thread in set(threading.enumerate()) - threads] == []


@pytest.mark.long
def test_a_finished_run_has_nothing_to_do_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    """The final snapshot is of the end; more epochs with the same schedule continue it exactly."""
    schedule = {"lr_scheduler_type": "constant", "logging_steps": 5}  # some of the loss is not logged at the end
    reference = train_hf({**schedule, "num_train_epochs": 3}, None, tmp_path / "out")
    shorter = train_hf({**schedule, "num_train_epochs": 2}, every_boundary(tmp_path / "run"), tmp_path / "out")
    again = train_hf({**schedule, "num_train_epochs": 2}, every_boundary(tmp_path / "run"), tmp_path / "out", seed=4)
    assert [entry for entry in again.trace if entry[0] == "train"] == []
    assert again.digest["weights"] == shorter.digest["weights"]
    ends = [[one for one in run.trace if one[0] == "log" and "train_loss" in one[2]][-1] for run in (shorter, again)]
    losses = [dict(ast.literal_eval(end[2]))["train_loss"] for end in ends]
    if hasattr(Trainer, private_trainer._COUNTS):  # before 5.0 nothing has the loss that was not logged
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    longer = train_hf({**schedule, "num_train_epochs": 3}, every_boundary(tmp_path / "run"), tmp_path / "out", seed=5)
    trained = [entry for entry in reference.trace if entry[0] == "train"]
    assert [entry for entry in longer.trace if entry[0] == "train"] == trained[-6:]
    assert longer.digest["weights"] == reference.digest["weights"]


def test_a_run_that_max_steps_ended_within_an_epoch_ends_there_again(tmp_path: Path) -> None:
    """It has no final snapshot: transformers would train one more step. Started again, it repeats the last step."""
    first = train_hf({"max_steps": 4}, every_boundary(tmp_path / "run"), tmp_path / "out")
    again = train_hf({"max_steps": 4}, every_boundary(tmp_path / "run"), tmp_path / "out", seed=6)
    assert again.trace == first.trace[-len(again.trace) :]
    assert again.digest == first.digest


def test_the_folder_for_transformers_is_gone_once_training_begins(tmp_path: Path) -> None:
    """It holds the trainer's counters only."""
    train_hf({"max_steps": 4}, every_boundary(tmp_path / "run", at_end=False), tmp_path / "out")
    ckpt = TransformersCallback(str(tmp_path / "run"))
    trainer = make_trainer(tmp_path / "out", [ckpt])
    folder = ckpt.resume_from(trainer)
    assert folder is not None
    assert [path.name for path in Path(folder).iterdir()] == ["trainer_state.json"]
    ckpt._release()
    assert not Path(folder).exists()
    with Checkpointer(str(tmp_path / "run"), writer="thread") as free:
        free.engine.start()
