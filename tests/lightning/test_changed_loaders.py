"""Runs that are resumed with another batch size or more samples: the option `data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, random_split

from ckpt_engine.errors import MismatchError
from tests.lightning.cases import shuffled
from tests.lightning.runs import SAMPLES, Augmented, Case, Entry, every_batch, fit, only, resumer, saved
from tests.loop.runs import report

BEFORE = Case(loader=shuffled(), val=1.0)


def loader(n: int, batch_size: int) -> Any:
    return lambda: DataLoader(Augmented(n), batch_size=batch_size, shuffle=True)


def interrupted(case: Case, root: Path, target: Path, epoch: int, batch: int) -> tuple[list[Entry], Path]:
    """A whole run, and its folder as it was in the middle of an epoch."""
    trace = fit(case, every_batch(root)).trace
    snapshot = next(s for s in saved(root) if (s.epoch, s.batch) == (epoch, batch) and s.reason != "end")
    return trace, only(root, snapshot, target)


def samples(trace: list[Entry], epoch: int) -> list[tuple[int, tuple[int, ...]]]:
    return [(entry[2], entry[4]) for entry in trace if entry[0] == "train" and entry[1] == epoch]


def flat(batches: list[tuple[int, tuple[int, ...]]]) -> list[int]:
    return [sample for _, batch in batches for sample in batch]


def test_in_the_middle_of_an_epoch_another_batch_size_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    """The error names both values of the option, and nothing was trained."""
    _, root = interrupted(BEFORE, tmp_path / "run", tmp_path / "1", 1, 3)
    with pytest.raises(MismatchError, match="batch_size was 4, now 8") as caught:
        fit(Case(loader=loader(SAMPLES, 8), val=1.0), [resumer(root)], ckpt_path="auto", seed=7)
    assert "data: restart_epoch" in str(caught.value.hint)
    assert "data: continue" in str(caught.value.hint)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "validated"])
def test_restart_epoch_trains_the_whole_epoch_again(kind: str, tmp_path: Path) -> None:
    """Its batches are counted from 0, its means start from zero, validation and the following epochs come as always."""
    val = 1.0 if kind == "plain" else 3
    trace, root = interrupted(Case(loader=shuffled(), val=val), tmp_path / "run", tmp_path / "1", 1, 3)
    case = Case(loader=loader(SAMPLES, 8), val=1.0)
    resumed = fit(case, [resumer(root, data="restart_epoch")], ckpt_path="auto", seed=7)
    again, following = samples(resumed.trace, 1), samples(resumed.trace, 2)
    assert [number for number, _ in again] == [number for number, _ in following] == [0, 1, 2]
    assert flat(again) == flat(samples(trace, 1))
    assert sorted(flat(following)) == list(range(SAMPLES))
    assert sum(entry[0] == "val" for entry in resumed.trace) == 4
    means = [dict(entry[2]) for entry in resumed.trace if entry[0] == "log" and "mean" in dict(entry[2])]
    losses = [float.fromhex(entry[5]) for entry in resumed.trace if entry[:2] == ("train", 1)]
    assert float.fromhex(means[0]["mean"]) == pytest.approx(sum(losses) / 3, rel=1e-5)
    found = report(root)
    assert any("data: restart_epoch: batch_size was 4, now 8" in one.why for one in found.not_restored)
    assert any("epoch 1 starts again at its first batch" in note for note in found.notes)


def test_continue_trains_what_is_left_of_the_epoch(tmp_path: Path) -> None:
    """Each sample once; new ones come from the next epoch on."""
    trace, root = interrupted(BEFORE, tmp_path / "run", tmp_path / "1", 1, 3)
    case = Case(loader=loader(SAMPLES + 5, 8), val=1.0)
    resumed = fit(case, [resumer(root, data="continue")], ckpt_path="auto", seed=7)
    assert samples(resumed.trace, 1)[0][0] == 3
    assert flat(samples(resumed.trace, 1)) == flat(samples(trace, 1))[12:]
    assert [len(batch) for _, batch in samples(resumed.trace, 1)] == [8, 4]
    assert sorted(flat(samples(resumed.trace, 2))) == list(range(SAMPLES + 5))
    (why,) = [one.why for one in report(root).not_restored]
    assert "the other 12 samples of the epoch come in 2 batches, the 5 new ones from the next epoch on" in why


def test_between_epochs_a_grown_dataset_goes_on(tmp_path: Path) -> None:
    """A finished run that is trained longer, on more."""
    fit(BEFORE, every_batch(tmp_path))
    longer = Case(loader=loader(SAMPLES + 4, 7), val=1.0, trainer={"max_epochs": 4})
    resumed = fit(longer, [resumer(tmp_path)], ckpt_path="auto", seed=7)
    assert sorted(flat(samples(resumed.trace, 3))) == list(range(SAMPLES + 4))
    assert len(samples(resumed.trace, 3)) == 4
    (why,) = [one.why for one in report(tmp_path).not_restored]
    assert "data: 24 samples then, 28 now; batch_size was 4, now 7: the new loader counts from this epoch on" in why


def test_loaders_side_by_side_start_their_epoch_again_together(tmp_path: Path) -> None:
    """One has changed; going on with what is left would bring them out of step."""

    def both(batch_size: int) -> Case:
        return Case(loader=lambda: CombinedLoader([shuffled()(), loader(SAMPLES, batch_size)()], "min_size"))

    trace, root = interrupted(both(4), tmp_path / "run", tmp_path / "1", 1, 3)
    with pytest.raises(MismatchError, match="batch_size"):
        fit(both(3), [resumer(root, data="continue")], ckpt_path="auto", seed=7)
    resumed = fit(both(3), [resumer(root, data="restart_epoch")], ckpt_path="auto", seed=7)
    assert [entry[2] for entry in resumed.trace if entry[:2] == ("train", 1)] == list(range(6))
    first = [entry[4][0] for entry in trace if entry[:2] == ("train", 1)]
    assert [entry[4][0] for entry in resumed.trace if entry[:2] == ("train", 1)] == first


def test_an_unseeded_split_is_refused(tmp_path: Path) -> None:
    """For training and for validation: samples would change sides."""

    def halves() -> Case:
        train, val = random_split(Augmented(), [16, 8])
        return Case(
            loader=lambda: DataLoader(train, batch_size=4, shuffle=True),
            val=1.0,
            val_loader=lambda: DataLoader(val, batch_size=4),
        )

    torch.manual_seed(1)
    fit(halves(), every_batch(tmp_path))
    torch.manual_seed(2)
    with pytest.raises(MismatchError, match="split or order differs"):
        fit(halves(), [resumer(tmp_path)], ckpt_path="auto", seed=7)
