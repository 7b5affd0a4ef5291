"""Nothing changes a lazily copied tensor before its copy is complete, in loops that do not announce their steps."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer
from ckpt_engine.errors import CkptError, ClosedError
from ckpt_engine.snapshot.copying import CopyTasks
from ckpt_engine.snapshot.step_fence import StepFence
from tests.loop.runs import Case, every_boundary, saved, train_plain
from tests.support.delayed_devices import Instants, delay_copies, record_instants


@pytest.fixture
def instants(monkeypatch: pytest.MonkeyPatch) -> Instants:
    """Of a run on a device whose copies are delayed until a fence waits for them."""
    delay_copies(monkeypatch)
    return record_instants(monkeypatch)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_snapshot_is_torn(accumulate: int, tmp_path: Path, instants: Instants) -> None:
    """The fence comes before each step of an optimizer."""
    case = Case(accumulate=accumulate)
    watched = train_plain(case, every_boundary(tmp_path, every_n_steps=2, on_error="raise"))
    assert watched == train_plain(case, None)
    assert len(saved(tmp_path)) >= 2 and instants.torn(tmp_path) == []


@pytest.mark.usefixtures("instants")
def test_a_missing_fence_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fence at optimizer steps the same run fails, so the test above can."""
    monkeypatch.setattr(StepFence, "install", lambda fence: None)
    with pytest.raises(CkptError, match="changed while it was copied"):
        train_plain(Case(evaluation=None), every_boundary(tmp_path, every_n_steps=2, on_error="raise"))


def test_a_fork_waits_for_no_copy_and_takes_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that copy are not in it: the fence is the parent's, and so is each boundary."""
    parent, finish = os.getpid(), CopyTasks.finish

    def finish_in_parent(tasks: CopyTasks) -> None:
        assert os.getpid() == parent, "in a fork, a copy that a thread has begun never ends"
        finish(tasks)

    monkeypatch.setattr(CopyTasks, "finish", finish_in_parent)
    model, loader = nn.Linear(8, 1), DataLoader(TensorDataset(torch.ones(4, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def child() -> None:
        optimizer.step()
        assert len(list(loader)) == 4
        with pytest.raises(ClosedError, match="is a fork of the one that takes the snapshots"):
            ckpt.save({}, step=9)
        ckpt.close()

    with Checkpointer(tmp_path, writer="thread", every_n_steps=1) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for step, (x,) in enumerate(loader):
            model(x).sum().backward()
            if step == 2:
                assert exit_status_of_fork(child) == 0
            optimizer.step()
    assert ckpt.snapshots()[-1].step == 4


def exit_status_of_fork(action: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            action()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child of a test never returns into it
            traceback.print_exc(file=sys.stderr)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
