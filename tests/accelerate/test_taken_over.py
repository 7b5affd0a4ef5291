"""A cell with a training loop that has failed and is run again in the same process goes on at once, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import ClosedError
from ckpt_engine.snapshot import writer_link
from tests.accelerate.hf import train_hf
from tests.accelerate.runs import train_accelerate
from tests.loop.runs import Case, Outcome, every_boundary, saved, train_plain

FAILS_AT = 8


class Failing(list[Any]):
    """A trace of a run that fails in the middle of a step."""

    def append(self, entry: Any) -> None:
        super().append(entry)
        if len(self) == FAILS_AT:
            raise ZeroDivisionError


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that would have to wait for the lease fails at once."""
    monkeypatch.setattr(writer_link, "LEASE_WAIT_SECONDS", 0.0)


def a_trainer(case: Case, options: Any, **more: Any) -> Outcome:
    return train_hf({}, options, Path(str(case.extra["out"])), **more)


@pytest.mark.cells(1)
@pytest.mark.parametrize("train", [train_plain, train_accelerate, a_trainer])
def test_a_cell_that_failed_is_run_again(
    train: Callable[..., Outcome], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While its traceback keeps model, loaders, trackers and hooks of the first run alive."""
    case = Case(extra={"out": tmp_path / "out"} if train is a_trainer else {}, epochs=3)
    reference = train(case, None)
    options = every_boundary(tmp_path / "run")
    with pytest.raises(ZeroDivisionError) as kept:
        train(case, options, trace=Failing())
    newest = saved(tmp_path / "run")[-1].step
    resumed = train(case, options, seed=77)
    closes_itself = train is a_trainer
    assert ("was not closed; what it has in flight becomes durable" in caplog.text) != closes_itself
    assert 0 < len(resumed.trace) < len(reference.trace)
    assert resumed.trace == reference.trace[len(reference.trace) - len(resumed.trace) :]
    assert resumed.digest == reference.digest
    assert newest < saved(tmp_path / "run")[-1].step
    assert kept.tb is not None


def test_a_tracked_loop_that_lost_its_run_says_so(tmp_path: Path) -> None:
    """Two of them by mistake: the older one takes no snapshots, changes nothing of the newer one's, and says so."""
    made = []
    for _ in range(2):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ckpt = Checkpointer(tmp_path, every_n_steps=1, writer="thread")
        made.append((model, optimizer, ckpt.track(model=model, optimizer=optimizer)))
    older, newer = made

    def step(model: Any, optimizer: Any, run: Any) -> None:
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        run.step()

    step(*newer)
    with pytest.raises(ClosedError, match="newer Checkpointer of this process"):
        step(*older)
    step(*newer)
    newer[2].close()
    older[2].close()
    assert saved(tmp_path)[-1].step == 2
