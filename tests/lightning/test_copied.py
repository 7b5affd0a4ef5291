"""Callbacks that are copied while they run: the copies have the same options and have not begun."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_ckpt import AdaptiveCheckpoint
from lightning_ckpt.callback import FenceGuard
from tests.lightning.runs import Case, fit

HOOKS = ("on_fit_start", "on_train_batch_start")


class _Pickler(pickle.Pickler):
    """Leaves out the signal handlers of the test runner and of torch's loader, which trainers remember."""

    def reducer_override(self, value: Any) -> Any:
        return (str, ()) if getattr(value, "__qualname__", "").endswith("<locals>.handler") else NotImplemented


def dumped(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.deepcopy,
    "pickle": lambda callbacks: pickle.loads(dumped(callbacks)),
}


class Copying(Callback):
    """Copies all others at one hook, once."""

    def __init__(self, hook: str, make: Callable[[Any], Any]) -> None:
        self.copies: list[Callback] = []
        self._make = make
        setattr(self, hook, self._at)

    def _at(self, trainer: Any, *_: Any) -> None:
        if not self.copies:
            self.copies = self._make([one for one in trainer.callbacks if one is not self])


@pytest.mark.long
@pytest.mark.parametrize("hook", HOOKS)
def test_a_copy_of_all_callbacks_is_one_that_has_not_begun(hook: str, tmp_path: Path) -> None:
    """As Lightning's own tests copy `trainer.callbacks`; the copies take another run's snapshots."""
    for name, make in COPIES.items():
        ckpt = AdaptiveCheckpoint(str(tmp_path / name), every_n_steps=2, keep={"last": 3}, writer="thread")
        copying = Copying(hook, make)
        first = fit(Case(), [ckpt, copying], max_epochs=1)
        copied = next(one for one in copying.copies if isinstance(one, AdaptiveCheckpoint))
        assert copied is not ckpt
        assert copied.config == ckpt.config
        assert copied._run is None
        assert any(isinstance(one, FenceGuard) for one in copying.copies)
        # A second trainer with all the copies, the guard's too, continues the run.
        second = fit(Case(), copying.copies, max_epochs=2, ckpt_path="auto", seed=1)
        assert second.trainer.global_step == 2 * first.trainer.global_step
        assert [type(one) for one in second.trainer.callbacks if isinstance(one, AdaptiveCheckpoint)]


class CopiesTrainer(Callback):
    """Copies the trainer and what it holds at one hook, in the last epoch."""

    def __init__(self, hook: str, make: Callable[[Any], Any]) -> None:
        self.found: dict[str, Any] = {}
        self._make = make
        setattr(self, hook, self._at)

    def __reduce__(self) -> Any:
        return Callback, ()

    def _at(self, trainer: Any, module: Any, *_: Any) -> None:
        held = {
            "trainer": trainer,
            "module": module,
            "optimizers": trainer.optimizers,
            "loader": trainer.train_dataloader,
            "others": [one for one in trainer.callbacks if not isinstance(one, AdaptiveCheckpoint | FenceGuard)],
        }
        self.found |= {name: self._make(one) for name, one in held.items()}


@pytest.mark.cells(1)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_trainer_are_plain(hook: str, way: str, tmp_path: Path) -> None:
    """Of all that a resumed run has taken over; a copied trainer fits like any other."""
    first = [AdaptiveCheckpoint(str(tmp_path / "run"), every_n_steps=2, writer="thread"), ModelCheckpoint(tmp_path)]
    case = Case(trainer={"enable_checkpointing": True})
    fit(case, first, max_epochs=1)
    copying = CopiesTrainer(hook, COPIES[way])
    again = [AdaptiveCheckpoint(str(tmp_path / "run"), writer="thread"), ModelCheckpoint(tmp_path), copying]
    fit(case, again, max_epochs=2, ckpt_path="auto")
    found = copying.found
    assert found.keys() >= {"trainer", "loader"}
    trainer = found.pop("trainer")
    for owner, method in (
        (trainer.fit_loop, "on_advance_start"),
        (trainer.fit_loop.epoch_loop, "advance"),
        (trainer._checkpoint_connector, "resume_start"),
        (trainer.strategy, "process_dataloader"),
    ):
        taken = getattr(owner, method)
        assert (taken.__self__, taken.__func__) == (owner, getattr(type(owner), method))
    assert type(trainer._signal_connector).__qualname__ == "_SignalConnector"
    for name, one in found.items():
        assert not re.search(rb"(ckpt_engine|lightning_ckpt)\W", dumped(one)), name


def test_copying_changes_nothing_of_the_run(tmp_path: Path) -> None:
    """The run ends as one whose callbacks are not copied."""
    ckpt = AdaptiveCheckpoint(str(tmp_path), every_n_steps=2, writer="thread")
    copying = Copying("on_train_batch_start", copy.deepcopy)
    assert fit(Case(), [ckpt, copying]).digest == fit(Case()).digest
