"""A finished run stays finished, and continues exactly where it is allowed to go further."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch.utils.data import DataLoader

from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.cases import HAS_AVERAGING, averaging, shuffled
from tests.lightning.runs import BATCH, Case, Stream, every_batch, fit, only, resumer, saved, tail
from tests.lightning.test_hidden import report


def at_end(root: Path) -> AdaptiveCheckpoint:
    """Takes the final snapshot only."""
    return AdaptiveCheckpoint(str(root), every_n_steps=10**9, writer="thread")


def longer(case: Case, **limits: Any) -> Case:
    return replace(case, trainer={**case.trainer, **limits})


FINISHED = {
    "plain": Case(),
    "validation": Case(val=3, schedule=("plateau", "epoch", "val_loss")),
    "persistent workers": Case(loader=shuffled(num_workers=2, persistent_workers=True)),
    "own generator": Case(
        loader=lambda: shuffled(generator=torch.Generator().manual_seed(3))(),
    ),
    "own generator, fetched ahead": Case(
        loader=lambda: [
            shuffled(generator=torch.Generator().manual_seed(3))(),
            DataLoader(Stream(), batch_size=BATCH),
        ]
    ),
    "iterable": Case(loader=lambda: DataLoader(Stream(), batch_size=BATCH)),
    **({"averaged": Case(callbacks=averaging)} if HAS_AVERAGING else {}),
    "loaders made again": Case(trainer={"reload_dataloaders_every_n_epochs": 1}),
}


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", FINISHED)
def test_more_epochs_continue_a_finished_run_exactly(name: str, tmp_path: Path) -> None:
    """One epoch, then a restart with max_epochs=3, are one run of three epochs."""
    case = FINISHED[name]
    reference = fit(longer(case, max_epochs=3))
    fit(longer(case, max_epochs=1), [at_end(tmp_path)])
    assert [s.kind for s in saved(tmp_path)] == ["finished"]
    resumed = fit(longer(case, max_epochs=3), [at_end(tmp_path)], ckpt_path="auto", seed=99)
    assert resumed.trace == tail(reference.trace, 1, 0)
    assert resumed.digest == reference.digest


@pytest.mark.long
@pytest.mark.parametrize("batch", [0, 2])
def test_a_snapshot_behind_the_last_epoch_is_of_a_later_fit(batch: int, tmp_path: Path) -> None:
    """A second fit was killed there: the first one has nothing left to train, and says what the second needs."""
    fit(longer(Case(), max_epochs=3), every_batch(tmp_path / "run"))
    snapshot = next(s for s in saved(tmp_path / "run") if (s.epoch, s.batch) == (2, batch))
    fit(longer(Case(), max_epochs=2), [resumer(only(tmp_path / "run", snapshot, tmp_path / "one"))], ckpt_path="auto")
    named = [row["why"] for row in report(tmp_path / "one")["not_restored"]]
    assert [("one ckpt_path='auto' too" in one) for one in named] == [True] * bool(batch)


COMPLETE = {
    "map": Case(),
    "iterable": Case(loader=lambda: DataLoader(Stream(), batch_size=BATCH)),
    "limited": Case(trainer={"limit_train_batches": 3}),
    "by max_steps": Case(trainer={"max_epochs": -1, "max_steps": 12}),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_the_report_of_a_finished_run_names_nothing_as_missing(name: str, tmp_path: Path) -> None:
    """However its end is set, a second start finds nothing to train and nothing that is not restored."""
    fit(COMPLETE[name], [at_end(tmp_path)])
    assert fit(COMPLETE[name], [at_end(tmp_path)], ckpt_path="auto", seed=5).trace == []
    assert report(tmp_path)["not_restored"] == []


def test_a_rerun_of_a_finished_run_does_nothing(tmp_path: Path) -> None:
    """The same script again trains no batch, takes no snapshot and ends with the same weights, streams and metrics."""
    first = fit(Case(val=3), [at_end(tmp_path)])
    before = saved(tmp_path)
    again = fit(Case(val=3), [at_end(tmp_path)], ckpt_path="auto", seed=5)
    assert again.trace == []
    assert saved(tmp_path) == before
    assert again.digest == first.digest
    assert {"loss_epoch", "val_loss"} <= again.trainer.callback_metrics.keys()
    for name in ("callback_metrics", "logged_metrics"):
        found, expected = (dict(getattr(one.trainer, name)) for one in (again, first))
        assert found == {key: value for key, value in expected.items() if not key.startswith("ckpt/")}


@pytest.mark.cells(1)
@pytest.mark.parametrize("steps", [7, 8, 9])
def test_a_higher_max_steps_continues_in_the_middle_of_the_epoch(steps: int, tmp_path: Path) -> None:
    """Lightning ends the epoch when max_steps is reached; the snapshot is from before that end."""
    case = Case(val=3, trainer={"max_epochs": -1, "max_steps": 17}, schedule=("decay", "step", ""))
    reference = fit(case)
    fit(longer(case, max_steps=steps), [at_end(tmp_path)])
    (snapshot,) = saved(tmp_path)
    assert (snapshot.kind, snapshot.epoch, snapshot.batch) == ("stopped", 1, steps - 6)
    assert fit(longer(case, max_steps=steps), [at_end(tmp_path)], ckpt_path="auto").trace == []
    resumed = fit(case, [at_end(tmp_path)], ckpt_path="auto", seed=99)
    assert resumed.trace == tail(reference.trace, 1, steps - 6)
    assert resumed.digest == reference.digest


@pytest.mark.parametrize(("monitor", "val"), [("val_loss", 2), ("val_loss", 1.0), ("loss_epoch", None)])
def test_a_run_ended_by_early_stopping_stays_ended(monitor: str, val: Any, tmp_path: Path) -> None:
    """EarlyStopping is part of the run: its decision holds after a restart, wherever in the epoch it was taken."""
    case = Case(callbacks=lambda: [EarlyStopping(monitor, patience=1, min_delta=1.0)], val=val)
    first = fit(case, [at_end(tmp_path)])
    assert 0 < len([e for e in first.trace if e[0] == "train"]) < 18
    again = fit(case, [at_end(tmp_path)], ckpt_path="auto", seed=5)
    assert again.trace == []


class StopOnce(Callback):
    """Stops training gracefully, as a handler of a preemption notice would."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == 8


def test_a_run_stopped_by_the_user_goes_on_after_a_restart(tmp_path: Path) -> None:
    """`trainer.should_stop` set by anything but EarlyStopping only ended the process, not the training."""
    reference = fit(Case())
    fit(Case(), [StopOnce(), at_end(tmp_path)])
    (snapshot,) = saved(tmp_path)
    assert (snapshot.kind, snapshot.epoch, snapshot.batch) == ("stopped", 1, 2)
    resumed = fit(Case(), [at_end(tmp_path)], ckpt_path="auto", seed=5)
    assert resumed.trace == tail(reference.trace, 1, 2)
    assert resumed.digest == reference.digest


@pytest.mark.skipif(not HAS_AVERAGING, reason="this Lightning has no weight averaging")
def test_a_rerun_ends_with_the_averaged_weights(tmp_path: Path) -> None:
    """The snapshot is from before they replaced the last ones; who asks again gets what the first run ended with."""
    case = Case(callbacks=averaging)
    first = fit(case, [at_end(tmp_path)])
    again = fit(case, [at_end(tmp_path)], ckpt_path="auto", seed=5)
    assert again.trace == []
    assert again.digest["weights"] == first.digest["weights"]
