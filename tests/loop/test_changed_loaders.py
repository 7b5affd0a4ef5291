"""Loops that are resumed with another batch size or more samples (the option `data`), or another optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.utils.data import DataLoader, random_split

from ckpt_engine import Checkpointer
from ckpt_engine.errors import MismatchError
from tests.accelerate.runs import train_accelerate
from tests.loop.runs import (
    SAMPLES,
    Augmented,
    Case,
    Train,
    every_boundary,
    only,
    report,
    resume_only,
    saved,
    train_plain,
)

TRAINERS = {"plain": train_plain, "accelerate": train_accelerate}


def loader(n: int, batch_size: int, **options: Any) -> Any:
    return lambda: DataLoader(Augmented(n), batch_size=batch_size, shuffle=True, **options)


def interrupted(train: Train, case: Case, root: Path, target: Path, epoch: int, batch: int) -> tuple[list[Any], Path]:
    """A whole run, and its folder as it was in the middle of an epoch."""
    trace = train(case, every_boundary(root)).trace
    snapshot = next(s for s in saved(root) if (s.epoch, s.batch) == (epoch, batch) and s.reason != "end")
    return trace, only(root, snapshot, target)


def samples(trace: list[Any], epoch: int) -> list[tuple[int, tuple[int, ...]]]:
    return [(entry[2], entry[3]) for entry in trace if entry[0] == "train" and entry[1] == epoch]


def flat(batches: list[tuple[int, tuple[int, ...]]]) -> list[int]:
    return [sample for _, batch in batches for sample in batch]


@pytest.mark.long
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_user_chooses_what_becomes_of_the_interrupted_epoch(trainer: str, tmp_path: Path) -> None:
    """Refused at first, then started again, then continued."""
    train: Train = TRAINERS[trainer]
    trace, root = interrupted(train, Case(loader=loader(SAMPLES, 4)), tmp_path / "run", tmp_path / "1", 1, 3)
    case = Case(loader=loader(SAMPLES + 5, 8))
    with pytest.raises(MismatchError, match="batch_size was 4, now 8") as caught:
        train(case, resume_only(root), seed=7)
    assert "data: restart_epoch" in str(caught.value.hint)

    rest = train(case, {**resume_only(root), "data": "continue"}, seed=7).trace
    assert flat(samples(rest, 1)) == flat(samples(trace, 1))[12:]
    assert [number for number, _ in samples(rest, 1)] == [3, 4]
    assert sorted(flat(samples(rest, 2))) == list(range(SAMPLES + 5))
    assert any("the other 10 samples of the epoch come in 2 batches" in one.why for one in report(root).not_restored)

    again = train(case, {**resume_only(root), "data": "restart_epoch"}, seed=7).trace
    assert [number for number, _ in samples(again, 1)] == [0, 1, 2, 3]
    assert sorted(flat(samples(again, 1))) == sorted(flat(samples(again, 2))) == list(range(SAMPLES + 5))
    assert not samples(again, 0)
    assert any(
        "data: restart_epoch: 22 samples then, 27 now; batch_size" in one.why for one in report(root).not_restored
    )


@pytest.mark.long
@pytest.mark.parametrize("trainer", TRAINERS)
def test_between_epochs_a_grown_dataset_goes_on(trainer: str, tmp_path: Path) -> None:
    """A finished run that is trained longer, on more."""
    train: Train = TRAINERS[trainer]
    train(Case(loader=loader(SAMPLES, 4)), every_boundary(tmp_path))
    resumed = train(Case(loader=loader(SAMPLES + 6, 7), epochs=4), resume_only(tmp_path), seed=7)
    assert sorted(flat(samples(resumed.trace, 3))) == list(range(SAMPLES + 6))
    assert any("from this epoch on" in one.why for one in report(tmp_path).not_restored)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_unseeded_split_is_refused(trainer: str, tmp_path: Path) -> None:
    """The error names the cause, between epochs too."""
    train: Train = TRAINERS[trainer]

    def half(seed: int) -> Case:
        part = random_split(Augmented(), [16, 6], generator=torch.Generator().manual_seed(seed))[0]
        return Case(loader=lambda: DataLoader(part, batch_size=4, shuffle=True))

    train(half(1), every_boundary(tmp_path))
    with pytest.raises(MismatchError, match="split or order differs"):
        train(half(2), resume_only(tmp_path), seed=7)


def optimized(optimizer: Callable[[Any], torch.optim.Optimizer], root: Path, last: int) -> Any:
    """The learning rate and its like in the groups, after the loop's step `last`."""
    model = torch.nn.Linear(2, 1)
    made = optimizer(model.parameters())
    with Checkpointer(str(root), every_n_steps=1, writer="thread") as ckpt:
        run = ckpt.track(model=model, optimizer=made)
        for _ in range(run.global_step, last):
            model(torch.ones(2)).sum().backward()
            made.step()
            run.step()
    return made.param_groups


def test_an_optimizer_of_another_class_is_refused(tmp_path: Path) -> None:
    """The moments of AdamW load into an Adam, whose steps would be other ones; the same class goes on."""
    adam, decayed = (lambda p, kind=kind: kind(p, 0.1) for kind in (torch.optim.Adam, torch.optim.AdamW))
    optimized(decayed, tmp_path, 2)
    with pytest.raises(MismatchError, match=r"'optimizer' of the class AdamW, and the script now has Adam") as caught:
        optimized(adam, tmp_path, 4)
    assert "use AdamW" in str(caught.value.hint)
    optimized(decayed, tmp_path, 4)
    assert report(tmp_path).not_restored == ()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_scheduler_of_another_class_is_named(wrapped: bool, tmp_path: Path) -> None:
    """It has what the snapshot has of the other one, and goes on by its own rule; the same class is not named."""
    for last, kind in enumerate(("StepLR", "ExponentialLR", "ExponentialLR"), 1):
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), 0.1)
        others = {"step_size": 2} if kind == "StepLR" else {}
        scheduler: Any = getattr(torch.optim.lr_scheduler, kind)(optimizer, gamma=0.5, **others)
        scheduler = AcceleratedScheduler(scheduler, optimizer) if wrapped else scheduler
        with Checkpointer(str(tmp_path), every_n_steps=1, writer="thread") as ckpt:
            run = ckpt.track(optimizer=optimizer, scheduler=scheduler)
            for _ in range(run.global_step, last):
                run.step()
        if last > 1:
            named = [one.why for one in report(tmp_path).not_restored]
            assert named == ["scheduler is a ExponentialLR now, and has what the snapshot has of a StepLR"][last - 2 :]


def test_options_of_an_optimizer_that_the_script_changes_are_named(tmp_path: Path) -> None:
    """Those of the snapshot hold, and who edits a learning rate sees that."""

    def sgd(rate: float, momentum: float) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda parameters: torch.optim.SGD(parameters, rate, momentum)

    optimized(sgd(0.1, 0.9), tmp_path, 2)
    (group,) = optimized(sgd(0.2, 0.0), tmp_path, 4)
    assert (group["lr"], group["momentum"]) == (0.1, 0.9)
    (named,) = report(tmp_path).not_restored
    assert "['lr'] is 0.1 as in the snapshot, not 0.2" in named.why
    assert "['momentum'] is 0.9 as in the snapshot, not 0.0" in named.why
    optimized(sgd(0.2, 0.0), tmp_path, 6)
    assert report(tmp_path).not_restored == ()  # said once


def test_options_that_are_no_numbers_are_left_alone(tmp_path: Path) -> None:
    """Betas may be tensors, as compiled and captured optimizers have them."""

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, 0.1, (torch.tensor(0.9), torch.tensor(0.99)), foreach=False)

    optimized(adam, tmp_path, 2)
    optimized(adam, tmp_path, 4)
    assert report(tmp_path).not_restored == ()
