"""A run that is resumed from any boundary, under other seeds, is the uninterrupted run, bit for bit."""

from __future__ import annotations

import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ckpt_engine.engine import Engine
from tests.lightning.cases import CASES, LOADERS, SWA_IS_PLAIN
from tests.lightning.runs import Case, Outcome, Saved, every_batch, fit, only, resumer, saved, trained
from tests.lightning.runs import EverySnapshotIsDurable as Waits
from tests.support.digests import digest


def assert_continues(reference: Outcome, case: Case, root: Path, snapshot: Saved, target: Path) -> None:
    """Resume from `snapshot` under another seed and compare everything."""
    resumed = fit(case, [resumer(only(root, snapshot, target))], ckpt_path="auto", seed=1234 + snapshot.step)
    where = f"{snapshot.kind} snapshot, epoch {snapshot.epoch}, batch {snapshot.batch}"
    # Not `tail`: an epoch may end right here, and its last metrics come before the next batch.
    assert resumed.trace == reference.trace[len(reference.trace) - len(resumed.trace) :], where
    there = (snapshot.epoch, snapshot.batch)
    assert trained(resumed.trace, 0, 0) == trained(reference.trace, *there), where
    assert resumed.digest == reference.digest, where
    assert callbacks_end(resumed) == callbacks_end(reference), where


def callbacks_end(run: Outcome) -> dict[str, str]:
    """What the callbacks of a case had in the end."""
    others = [one for one in run.trainer.callbacks if "ckpt" not in type(one).__module__ and type(one) is not Waits]
    return digest(**{type(one).__name__: one.state_dict() for one in others})


def taken(case: Case, root: Path, every: int = 1, *, alone: bool = True) -> tuple[Outcome, list[Saved]]:
    """A run with the callback and its snapshots; alone: it is the run without, too."""
    watched = fit(case, every_batch(root, every_n_steps=every))
    if alone:
        reference = fit(case)
        assert watched.trace == reference.trace, "the callback changed the run"
        assert watched.digest == reference.digest, "the callback changed the run"
    return watched, [snapshot for snapshot in saved(root) if snapshot.kind not in ("stopped", "finished")]


def a_few(name: str, snapshots: list[Saved]) -> list[Saved]:
    """In the second epoch: the last boundary of each kind, and for kinds of loaders also one in the middle."""
    second = [s for s in snapshots if s.epoch == 1]
    chosen = {s.kind: s for s in second}
    return [*chosen.values(), *(s for s in second if s.batch == 2 and name in LOADERS)]


OF_A_KIND = {
    "L-BFGS",
    "accumulation of 4",
    "averaged weights",
    "combined, shorter one cycles",
    "datamodule",
    "double precision",
    "early stopping before min_epochs",
    "estimated_stepping_batches",
    "fused optimizer",
    "gradient clipping",
    "limit_train_batches",
    "persistent workers",
    "plateau per epoch on validation",
    "plateau per step",
    "scheduler per epoch",
    "scheduler per step",
    "shuffled",
    "stateful loader, two workers",
    "validation every second epoch",
    "validation within epochs",
}
"""Others of the same kind are in the quick suite; the slow one resumes these from every boundary."""
WITHOUT_US = {*LOADERS, "averaged weights", "mixed precision with a scaler", "raw optimizers by hand", "early stopping"}
"""Compared with a run that has no callback of ours. The others: with resumed runs, which save nothing."""


@pytest.mark.cells(8)
@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_A_KIND])
def test_every_configuration_resumes_exactly(name: str, tmp_path: Path) -> None:
    """The callback leaves the run as it is, and a few boundaries of the second epoch resume it."""
    case = CASES[name]
    reference, snapshots = taken(case, tmp_path / "run", every=2, alone=name in WITHOUT_US)
    chosen = a_few(name, snapshots)
    assert chosen
    for number, snapshot in enumerate(chosen):
        assert_continues(reference, case, tmp_path / "run", snapshot, tmp_path / str(number))


@pytest.mark.skipif(not SWA_IS_PLAIN, reason="SWALR of this torch has a function in its state")
def test_the_extra_epoch_of_weight_averaging_resumes_exactly(tmp_path: Path) -> None:
    """It only updates batch norm; its snapshots still have the scheduler and the number of averaged models."""
    case = CASES["stochastic weight averaging"]
    reference, snapshots = taken(case, tmp_path / "run")
    for number, start in enumerate(one for one in snapshots if (one.epoch, one.batch) in ((2, 3), (3, 0))):
        root = only(tmp_path / "run", start, tmp_path / str(number))
        fit(case, every_batch(root), ckpt_path="auto", seed=5)
        later = [snapshot for snapshot in saved(root) if (snapshot.epoch, snapshot.batch) == (3, 0)]
        assert_continues(reference, case, root, later[-1], tmp_path / f"after {number}")


@pytest.mark.long
def test_checkpoints_of_lightning_are_written_again_where_steps_are(tmp_path: Path) -> None:
    """Under the same names as in the uninterrupted run; what another run has left keeps its name."""

    def case_of(folder: Path) -> Case:
        options: dict[str, Any] = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{epoch}"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the folder is not empty
            made = ModelCheckpoint(folder, save_last=True, **options)
        return Case(callbacks=lambda: [made], trainer={"enable_checkpointing": True})

    fit(case_of(tmp_path / "other"), max_epochs=1)
    names = {}
    for life in ("whole", "killed"):
        (tmp_path / life).mkdir()
        shutil.copy(tmp_path / "other" / "epoch=0.ckpt", tmp_path / life / "epoch=1-v1.ckpt")
        fit(case_of(tmp_path / life), every_batch(tmp_path / f"{life} run"))
        names[life] = sorted(path.name for path in (tmp_path / life).iterdir())
    assert names["killed"] == names["whole"]
    steps = {path.name: step_in(path) for path in (tmp_path / "killed").iterdir()}
    snapshot = next(one for one in saved(tmp_path / "killed run") if (one.epoch, one.batch) == (1, 3))
    for path in (tmp_path / "killed run" / "snapshots").iterdir():
        if path.name > snapshot.path.name:
            path.unlink()
    began = time.time()
    fit(case_of(tmp_path / "killed"), [resumer(tmp_path / "killed run")], ckpt_path="auto", seed=3)
    assert {path.name: step_in(path) for path in (tmp_path / "killed").iterdir()} == steps
    again = {path.name for path in (tmp_path / "killed").iterdir() if path.stat().st_mtime > began}
    assert again == {name for name, step in steps.items() if step > 9 or name == "last.ckpt"}


def step_in(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def test_gradients_accumulated_by_hand_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model steps by itself, a snapshot that is postponed by a busy writer may meet half an accumulation."""
    case = CASES["accumulation by hand"]
    boundaries = iter(range(1000))
    ready = Engine.ready
    # Asked at every boundary while a snapshot is due: the even ones are those right after an optimizer step.
    monkeypatch.setattr(Engine, "ready", lambda self, **kind: next(boundaries) % 2 == 1 and ready(self, **kind))
    reference, snapshots = taken(case, tmp_path / "run")
    monkeypatch.setattr(Engine, "ready", ready)
    halves = [s for s in snapshots if s.batch % 2 == 1]
    assert halves
    assert_continues(reference, case, tmp_path / "run", halves[-1], tmp_path / "half")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_boundary_resumes_exactly(name: str, tmp_path: Path) -> None:
    """A run that is resumed from any boundary continues bit for bit."""
    case = CASES[name]
    reference, snapshots = taken(case, tmp_path / "run")
    assert len(snapshots) >= 4
    for snapshot in snapshots:
        assert_continues(reference, case, tmp_path / "run", snapshot, tmp_path / snapshot.id)
