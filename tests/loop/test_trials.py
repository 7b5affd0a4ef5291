"""A trial that its tuner ends early is no failure: Optuna prunes it by an exception, and Ray Tune by `sys.exit(0)`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import CLOSED, FAILED
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.attempts import read_attempts
from lightning_ckpt import AdaptiveCheckpoint


class OptunaError(Exception):
    """As the one of Optuna, which these tests run without: the engine knows it by its name."""


class TrialPruned(OptunaError):
    __module__ = "optuna.exceptions"


class Deeper(TrialPruned):
    """As integrations of Optuna may have."""


class TrialPrunedElsewhere(Exception):
    """Another package's."""


TrialPrunedElsewhere.__name__ = TrialPrunedElsewhere.__qualname__ = "TrialPruned"
ENDS = [
    (TrialPruned(), CLOSED),
    (Deeper("epoch 2"), CLOSED),
    (SystemExit(0), CLOSED),
    (SystemExit(), CLOSED),
    (TrialPrunedElsewhere(), FAILED),
    (SystemExit(1), FAILED),
    (SystemExit("no"), FAILED),
    (OptunaError(), FAILED),
]
OPTIONS: dict[str, Any] = {"writer": "thread", "every_n_steps": 2}


def plain(root: Path, error: BaseException) -> None:
    """Ends in the third step."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.ones(16, 4), batch_size=2)  # type: ignore[arg-type]
    with Checkpointer(root, **OPTIONS) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for x in loader:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.global_step == 3:
                raise error


def lightning(root: Path, error: BaseException) -> None:
    class Ends(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise error

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    callbacks = [AdaptiveCheckpoint(root, **OPTIONS), Ends()]
    loader = DataLoader(torch.ones(16, 32), batch_size=2)  # type: ignore[arg-type]
    L.Trainer(max_epochs=1, enable_checkpointing=False, callbacks=callbacks, **quiet).fit(BoringModel(), loader)


@pytest.mark.cells(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [plain, lightning])
@pytest.mark.parametrize(("error", "end"), ENDS, ids=lambda one: repr(one))
def test_a_trial_that_is_ended_early_is_no_failure(
    train: Callable[[Path, BaseException], None],
    error: BaseException,
    end: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither in the record of attempts, by which failures are counted, nor as a warning; what is durable is said."""
    for name in ("ckpt_engine", "lightning_ckpt"):
        caplog.set_level(logging.INFO, name)
    with pytest.raises(type(error)) as raised:
        train(tmp_path, error)
    assert raised.value is error
    assert [one.end for one in read_attempts(LocalStorage(tmp_path)).attempts] == [end]
    (said,) = [one for one in caplog.records if one.getMessage().startswith(f"{type(error).__name__}: ")]
    assert "is durable" in said.getMessage()
    assert said.levelno == (logging.INFO if end == CLOSED else logging.WARNING)
    assert [one.step for one in Checkpointer(tmp_path).snapshots()][-1] >= 2
