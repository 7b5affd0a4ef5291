"""A `transformers.Trainer` that is resumed with changes is the one in which they are made by hand, and once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from ckpt_engine.data import rng
from ckpt_engine.errors import CkptError
from tests.accelerate import hf
from tests.accelerate.hf import SAMPLES, train_hf
from tests.loop.runs import Outcome, every_boundary, only, report, resume_only, saved, seed_everything

AT, SEED = 3, 11
"""The change is made after so many steps; the seed of the process that makes it."""
BATCHES, EVEN = 6, 4
NORM = "transformer.ln_f"
CONSTANT = {"lr_scheduler_type": "constant"}
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


def killed(tmp_path: Path, at: int = AT, **arguments: Any) -> tuple[Path, dict[str, Any]]:
    """The folder of a run that was killed after `AT` steps, and its states then."""
    found: dict[str, Any] = {}

    def look(model: Any, optimizer: Any) -> None:
        found.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))

    run(tmp_path, every_boundary(tmp_path / "run"), 0, ByHand(look), **arguments)
    snapshot = next(one for one in saved(tmp_path / "run") if one.step == at and one.reason != "end")
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
        resumed = run(tmp_path, resume_only(again, **options), SEED + number, **arguments)
        assert resumed.trace
        assert resumed.trace == expected.trace[len(expected.trace) - len(resumed.trace) :], number
        assert resumed.digest == expected.digest, number
        assert report(again).changes == ()
    return told


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_a_part_of_another_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run continues with `strict: no`; the part is the new script's, and has no moments."""
    folder, _ = killed(tmp_path)
    made = hf.GPT2LMHeadModel

    def wider(config: Any) -> Any:
        config.n_positions *= 2
        return made(config)

    def replace(model: Any, optimizer: Any) -> None:
        streams, old = rng.capture(), model.transformer.wpe
        seed_everything(SEED)
        model.transformer.wpe = wider(copy.deepcopy(model.config)).transformer.wpe
        rng.restore(streams)
        optimizer.state.pop(old.weight)
        for group in optimizer.param_groups:
            group["params"] = [model.transformer.wpe.weight if one is old.weight else one for one in group["params"]]

    expected = run(tmp_path, None, 0, ByHand(replace))
    monkeypatch.setattr(hf, "GPT2LMHeadModel", wider)
    told = assert_branch(tmp_path, folder, {"strict": False}, expected)
    assert [one.name for one in told.changes] == ["model.transformer.wpe.weight"]


@pytest.mark.long
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


@pytest.mark.long
def test_fresh_random_streams(tmp_path: Path) -> None:
    """From the next batch on."""
    folder, _ = killed(tmp_path)

    def draw(*_: Any) -> None:
        seed_everything(77)

    expected = run(tmp_path, None, 0, ByHand(draw))
    assert_branch(tmp_path, folder, {"skip": "rng"}, expected, ByHand(draw, first=True))
    assert rng.capture()


@pytest.mark.long
def test_more_epochs(tmp_path: Path) -> None:
    """A run that ended continues, without a section, and so it does after two kills."""
    longer = {**CONSTANT, "num_train_epochs": 3}
    run(tmp_path, every_boundary(tmp_path / "run"), 0, **CONSTANT)
    expected = run(tmp_path, None, 0, **longer)
    assert_continues(tmp_path, tmp_path / "run", {}, expected, 3 * BATCHES, **longer)


class Rebatched:
    """By hand: a trainer's loader that fetches all that is not trained after `AT` steps again, in batches of another
    size, and so on in the epochs after it."""

    def __init__(self, loader: Any, size: int) -> None:
        self.loader, self.size, self.order, self.passes = loader, size, list[int](), 0
        self.sampler = loader.batch_sampler.sampler
        loader.batch_sampler.sampler = self._recorded()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """As many as an epoch has at most; the trainer leaves out steps without a batch."""
        return max(BATCHES, -(-SAMPLES // self.size))

    def _recorded(self) -> Iterator[int]:
        for index in self.sampler:
            self.order.append(index)
            yield index

    def __iter__(self) -> Iterator[Any]:
        if not self.order:
            batches, before = iter(self.loader), AT * self.loader.batch_sampler.batch_size
            yield from itertools.islice(batches, AT)
            left = [*self.order[before:], *self.loader.batch_sampler.sampler]
            self.loader.batch_sampler.sampler, self.loader.batch_sampler.batch_size = self.sampler, self.size
            chunks = (left[at : at + self.size] for at in range(0, len(left), self.size))
            again = (self.loader.collate_fn([self.loader.dataset[index] for index in one]) for one in chunks)
            yield from (one for one, _ in itertools.pairwise(itertools.chain(again, [None])))  # one ahead
        else:
            yield from self.loader


@pytest.mark.long
@pytest.mark.parametrize("batch", [3, 8])
def test_another_batch_size(batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the epoch comes in batches of this size, and the trainer counts as if all had had it."""
    folder, _ = killed(tmp_path, **CONSTANT)
    changed = {**CONSTANT, "per_device_train_batch_size": batch}
    usual = Trainer.get_train_dataloader
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "get_train_dataloader", lambda trainer: Rebatched(usual(trainer), batch))
        expected = run(tmp_path, None, 0, **CONSTANT)
    told = assert_continues(tmp_path, folder, {"data": "continue"}, expected, 2 * -(-SAMPLES // batch), **changed)
    assert {"count of steps", "position of 'loader', a DataLoaderShard"} <= {one.name for one in told.not_restored}


class Accumulate(TrainerCallback):  # type: ignore[misc]
    """Makes steps of two batches after so many of one."""

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step == EVEN:
            args.gradient_accumulation_steps = 2


@pytest.mark.long
def test_another_accumulation(tmp_path: Path) -> None:
    """The trainer counts the steps as with this accumulation from its start."""
    folder, _ = killed(tmp_path, at=EVEN, **CONSTANT)
    expected = run(tmp_path, None, 0, Accumulate(), **CONSTANT)
    changed = {**CONSTANT, "gradient_accumulation_steps": 2}
    told = assert_continues(tmp_path, folder, {"data": "continue"}, expected, BATCHES, **changed)
    assert "count of steps" in {one.name for one in told.not_restored}


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "error"), [({}, "gradient_accumulation_steps"), ({"data": "continue"}, "whole number")]
)
def test_an_accumulation_that_cannot_be_counted_is_refused(options: Any, error: str, tmp_path: Path) -> None:
    """Three batches of the epoch are left; without the option nothing is guessed."""
    folder, _ = killed(tmp_path)
    with pytest.raises(CkptError, match=error) as caught:
        run(tmp_path, every_boundary(folder, **options), SEED, gradient_accumulation_steps=2)
    assert "data: " in str(caught.value.hint)


def assert_continues(
    tmp_path: Path, folder: Path, options: Any, expected: Outcome, steps: int, **arguments: Any
) -> Any:
    """Resume with other arguments, and with the same ones after two kills; the trainer counts so many steps then."""
    wanted = [one for one in expected.trace if one[0] == "train"]
    before = len(saved(folder))
    first = run(tmp_path, every_boundary(folder, **options), SEED, **arguments)
    trained = [one for one in first.trace if one[0] == "train"]
    assert trained == wanted[len(wanted) - len(trained) :]
    assert first.digest["weights"] == expected.digest["weights"]
    assert first.digest["history"].endswith(f"'epoch': {arguments.get('num_train_epochs', 2)}.0, 'step': {steps}}}]")
    branch = [one for one in saved(folder)[before:] if one.reason != "end"]
    for number, kill in enumerate((branch[0], branch[len(branch) // 2])):
        again = only(folder, kill, tmp_path / f"kill {number}")
        resumed = run(tmp_path, resume_only(again, **options), SEED + number, **arguments)
        assert resumed.trace == first.trace[len(first.trace) - len(resumed.trace) :], number
        assert resumed.digest == first.digest, number
        assert report(again).not_restored == ()
    return report(folder)
