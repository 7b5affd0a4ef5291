"""A `transformers.Trainer` that is resumed with changes is the one in which they are made by hand, and once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from ckpt_engine.data import rng
from tests.accelerate.hf import train_hf
from tests.loop.runs import Outcome, every_boundary, only, report, saved, seed_everything

AT, SEED = 3, 11
"""The change is made after so many steps; the seed of the process that makes it."""
NORM = "transformer.ln_f"
Change = Callable[[Any, Any], None]


class ByHand(TrainerCallback):  # type: ignore[misc]
    """Makes a change after `AT` steps, or before the first one."""

    def __init__(self, change: Change, *, first: bool = False) -> None:
        self._call, self._first = lambda model, optimizer: change(model, optimizer), first

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._first:
            self._call(objects["model"], objects["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step == AT and not self._first:
            self._call(objects["model"], objects["optimizer"])


def run(tmp_path: Path, options: Any, seed: int = 0, *callbacks: TrainerCallback, **arguments: Any) -> Outcome:
    return train_hf({"num_train_epochs": 2, **arguments}, options, tmp_path / "out", seed=seed, more=callbacks)


def killed(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a run that was killed after `AT` steps, and its states then."""
    found: dict[str, Any] = {}

    def look(model: Any, optimizer: Any) -> None:
        found.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))

    run(tmp_path, every_boundary(tmp_path / "run"), 0, ByHand(look))
    snapshot = next(one for one in saved(tmp_path / "run") if one.step == AT and one.reason != "end")
    return only(tmp_path / "run", snapshot, tmp_path / "1"), found


def assert_branch(
    tmp_path: Path, folder: Path, section: Mapping[str, Any], expected: Outcome, *callbacks: Any, **arguments: Any
) -> Any:
    """Resume with the section, and with the same one after two kills."""
    options = {"resume": dict(section)}
    first = run(tmp_path, every_boundary(folder, **options), SEED, *callbacks, **arguments)
    assert first.trace == expected.trace[len(expected.trace) - len(first.trace) :]
    assert first.digest["weights"] == expected.digest["weights"]
    told = report(folder)
    assert told.replay is not None
    assert told.replay.why == "resumed with changes"
    branch = [one for one in saved(folder) if one.reason != "end"][1:]
    for number, kill in enumerate((branch[0], branch[len(branch) // 2])):
        again = only(folder, kill, tmp_path / f"kill {number}")
        resumed = run(tmp_path, every_boundary(again, **options), SEED + number, **arguments)
        assert resumed.trace
        assert resumed.trace == expected.trace[len(expected.trace) - len(resumed.trace) :], number
        assert resumed.digest == expected.digest, number
        assert report(again).changes == ()
    return told


@pytest.mark.parametrize("parts", [("model",), ("model", "optimizer")], ids=str)
def test_parts_begin_at_step_0_with_a_new_schedule(parts: tuple[str, ...], tmp_path: Path) -> None:
    """The trainer counts from 0, and its rate is that of the new schedule."""
    folder, found = killed(tmp_path)
    new = {"lr_scheduler_type": "cosine", "learning_rate": 3e-3}

    def load(model: Any, optimizer: Any) -> None:
        model.load_state_dict(found["model"])
        rates = [(group["lr"], group["initial_lr"]) for group in optimizer.param_groups]
        if "optimizer" in parts:
            optimizer.load_state_dict(found["optimizer"])
        for group, (rate, initial) in zip(optimizer.param_groups, rates, strict=True):
            group["lr"], group["initial_lr"] = rate, initial

    expected = run(tmp_path, None, SEED, ByHand(load, first=True), **new)
    told = assert_branch(tmp_path, folder, {"only": list(parts)}, expected, **new)
    assert told.step == 0


def test_a_part_of_the_model_that_is_new(tmp_path: Path) -> None:
    """The run continues, and the new part has no moments."""
    folder, _ = killed(tmp_path)
    names = [f"{NORM}.weight", f"{NORM}.bias"]

    def renew(model: Any, optimizer: Any) -> None:
        parameters = dict(model.named_parameters())
        for name in names:
            with torch.no_grad():
                parameters[name].fill_(float(name.endswith("weight")))
            optimizer.state.pop(parameters[name])

    expected = run(tmp_path, None, 0, ByHand(renew))
    told = assert_branch(tmp_path, folder, {"skip": [f"model.{NORM}"]}, expected)
    assert [one.name for one in told.changes] == [f"model.{name}" for name in names]


def test_an_overridden_value(tmp_path: Path) -> None:
    """The decay of weights changes."""
    folder, _ = killed(tmp_path)

    def change(_: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.3

    expected = run(tmp_path, None, 0, ByHand(change))
    section = {"override": {"optimizer.param_groups.*.weight_decay": 0.3}}
    told = assert_branch(tmp_path, folder, section, expected)
    assert {one.detail for one in told.changes} == {"0.0 becomes 0.3"}


def test_fresh_random_streams(tmp_path: Path) -> None:
    """From the next batch on."""
    folder, _ = killed(tmp_path)

    def draw(*_: Any) -> None:
        seed_everything(77)

    expected = run(tmp_path, None, 0, ByHand(draw))
    assert_branch(tmp_path, folder, {"skip": "rng"}, expected, ByHand(draw, first=True))
    assert rng.capture()


def test_more_epochs(tmp_path: Path) -> None:
    """A run that ended continues, without a section."""
    constant = {"lr_scheduler_type": "constant"}
    run(tmp_path, every_boundary(tmp_path / "run"), 0, **constant)
    longer = run(tmp_path, every_boundary(tmp_path / "run"), SEED, **{**constant, "num_train_epochs": 3})
    expected = run(tmp_path, None, 0, **{**constant, "num_train_epochs": 3})
    assert longer.trace == expected.trace[len(expected.trace) - len(longer.trace) :]
    assert longer.digest == expected.digest
