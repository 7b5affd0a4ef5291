"""Runs that end in an exception: in the loop, in a callback, by SIGTERM; several in a row."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, get_worker_info

from ckpt_engine.store import names
from ckpt_engine.store.storage.local import LocalStorage
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.cases import CASES
from tests.lightning.runs import BATCH, Augmented, Case, Entry, Outcome, every_batch, fit, resumer, saved, tail


class CrashError(RuntimeError):
    """Stands for a bug in the user's code."""


class At(Callback):
    """Does something when a batch is about to be trained."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self.step:
            self.action()


def crash() -> None:
    raise CrashError


def interrupted(case: Case, root: Path, step: int, **options: Any) -> list[Entry]:
    """What was trained before the run crashed at batch `step`; every boundary is durable."""
    trace: list[list[Entry]] = []

    class Peek(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trace.append(pl_module.trace.append.__self__)

    with pytest.raises(CrashError):
        fit(case, [*every_batch(root), At(step, crash), Peek()], **options)
    return trace[0]


@pytest.mark.cells(1)
@pytest.mark.parametrize("name", ["validation within epochs", "persistent workers", "plateau per epoch"])
def test_three_crashes_in_a_row_leave_one_exact_run(name: str, tmp_path: Path) -> None:
    """Each process resumes what the one before left, within the same epoch and across epochs."""
    case = CASES[name]
    reference = fit(case)
    trained = interrupted(case, tmp_path, 4)
    for hop, step in enumerate((5, 9, 14)):
        again = interrupted(case, tmp_path, step, ckpt_path="auto", seed=100 + hop)
        first = again[0]
        kept = trained[: trained.index(first)] if first in trained else trained
        trained = kept + again
    last = fit(case, [resumer(tmp_path)], ckpt_path="auto", seed=200)
    kept = trained[: trained.index(last.trace[0])] if last.trace[0] in trained else trained
    assert kept + last.trace == reference.trace
    assert last.digest == reference.digest


def test_a_crash_takes_no_new_snapshot_and_hides_no_exception(tmp_path: Path) -> None:
    """The state in the middle of a batch belongs to no boundary; a snapshot that was in flight becomes durable."""
    interrupted(Case(), tmp_path, 3)
    assert [s.step for s in saved(tmp_path)] == [0, 1, 2, 3][-len(saved(tmp_path)) :]
    assert saved(tmp_path)[-1].step == 3


def test_what_is_in_flight_at_a_crash_becomes_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception waits for it; nothing is said to other processes."""
    put, crashed = LocalStorage.put, threading.Event()

    def slow_put(self: LocalStorage, name: str, blocks: Any, **options: Any) -> None:
        if name.startswith(names.DATA):
            assert crashed.wait(60)  # every write is still on its way when training fails
        put(self, name, blocks, **options)

    def fail() -> None:
        threading.Timer(0.3, crashed.set).start()
        raise CrashError

    monkeypatch.setattr(LocalStorage, "put", slow_put)
    ckpt = AdaptiveCheckpoint(str(tmp_path), every_n_steps=2, writer="thread")
    with pytest.raises(CrashError):
        fit(Case(), [ckpt, At(5, fail)])
    assert saved(tmp_path)[-1].step == 4


def test_the_trainer_is_left_as_it_was_found(tmp_path: Path) -> None:
    """No wrapper, hook or guard stays after a run, whether it ended well or not."""
    from torch.optim import optimizer as torch_optimizer

    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    for crashes in (False, True):
        ckpt = AdaptiveCheckpoint(str(tmp_path / str(crashes)), every_n_steps=2, writer="thread")
        callbacks: list[Callback] = [ckpt, At(4, crash)] if crashes else [ckpt]
        outcome: list[Any] = []

        class Keep(Callback):
            def setup(self, trainer: Any, pl_module: Any, stage: str, kept: list[Any] = outcome) -> None:
                kept.append(trainer)

        if crashes:
            with pytest.raises(CrashError):
                fit(Case(), [*callbacks, Keep()])
        else:
            fit(Case(), [*callbacks, Keep()])
        trainer = outcome[0]
        assert [c for c in trainer.callbacks if type(c).__name__ == "FenceGuard"] == []
        for owner, name in (
            (trainer._checkpoint_connector, "resume_start"),
            (trainer.fit_loop, "on_advance_start"),
            (trainer.fit_loop.epoch_loop, "advance"),
            (trainer.strategy, "process_dataloader"),
        ):
            assert name not in vars(owner), f"{name} is still wrapped"
        assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
        assert trainer.num_sanity_val_steps == 2


def sigterm(case: Case, root: Path, step: int) -> None:
    """Trains until SIGTERM arrives while batch `step` is about to be trained."""
    ckpt = AdaptiveCheckpoint(str(root), every_n_steps=10**9, writer="thread")
    with pytest.raises(SIGTERMException):
        fit(case, [ckpt, At(step, lambda: os.kill(os.getpid(), signal.SIGTERM))])


@pytest.mark.parametrize(("step", "kind", "where"), [(7, "plain", (1, 2)), (11, "start", (2, 0))])
def test_sigterm_saves_the_last_finished_batch(step: int, kind: str, where: tuple[int, int], tmp_path: Path) -> None:
    """The batch that runs is finished, in an epoch's last one the epoch too; that instant resumes exactly."""
    reference: Outcome = fit(Case())
    sigterm(Case(), tmp_path, step)
    (snapshot,) = saved(tmp_path)
    assert snapshot.kind == kind
    resumed = fit(Case(), [resumer(tmp_path)], ckpt_path="auto", seed=5)
    assert resumed.trace == tail(reference.trace, *where)
    assert resumed.digest == reference.digest


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("name", "step", "where"),
    [("validation within epochs", 2, (0, 3)), ("accumulation of 2", 2, (0, 3)), ("accumulation of 2", 3, (0, 4))],
)
def test_sigterm_before_a_validation_or_within_an_accumulation(
    name: str, step: int, where: tuple[int, int], tmp_path: Path
) -> None:
    """A validation that is due is finished first; gradients that wait for more are part of the snapshot."""
    case = CASES[name]
    reference = fit(case)
    sigterm(case, tmp_path, step)
    assert len(saved(tmp_path)) == 1
    resumed = fit(case, [resumer(tmp_path)], ckpt_path="auto", seed=5)
    assert resumed.trace == tail(reference.trace, *where)
    assert resumed.digest == reference.digest


class Dying(Augmented):
    """Its first worker asks the trainer to stop and dies, while the trainer waits for the first batch of an epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __getitem__(self, i: int) -> Any:
        info = get_worker_info()
        if info is not None and info.id == 0 and not (self.folder / "dead").exists():
            while not (self.folder / "waits").exists():
                time.sleep(0.01)
            (self.folder / "dead").touch()
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


@pytest.mark.slow
def test_a_worker_that_dies_of_the_same_signal_costs_nothing(tmp_path: Path) -> None:
    """The batch that does not come is still ahead: the boundary before it is saved."""
    (tmp_path / "dead").touch()
    case = Case(loader=lambda: DataLoader(Dying(tmp_path), batch_size=BATCH, shuffle=True, num_workers=2))
    reference = fit(case)
    (tmp_path / "dead").unlink()

    class Waits(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            (tmp_path / "waits").touch()

    ckpt = AdaptiveCheckpoint(str(tmp_path / "run"), every_n_steps=10**9, writer="thread")
    with pytest.raises(SIGTERMException):
        fit(case, [ckpt, Waits()])
    assert [one.step for one in saved(tmp_path / "run")] == [0]
    resumed = fit(case, [resumer(tmp_path / "run")], ckpt_path="auto", seed=5)
    assert resumed.trace == reference.trace
    assert resumed.digest == reference.digest


def test_sigterm_in_the_last_batch_completes_the_run(tmp_path: Path) -> None:
    """The final state is saved; the process still ends as asked, and a restart has nothing to do."""
    reference = fit(Case())
    ckpt = AdaptiveCheckpoint(str(tmp_path), every_n_steps=10**9, writer="thread")
    with pytest.raises(SIGTERMException) as ended:
        fit(Case(), [ckpt, At(17, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert ended.value.code == 143
    assert [one.kind for one in saved(tmp_path)] == ["finished"]
    again = fit(Case(), [resumer(tmp_path)], ckpt_path="auto", seed=5)
    assert again.trace == []
    assert again.digest == reference.digest


def test_where_sigterm_is_not_ours_lightning_stops_the_run(tmp_path: Path) -> None:
    """As it does without us: in a validation too, where nothing is saved because weights may be averaged ones."""
    ckpt = AdaptiveCheckpoint(str(tmp_path), every_n_steps=10**9, writer="thread", preemption={"signals": []})
    with pytest.raises(SIGTERMException):
        fit(Case(val=3), [ckpt, At(2, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert saved(tmp_path) == []
