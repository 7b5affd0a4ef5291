"""Each trainer ends with an error where its last state is durable nowhere, after all of its steps."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import SnapshotFailedError, StorageError
from ckpt_engine.snapshot.pipeline import Pipeline
from ckpt_engine.store.storage.disk import Disk
from tests.snapshot.arguments.loops import LOOPS, STEPS, Hooks


def _full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _refused(*_: Any) -> Any:
    raise StorageError("the writer does not start")


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "while it is written": (Disk, "write", _full),
    "in the call": (Pipeline, "save", _refused),
}


def _run(way: str, fault: str, on_error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that were trained; from the third on no snapshot becomes durable."""
    trained: list[int] = []

    def step(number: int, _: Any) -> None:
        trained.append(number)
        if number == STEPS - 1:
            monkeypatch.setattr(*FAULTS[fault])

    options = {"tiers": str(tmp_path / "run"), "writer": "thread", "every_n_steps": 1}
    try:
        LOOPS[way](options | ({} if on_error is None else {"on_error": on_error}), Hooks(step=step))
    except SnapshotFailedError as err:
        assert str(err).startswith(f"[CKPT602] step {STEPS} is lost, its state is durable nowhere")
        trained.append(-1)
    return trained


@pytest.mark.cells(2)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", LOOPS)
def test_the_end_of_training_raises_it(way: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one step earlier."""
    monkeypatch.chdir(tmp_path)
    assert _run(way, fault, None, tmp_path, monkeypatch) == [1, 2, 3, 4, -1]


@pytest.mark.cells(2)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", LOOPS)
def test_warn_only_says_it(
    way: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the last line."""
    monkeypatch.chdir(tmp_path)
    assert _run(way, fault, "warn", tmp_path, monkeypatch) == [1, 2, 3, 4]
    assert caplog.records[-1].getMessage().startswith(f"[CKPT602] step {STEPS} is lost")


@pytest.mark.parametrize("way", LOOPS)
def test_the_users_own_exception_ends_the_run(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is lost beside."""
    monkeypatch.chdir(tmp_path)

    def step(number: int, _: Any) -> None:
        monkeypatch.setattr(*FAULTS["while it is written"])
        if number == STEPS:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        LOOPS[way]({"tiers": str(tmp_path / "run"), "writer": "thread", "every_n_steps": 1}, Hooks(step=step))
