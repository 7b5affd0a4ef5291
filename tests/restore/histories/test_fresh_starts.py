"""A start that does not resume, in every trainer: the old history stays, one line says so, and one option resumes."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_ckpt import AdaptiveCheckpoint as AccelerateCheckpoint
from ckpt_engine import Checkpointer
from ckpt_engine.store.manifest import SnapshotInfo
from lightning_ckpt import AdaptiveCheckpoint as LightningCheckpoint
from tests.accelerate.hf import train_hf
from tests.accelerate.runs import make_accelerator
from tests.lightning import runs as lightning_runs
from tests.loop.runs import Case

BATCHES = 3
Train = Callable[[Path, Mapping[str, Any]], None]


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(BATCHES, 2)))


def loop(model: Any, optimizer: Any, batches: Any, epochs: range) -> None:
    for _ in epochs:
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()


def tracked(root: Path, options: Mapping[str, Any]) -> None:
    model, batches = nn.Linear(2, 1), loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(root, **options) as ckpt:
        tracker = ckpt.track(model=model, optimizer=optimizer, loader=batches)
        loop(model, optimizer, batches, range(tracker.epoch, 2))


def accelerated(root: Path, options: Mapping[str, Any]) -> None:
    accelerator: Accelerator = make_accelerator(Case())
    plain = nn.Linear(2, 1)
    model, optimizer, batches = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), loader())
    with AccelerateCheckpoint(accelerator, str(root), **options) as ckpt:
        loop(model, optimizer, batches, range(ckpt.epoch, 2))


def lightning(root: Path, options: Mapping[str, Any]) -> None:
    callback = LightningCheckpoint(str(root), **options)
    lightning_runs.fit(lightning_runs.Case(trainer={"max_epochs": 1}), [callback])


def transformers(root: Path, options: Mapping[str, Any]) -> None:
    train_hf({"num_train_epochs": 1}, {"tiers": str(root), **options}, root.parent / "out", asks=False)


TRAINERS: Mapping[str, Train] = {
    "track": tracked,
    "accelerate": accelerated,
    "lightning": lightning,
    "transformers": transformers,
}
OPTIONS = {"keep": {"last": 1}, "every_n_steps": 1, "writer": "thread"}


def there(root: Path) -> list[SnapshotInfo]:
    with Checkpointer(root) as ckpt:
        return ckpt.snapshots()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "starts fresh beside" in record.getMessage()]


@pytest.mark.cells(1)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_start_that_does_not_resume_leaves_the_history_alone(
    trainer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same in every trainer: both lines have their newest snapshot, and one warning names branch and way on."""
    root = tmp_path / "run"
    with Checkpointer(root, keep={"last": 1}, writer="thread") as ckpt:
        ckpt.save({"of": "an earlier run"}, step=39).wait(60)
    fresh = {} if trainer in ("lightning", "transformers") else {"resume": "off"}
    with caplog.at_level(logging.WARNING):
        TRAINERS[trainer](root, {**OPTIONS, **fresh})
    found = there(root)
    assert len(found) == 2
    assert found[0].step == 39
    (line,) = warned(caplog)
    assert f"--branch {found[0].line.attempt[:8]}" in line
    assert "up to step 39" in line
    assert "resume=" in line


@pytest.mark.cells(1)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_option_resumes_and_says_nothing(trainer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With `resume: auto` no other argument is needed: the run that was complete is found so, on its own line."""
    root = tmp_path / "run"
    options = {**OPTIONS, "resume": "auto"}
    TRAINERS[trainer](root, options)
    before = there(root)
    assert len(before) == 1
    with caplog.at_level(logging.WARNING):
        TRAINERS[trainer](root, options)
    assert warned(caplog) == []
    assert there(root)[-1].step == before[-1].step
    assert len(there(root)) == 1


def test_what_a_lost_writer_has_made_is_no_history(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next one finds the snapshots of this very process there."""
    with Checkpointer(tmp_path, keep={"last": 1}) as ckpt, caplog.at_level(logging.WARNING):
        ckpt.save({"of": "this run"}, step=1).wait(60)
        handover = ckpt.engine._pipeline._writer
        assert handover is not None
        os.kill(handover.client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        while handover.client.alive:
            handover.client.wait(60)
        ckpt.engine.poll()
        for step in (2, 3):
            ckpt.save({"of": "this run"}, step=step).wait(60)
    assert "was killed by SIGKILL" in caplog.text
    assert warned(caplog) == []
    assert [info.step for info in there(tmp_path)] == [3]


def test_another_fit_of_the_same_trainer_goes_on_with_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a trainer holds in memory is no fresh start."""
    callback, case = LightningCheckpoint(str(tmp_path), **OPTIONS), lightning_runs.Case(trainer={"max_epochs": 1})
    fitted = lightning_runs.fit(case, [callback])
    first = there(tmp_path)
    fitted.trainer.fit_loop.max_epochs = 2
    with caplog.at_level(logging.WARNING):
        lightning_runs.train(fitted.trainer, fitted.model, case, None)
    assert warned(caplog) == []
    assert len(there(tmp_path)) == 1
    assert there(tmp_path)[0].step > first[0].step


def test_the_option_off_wins_over_the_argument(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script that always says "auto" starts fresh where the options say so, and nothing is lost by it."""
    case = lightning_runs.Case(trainer={"max_epochs": 1})
    for resume in (None, "off"):
        with caplog.at_level(logging.WARNING):
            lightning_runs.fit(case, [LightningCheckpoint(str(tmp_path), resume=resume, **OPTIONS)], ckpt_path="auto")
    assert "leave out resume='off'" in warned(caplog)[0]
    assert len(there(tmp_path)) == 2


@pytest.mark.long
def test_a_second_callback_goes_on_with_its_own_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run resumes from the folder of the one: what the other has of it is no finished branch."""
    with caplog.at_level(logging.WARNING):
        for epochs in (1, 2):
            both = [LightningCheckpoint(str(tmp_path / name), **OPTIONS) for name in "ab"]
            lightning_runs.fit(lightning_runs.Case(trainer={"max_epochs": epochs}), both, ckpt_path="auto")
    assert warned(caplog) == []
    assert [len(there(tmp_path / name)) for name in "ab"] == [1, 1]


def test_a_script_that_loads_another_state_begins_a_branch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Accelerate's `load_state` after a resume: what is trained then does not follow the newest snapshot."""
    root = tmp_path / "run"
    accelerated(root, OPTIONS)
    (old,) = there(root)
    accelerator: Accelerator = make_accelerator(Case())
    plain = nn.Linear(2, 1)
    model, optimizer, batches = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), loader())
    accelerator.save_state(str(tmp_path / "state"))
    with caplog.at_level(logging.WARNING), AccelerateCheckpoint(accelerator, str(root), **OPTIONS):
        accelerator.load_state(str(tmp_path / "state"))
        loop(model, optimizer, batches, range(1))
    assert "load no other state" in warned(caplog)[0]
    assert there(root)[0].id == old.id
    assert len(there(root)) == 2


def test_a_callback_that_comes_too_late_to_resume_says_so(tmp_path: Path) -> None:
    """transformers asks for a checkpoint before it tells its callbacks anything."""
    from ckpt_engine.errors import ConfigError

    transformers(tmp_path / "run", OPTIONS)
    with pytest.raises(ConfigError, match=r"resume='auto' needs a callback that the trainer is made with"):
        train_hf({}, {"tiers": str(tmp_path / "run"), **OPTIONS, "resume": "auto"}, tmp_path, asks=False, late=True)
    assert len(there(tmp_path / "run")) == 1
