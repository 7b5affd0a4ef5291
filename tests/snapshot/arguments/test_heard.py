"""What fails after `save` has returned is heard: an event, a line in the log and the handle's error, each once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import SnapshotFailedError, StateError
from ckpt_engine.observe.events import FanOutSink, SnapshotFailed
from ckpt_engine.snapshot.copying import CopyByAddress
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.writer.launch import ThreadWriter
from tests.support.heard import Heard

WAIT_SECONDS = 60.0


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a fault of ours")


def recursion(*_: Any, **__: Any) -> Any:
    raise RecursionError("too deep")


def full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


FAULTS = {
    "while it is handed over": (ThreadWriter, "_send", broken),
    "while it is encoded": (ThreadWriter, "_send", recursion),
    "while it is written": (Disk, "write", full),
}


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_failure_after_the_call_is_heard_once(
    tmp_path: Path,
    fault: tuple[Any, str, Any],
    on_error: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Wherever it happens, under both policies; the next good snapshot is durable."""
    heard = Heard()
    with Checkpointer(tmp_path, writer="thread", on_error=on_error) as ckpt:
        ckpt.engine.events = FanOutSink(ckpt.engine.events, heard)
        state = {"w": torch.ones(10)}
        ckpt.save(state, step=1, lazy=everything).wait(WAIT_SECONDS)
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(*fault)
            handle = ckpt.save(state, step=2, lazy=everything)
            with pytest.raises(SnapshotFailedError):
                handle.wait(WAIT_SECONDS)
            ckpt.engine.poll()
        failed = [event for event in heard.events if isinstance(event, SnapshotFailed)]
        assert [event.step for event in failed] == [2]
        assert [record.getMessage().startswith("step 2: ") for record in caplog.records] == [True]
        assert handle.error is not None and handle.error.message in caplog.text
        ckpt.save(state, step=3).wait(WAIT_SECONDS)


def test_a_copy_that_fails_is_raised_by_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, under every policy; it costs no slot, and the next good snapshot is durable."""
    heard = Heard()
    with Checkpointer(tmp_path, writer="thread", slots=1, on_error="raise") as ckpt:
        ckpt.engine.events = FanOutSink(ckpt.engine.events, heard)
        state = {"w": torch.ones(10)}
        for step in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(CopyByAddress, "run", broken)
                with pytest.raises(StateError, match="staging failed"):
                    ckpt.save(state, step=step)
        ckpt.save(state, step=3).wait(WAIT_SECONDS)
    assert not [event for event in heard.events if isinstance(event, SnapshotFailed)]


def test_what_fails_in_the_call_costs_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again; then there is room for a good one."""
    with Checkpointer(tmp_path, writer="thread", slots=1) as ckpt:
        ckpt.save({"w": torch.ones(10)}, step=1).wait(WAIT_SECONDS)
        for count in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(ThreadWriter, "_send", broken)
                with pytest.raises(SnapshotFailedError, match="a fault of ours"):
                    ckpt.save({"other": [torch.ones(10)] * (count + 1)}, step=2).wait(WAIT_SECONDS)
            assert ckpt.engine.ready() and ckpt.wait(WAIT_SECONDS)
        ckpt.save({"w": torch.ones(10)}, step=3).wait(WAIT_SECONDS)


def everything(path: tuple[Any, ...]) -> bool:
    return True
