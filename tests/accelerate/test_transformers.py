"""A `transformers.Trainer` that is resumed from any boundary, under another seed, is the uninterrupted run."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from accelerate_ckpt import TransformersCallback, private_trainer
from ckpt_engine.errors import MismatchError
from tests.accelerate import hf
from tests.accelerate.hf import Endless, Recorder, train_hf
from tests.loop.runs import every_boundary, only, report, resume_only, saved

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation with a remainder": {"gradient_accumulation_steps": 4, "num_train_epochs": 4},
    "two workers": {"dataloader_num_workers": 2},
    "persistent workers": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "evaluation with persistent workers": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
    },
    "best model": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    },
    "max_steps": {"max_steps": 10},
}


def assert_resumes(name: str, tmp_path: Path, share: int) -> None:
    """Resume from some boundaries and compare everything."""
    arguments = CASES[name]
    reference = train_hf(arguments, None, tmp_path / "out")
    watched = train_hf(arguments, every_boundary(tmp_path / "run"), tmp_path / "out")
    assert watched.trace == reference.trace, "the callback changed the run"
    snapshots = [one for one in saved(tmp_path / "run") if one.reason != "end"]
    assert len(snapshots) >= 4
    for number, snapshot in enumerate(snapshots[1 :: max(1, len(snapshots) // share)]):
        root = only(tmp_path / "run", snapshot, tmp_path / str(number))
        resumed = train_hf(arguments, resume_only(root), tmp_path / "out", seed=11)
        where = f"step {snapshot.step}, epoch {snapshot.epoch}, batch {snapshot.batch}"
        assert resumed.trace, where
        assert resumed.trace == reference.trace[len(reference.trace) - len(resumed.trace) :], where
        assert resumed.digest == reference.digest, where
        lacking = [one.name for one in report(root).not_restored if one.name != "callback Recorder"]
        assert lacking == [], where


@pytest.mark.parametrize("name", ["accumulation with a remainder", "evaluation with persistent workers"])
def test_the_trainer_resumes_exactly(name: str, tmp_path: Path) -> None:
    """The callback leaves the run as it is; boundaries in the middle resume it."""
    assert_resumes(name, tmp_path, 3)  # one of them is between two logs


@pytest.mark.long
@pytest.mark.skipif(not hasattr(Trainer, private_trainer._COUNTS), reason="transformers 4 cannot be given the pass")
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_steps": 15, "gradient_accumulation_steps": 2},
        pytest.param({"max_steps": 15}, marks=pytest.mark.slow),
        pytest.param({"max_steps": 8, "dataloader_num_workers": 1}, marks=pytest.mark.slow),
        pytest.param({"max_steps": 5, "per_device_train_batch_size": 22}, marks=pytest.mark.slow),
    ],
)
def test_data_of_unknown_length_resumes_beyond_its_first_pass(arguments: dict[str, Any], tmp_path: Path) -> None:
    """transformers takes all steps for one epoch there, and would skip the passes before in the current one."""
    reference = train_hf(arguments, None, tmp_path / "out", data=Endless)
    watched = train_hf(arguments, every_boundary(tmp_path / "run"), tmp_path / "out", data=Endless)
    assert watched.trace == reference.trace
    snapshots = [one for one in saved(tmp_path / "run") if one.reason != "end"]
    assert snapshots[-1].epoch >= 1
    for number, snapshot in enumerate((snapshots[1], snapshots[-2], snapshots[-1])):
        root = only(tmp_path / "run", snapshot, tmp_path / str(number))
        resumed = train_hf(arguments, resume_only(root), tmp_path / "out", seed=11, data=Endless)
        where = f"step {snapshot.step}, epoch {snapshot.epoch}, batch {snapshot.batch}"
        assert resumed.trace, where
        assert resumed.trace == reference.trace[len(reference.trace) - len(resumed.trace) :], where
        assert resumed.digest == reference.digest, where


def test_a_copy_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of training; it has the options, and resumes the run in another trainer."""
    copies: list[TransformersCallback] = []

    def on_step_end(self: Any, *args: Any, **kwargs: Any) -> None:
        if not copies:
            copies.extend([copy.deepcopy(self), pickle.loads(pickle.dumps(self))])

    monkeypatch.setattr(TransformersCallback, "on_step_end", on_step_end)
    reference = train_hf({}, None, tmp_path / "out")
    assert train_hf({}, every_boundary(tmp_path / "run"), tmp_path / "out").digest == reference.digest
    for copied in copies:
        assert copied.tracker is None
        assert copied.config.root_url.endswith(str(tmp_path / "run"))
    assert len(copies) == 2


@pytest.mark.long
def test_an_epoch_without_a_change_of_weights_counts(tmp_path: Path) -> None:
    """A GradScaler skips all of its steps; transformers counts it, and a resume is in the same epoch, or complete."""
    arguments = {"per_device_train_batch_size": 11, "optim": "adamw_torch"}  # the fused one is called and does nothing
    reference = train_hf(arguments, None, tmp_path / "out", overflows=2)
    watched = train_hf(arguments, every_boundary(tmp_path / "run"), tmp_path / "out", overflows=2)
    assert watched.trace == reference.trace
    snapshots = saved(tmp_path / "run")
    assert [(one.step, one.reason) for one in snapshots[-1:]] == [(4, "end")], "no step was skipped"
    for number, snapshot in enumerate(snapshots[:-1]):
        root = only(tmp_path / "run", snapshot, tmp_path / str(number))
        resumed = train_hf(arguments, resume_only(root), tmp_path / "out", seed=11, overflows=2)
        where = f"step {snapshot.step}, epoch {snapshot.epoch}, batch {snapshot.batch}"
        assert resumed.trace == reference.trace[len(reference.trace) - len(resumed.trace) :], where
        assert resumed.trace, where
        assert resumed.digest == reference.digest, where
    root = only(tmp_path / "run", snapshots[-1], tmp_path / "end")
    for epochs in (3, 4):
        resumed = train_hf({**arguments, "num_train_epochs": epochs}, resume_only(root), tmp_path / "out", seed=11)
        assert sum(one[0] == "train" for one in resumed.trace) == 2 * (epochs - 3)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(Trainer, private_trainer._COUNTS), reason="transformers 4 cannot be given the pass")
def test_an_epoch_that_a_callback_has_ended_early_is_resumed_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes every epoch for a whole one, and would begin at another batch of another epoch."""

    class Ending(Recorder):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_end(args, state, control, **kwargs)
            control.should_epoch_stop = state.global_step == 4

    monkeypatch.setattr(hf, "Recorder", Ending)
    reference = train_hf({}, None, tmp_path / "out")
    train_hf({}, every_boundary(tmp_path / "run"), tmp_path / "out")
    behind = [one for one in saved(tmp_path / "run") if one.epoch and one.reason != "end"]
    assert (behind[0].step, behind[0].epoch, behind[0].batch) == (5, 1, 1)
    for number, snapshot in enumerate((behind[0], behind[-1])):
        root = only(tmp_path / "run", snapshot, tmp_path / str(number))
        resumed = train_hf({}, resume_only(root), tmp_path / "out", seed=11)
        assert resumed.trace, snapshot.step
        assert resumed.trace == reference.trace[len(reference.trace) - len(resumed.trace) :], snapshot.step
        assert resumed.digest == reference.digest, snapshot.step


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_trainer_resumes_exactly_from_every_boundary(name: str, tmp_path: Path) -> None:
    """A run that is resumed from any boundary continues bit for bit."""
    assert_resumes(name, tmp_path, 1000)


def trained(outcome: Any) -> int:
    return sum(one[0] == "train" for one in outcome.trace)


@pytest.mark.long
def test_another_batch_size_in_the_middle_of_an_epoch_is_the_users_choice(tmp_path: Path) -> None:
    """Refused, started again, or continued; six batches of 4 become three of 8 and two further epochs of three."""
    train_hf({}, every_boundary(tmp_path / "run"), tmp_path / "out")
    snapshot = next(one for one in saved(tmp_path / "run") if (one.epoch, one.batch) == (1, 4))
    bigger = {"per_device_train_batch_size": 8}
    root = only(tmp_path / "run", snapshot, tmp_path / "1")
    with pytest.raises(MismatchError, match="batch_size was 4, now 8") as caught:
        train_hf(bigger, resume_only(root), tmp_path / "out", seed=11)
    assert "data: restart_epoch" in str(caught.value.hint)
    again = train_hf(bigger, {**every_boundary(root), "data": "restart_epoch"}, tmp_path / "out", seed=11)
    assert trained(again) == 3 + 3
    assert any("data: restart_epoch: batch_size was 4" in one.why for one in report(root).not_restored)
    assert any(one.name == "count of steps" for one in report(root).not_restored)
    later = [one for one in saved(root) if one.batch == 1][-1]
    second = train_hf(bigger, resume_only(only(root, later, tmp_path / "2")), tmp_path / "out", seed=12)
    assert second.trace == again.trace[len(again.trace) - len(second.trace) :]
    assert second.digest["weights"] == again.digest["weights"]
    root = only(tmp_path / "run", snapshot, tmp_path / "3")
    left = train_hf(bigger, {**resume_only(root), "data": "continue"}, tmp_path / "out", seed=11)
    assert trained(left) == 1 + 3  # 6 of 22 samples are left


@pytest.mark.long
def test_an_epoch_that_goes_on_with_another_batch_size_resumes_once_more(tmp_path: Path) -> None:
    """transformers counts the batches of a whole epoch of this size, and fewer of them were trained."""
    train_hf({}, every_boundary(tmp_path / "run"), tmp_path / "out")
    snapshot = next(one for one in saved(tmp_path / "run") if (one.epoch, one.batch) == (1, 4))
    smaller, root = {"per_device_train_batch_size": 2}, only(tmp_path / "run", snapshot, tmp_path / "1")
    left = train_hf(smaller, {**every_boundary(root), "data": "continue"}, tmp_path / "out", seed=11)
    within = [one for one in saved(root) if snapshot.step < one.step and one.epoch == 1 and one.reason != "end"]
    assert len(within) >= 2
    for number, one in enumerate(within[:2]):
        again = train_hf(smaller, resume_only(only(root, one, tmp_path / f"2{number}")), tmp_path / "out", seed=12)
        assert trained(again) == trained(left) - number - 1
        assert again.trace == left.trace[len(left.trace) - len(again.trace) :]
        assert again.digest["weights"] == left.digest["weights"]


@pytest.mark.long
@pytest.mark.parametrize(("batch", "place", "left"), [(8, (1, 4), 5), (2, (2, 1), 2)])
def test_max_steps_is_the_number_of_steps_of_the_whole_run(
    batch: int, place: tuple[int, int], left: int, tmp_path: Path
) -> None:
    """That is so where the steps before the resume count as those of another loader, and in a second resume."""
    steps = {"max_steps": 15}
    train_hf(steps, every_boundary(tmp_path / "run"), tmp_path / "out")
    snapshot = next(one for one in saved(tmp_path / "run") if (one.epoch, one.batch) == place)
    root = only(tmp_path / "run", snapshot, tmp_path / "1")
    changed = {**steps, "per_device_train_batch_size": batch}
    options = {**every_boundary(root), "data": "restart_epoch"}
    again = train_hf(changed, options, tmp_path / "out", seed=11)
    assert trained(again) == left
    assert any("as much further to max_steps" in one.why for one in report(root).not_restored)
    later = next(one for one in saved(root) if one.step == snapshot.step + 1)
    second = train_hf(changed, resume_only(only(root, later, tmp_path / "2")), tmp_path / "out", seed=12)
    assert trained(second) == left - 1
    assert second.trace == again.trace[len(again.trace) - len(second.trace) :]
    assert second.digest["weights"] == again.digest["weights"]


def test_between_epochs_a_grown_dataset_goes_on(tmp_path: Path) -> None:
    """A finished run that is trained longer, on more."""
    train_hf({}, every_boundary(tmp_path / "run"), tmp_path / "out")
    resumed = train_hf({"num_train_epochs": 4}, resume_only(tmp_path / "run"), tmp_path / "out", seed=11, samples=30)
    assert trained(resumed) == 8
    assert any(
        "data: 22 samples then, 30 now: the new loader counts from" in one.why
        for one in report(tmp_path / "run").not_restored
    )


def test_a_finished_run_that_is_started_again_ends_as_it_had(tmp_path: Path) -> None:
    """Its history has one summary, as if it had been started once."""
    first = train_hf({"num_train_epochs": 1}, every_boundary(tmp_path / "run"), tmp_path / "out")
    again = train_hf({"num_train_epochs": 1}, resume_only(tmp_path / "run"), tmp_path / "out", seed=11)
    assert trained(again) == 0
    assert again.digest == first.digest


@pytest.mark.cells(1)
@pytest.mark.parametrize("loggers", ["on", "full", "off"])
def test_reports_get_our_numbers(loggers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reports to a service gets them with the trainer's; the trainer's own history does not."""

    class Report(TrainerCallback):  # type: ignore[misc]
        got: list[tuple[int, dict[str, Any]]] = []  # noqa: RUF012 - of the class, as the trainer makes the instance

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.got.append((state.global_step, logs))
            assert not [name for one in state.log_history for name in one if name.startswith("ckpt")]

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "report", Report)
    options = {**every_boundary(tmp_path / "run"), "log": {"loggers": loggers}}
    train_hf({"report_to": ["report"], "logging_steps": 2}, options, tmp_path / "out")
    ours, others = ([step for step, logs in Report.got if ("ckpt/failed" in logs) is one] for one in (True, False))
    assert len(others) > 3
    assert ours == (others if loggers != "off" else [])
    assert any("ckpt/committed" in logs for _, logs in Report.got) == (loggers == "full")
