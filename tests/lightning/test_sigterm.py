"""A SIGTERM in the middle of training: the user's code sees it at once, Lightning's loops at the next boundary."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.runs import Case, fit, saved


class Signals(Callback):
    """Sends a SIGTERM at one hook, and notes what every later hook sees."""

    def __init__(self, hook: str) -> None:
        self.seen: list[tuple[str, bool]] = []
        self.trainer: Any = None
        for name in ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_end", "on_validation_end"):
            setattr(self, name, self._at(name, signals=name == hook))

    def _at(self, name: str, *, signals: bool) -> Any:
        def called(trainer: Any, *_: Any) -> None:
            self.trainer = trainer
            if trainer.sanity_checking or (not self.seen and not signals):
                return
            if signals and not self.seen:
                os.kill(os.getpid(), signal.SIGTERM)
            self.seen.append((name, trainer.received_sigterm))

        return called


@pytest.mark.cells(1)
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_batch_end"])
def test_the_trainer_has_received_it_from_then_on(hook: str, tmp_path: Path) -> None:
    """In every hook until the boundary, and after the fit; the validation that runs is not cut short."""
    signals = Signals(hook)
    ckpt = AdaptiveCheckpoint(str(tmp_path), every_n_steps=10**9, writer="thread")
    with pytest.raises(SIGTERMException):
        fit(Case(val=1), [signals, ckpt])
    assert signals.seen[-1] == ("on_validation_end", True)
    assert all(received for _, received in signals.seen)
    assert [name for name, _ in signals.seen].count("on_validation_batch_end") >= 1
    assert signals.trainer.received_sigterm
    assert [one.reason for one in saved(tmp_path)] == ["signal"]
    fit(Case(val=1), [AdaptiveCheckpoint(str(tmp_path), every_n_steps=10**9, writer="thread")], ckpt_path="auto")
    assert json.loads((tmp_path / "resume-report.json").read_text())["replay"]["why"] == "no step was repeated"


@pytest.mark.parametrize("hook", ["on_validation_batch_end", "on_sanity_check_end"])
def test_one_in_the_sanity_check_does_not_look_complete(
    hook: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning by itself ends with 0; at the check's end, one batch is trained and saved."""

    class Early(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name == hook:
                return lambda trainer, *_: os.kill(os.getpid(), signal.SIGTERM) if trainer.sanity_checking else None
            return super().__getattribute__(name)

    with pytest.raises(SIGTERMException) as ended:
        fit(Case(val=2), [Early(), AdaptiveCheckpoint(str(tmp_path), every_n_steps=10**9, writer="thread")])
    assert ended.value.code == 143
    steps = [one.step for one in saved(tmp_path)]
    assert steps == ([1] if hook == "on_sanity_check_end" else [])
    durable = "step 1 is durable on" if steps else "no snapshot is durable on"
    assert f"SIGTERM before the first step: training stops; {durable}" in caplog.text


def test_a_stop_that_only_lightning_knows_is_lightnings(tmp_path: Path) -> None:
    """Where the flag was set by somebody else, its loops see it as they do without us."""

    class Sets(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            trainer._signal_connector.received_sigterm = True
            self.trainer = trainer

    sets = Sets()
    with pytest.raises(SIGTERMException):
        fit(Case(), [sets, AdaptiveCheckpoint(str(tmp_path), every_n_steps=10**9, writer="thread")])
    assert sets.trainer.received_sigterm
    assert sets.trainer.global_step == 1


def test_the_next_fit_begins_without_it(tmp_path: Path) -> None:
    """The next `fit` has no signal noted, and the connector is of Lightning's own class again."""
    signals = Signals("on_train_batch_start")
    with pytest.raises(SIGTERMException):
        fit(Case(), [signals, AdaptiveCheckpoint(str(tmp_path), every_n_steps=10**9, writer="thread")])
    assert type(signals.trainer._signal_connector).__module__.startswith("lightning.")
    signals.trainer._signal_connector.register_signal_handlers()
    assert not signals.trainer.received_sigterm
    signals.trainer._signal_connector.teardown()
