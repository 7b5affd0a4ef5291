"""`ckpt status` of a run that is being trained on this machine: its writer is asked, with one tier too."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Engine
from ckpt_engine.tools import live_run
from tests.writer.staged import WAIT_SECONDS
from tests.writer.test_memory import attached, logged, trainer
from tests.writer.test_memory_ends import until

Ckpt = Callable[..., Any]


def test_the_writer_says_what_it_has_in_memory(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the trainer lives, and after it was killed; nothing needs to be durable yet."""
    monkeypatch.setattr(live_run, "LIVE_SECONDS", 60.0)  # a busy machine is no writer that hangs
    root = tmp_path / "run"
    with trainer(root, "wait") as process:
        until("kept", process, root)
        writer = logged(root)["writer"]
        deadline = time.monotonic() + WAIT_SECONDS
        while "in memory" not in (done := ckpt("status", root)).out:  # it is sent, and the writer may not have read it
            assert done.code == 0, done.err
            assert time.monotonic() < deadline, done.out
        line = done.out.splitlines()[-1]
        assert line.startswith(f"its writer is process {writer}; its trainer lives; step 1 is in memory, not durable")
        live = ckpt("status", root, "--json").json["live"]
        assert (live["pid"], live["trainer"], live["held_step"], live["held_durable"]) == (writer, True, 1, False)
        assert live["held_age_seconds"] >= 0.0
    place = attached(root)
    assert "its trainer is gone; step 1 is in memory" in ckpt("status", root).out
    place.release()


def test_the_writer_says_how_often_snapshots_are_taken_and_why(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the cadence has said with the newest snapshot."""
    monkeypatch.setattr(live_run, "LIVE_SECONDS", 60.0)
    root = tmp_path / "run"
    engine = Engine(root)
    pace = {"interval_steps": 38, "why": "every 38 steps: set by budget", "far_seconds": None}
    engine.paced_by(lambda: pace)
    engine.save({"weights": torch.zeros(3)}, step=1).wait(60.0)
    assert ckpt("status", root).out.splitlines()[-1] == "snapshots every 38 steps: set by budget"
    live = ckpt("status", root, "--json").json["live"]
    assert (live["interval_steps"], live["why"]) == (38, "every 38 steps: set by budget")
    engine.close()
