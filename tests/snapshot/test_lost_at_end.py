"""A run whose last state is durable nowhere does not end with status 0, and says what is lost; nothing else ends it."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine import Checkpointer
from ckpt_engine.errors import SnapshotFailedError
from ckpt_engine.observe.events import Requested
from ckpt_engine.store.storage.disk import Disk

STATE = {"w": torch.ones(10)}
LOST = r"CKPT602\] step 3 is lost, its state is durable nowhere, step 1 is the newest: .*`on_error: raise` stops"


@pytest.fixture(params=[errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Called with True no data can be written any more, and with False it can again."""
    error = OSError(request.param, os.strerror(request.param))

    def write(*_: Any) -> Any:
        raise error

    real = Disk.write
    return lambda on: monkeypatch.setattr(Disk, "write", write if on else real)


def _train(ckpt: Checkpointer, broken: Any) -> None:
    ckpt.save(STATE, step=1).wait(60)
    broken(True)
    for step in (2, 3):
        ckpt.save(STATE, step=step)
        ckpt.wait(60)


def test_the_end_raises_what_is_lost(tmp_path: Path, broken: Any) -> None:
    """At the end, not in the middle; with its cause, and with the option that stops training earlier."""
    with pytest.raises(SnapshotFailedError, match=LOST) as caught, Checkpointer(tmp_path, writer="thread") as ckpt:
        _train(ckpt, broken)
    assert caught.value.__cause__ is not None
    assert ckpt.engine.tenure.closed


def test_warn_ends_with_a_line_that_begins_with_what_is_lost(
    tmp_path: Path, broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the last one of the log, and an error."""
    with Checkpointer(tmp_path, writer="thread", on_error="warn") as ckpt:
        _train(ckpt, broken)
    last = caplog.records[-1]
    assert last.levelno == logging.ERROR and last.getMessage().startswith("[CKPT602] step 3 is lost")


@pytest.mark.parametrize("how", ["with", "finally"])
def test_an_exception_of_the_user_is_not_masked(
    tmp_path: Path, broken: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own exception ends the run; what is lost is in the log."""
    with pytest.raises(ZeroDivisionError):
        if how == "with":
            with Checkpointer(tmp_path, writer="thread") as ckpt:
                _train(ckpt, broken)
                raise ZeroDivisionError
        ckpt = Checkpointer(tmp_path, writer="thread")
        try:
            _train(ckpt, broken)
            raise ZeroDivisionError
        finally:
            ckpt.close()
    assert "step 3 is lost" in caplog.text


def test_a_later_snapshot_that_is_durable_makes_up_for_it(tmp_path: Path, broken: Any) -> None:
    """Only the last state counts."""
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        _train(ckpt, broken)
        broken(False)
        ckpt.save(STATE, step=4)


def test_who_has_caught_it_from_the_handle_is_not_stopped_again(tmp_path: Path, broken: Any) -> None:
    """`wait` has raised it: what follows is the script's own decision."""
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        ckpt.save(STATE, step=1).wait(60)
        broken(True)
        with pytest.raises(SnapshotFailedError):
            ckpt.save(STATE, step=2).wait(60)


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_lost_folder_is_one_way_to_lose_it(tmp_path: Path, writer: Any) -> None:
    """The place is another run's by now."""
    root, other = tmp_path / "run", tmp_path / "other"
    with Checkpointer(other, writer="thread") as ckpt:
        ckpt.save(STATE, step=7)
    with (
        pytest.raises(SnapshotFailedError, match=r"step 2 is lost.*another run"),
        Checkpointer(root, writer=writer) as ckpt,
    ):
        ckpt.save(STATE, step=1).wait(60)
        root.rename(tmp_path / "moved")
        other.rename(root)
        ckpt.save(STATE, step=2)


def test_a_further_tier_that_has_it_is_enough(tmp_path: Path) -> None:
    """The nearest one is another run's; the state goes to the next, and nothing is lost."""
    near, far, other = tmp_path / "near", tmp_path / "far", tmp_path / "other"
    with Checkpointer(other, writer="thread") as ckpt:
        ckpt.save(STATE, step=7)
    with Checkpointer({"tiers": [str(near), str(far)]}, writer="thread") as ckpt:
        ckpt.save(STATE, step=1).wait(60)
        near.rename(tmp_path / "moved")
        other.rename(near)
        ckpt.save(STATE, step=2).wait(60)
    assert Checkpointer(far).snapshots()[-1].step == 2


@pytest.mark.cells(3)
@pytest.mark.parametrize(("on_error", "is_full", "status"), [(None, True, 1), ("warn", True, 0), (None, False, 0)])
def test_a_run_that_was_asked_to_stop_ends_with_another_status(
    tmp_path: Path, broken: Any, on_error: Any, is_full: bool, status: int
) -> None:
    """`ckpt stop` ends it with 0, but not where the snapshot that it takes then is lost."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2))
    with (
        pytest.raises(SystemExit) as caught,
        Checkpointer(tmp_path, writer="thread", on_error=on_error, every_n_steps=1000) as ckpt,
    ):
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
            if run.global_step == 2:
                broken(is_full)
                ckpt.engine.events.emit(Requested("stop", "somebody"))
    assert caught.value.code == status


@pytest.mark.parametrize("on_error", [None, "warn"])
def test_a_tracked_loop_ends_with_it(
    tmp_path: Path, broken: Any, on_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its final snapshot fails; the line about the run says how far the newest one is behind."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2))

    def train() -> None:
        with Checkpointer(tmp_path, writer="thread", on_error=on_error, every_n_steps=1000) as ckpt:
            run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
            for _ in range(run.epoch, 1):
                broken(True)
                for batch in loader:
                    model(batch).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()

    if on_error == "warn":
        train()
        assert caplog.records[-1].getMessage().startswith("[CKPT602] step 4 is lost")
    else:
        with pytest.raises(SnapshotFailedError, match="step 4 is lost, its state is durable nowhere, no snapshot is"):
            train()
