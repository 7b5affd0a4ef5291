"""Plain and Accelerate loops that are resumed with another batch size or more samples: the option `data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, random_split

from ckpt_engine.errors import MismatchError
from tests.accelerate.runs import train_accelerate
from tests.tracking.runs import (
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
        "data: restart_epoch: dataset_length was 22, now 27; batch_size" in one.why for one in report(root).not_restored
    )


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
