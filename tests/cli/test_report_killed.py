"""`ckpt report` of a run that is killed, and whose retention keeps one snapshot."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import interpreters

Ckpt = Callable[..., Any]
KILLS = (67, 118, 0)
SCRIPT = """
import os, signal, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from ckpt_engine.checkpointer import Checkpointer

root, far, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(320, 4)), 8, shuffle=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Checkpointer(tiers=[root, far], every_n_steps=10, keep={"last": 1}) as ckpt:
    run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
    for _ in range(run.epoch, 4):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.wait(60.0)
            if run.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 160 steps that was killed at steps 67 and 118, and keeps its newest snapshot."""
    folder = tmp_path_factory.mktemp("killed")
    for kill_at in KILLS:
        process = interpreters.Popen([sys.executable, "-c", SCRIPT, folder / "run", folder / "far", str(kill_at)])
        assert process.wait() == (-signal.SIGKILL if kill_at else 0)
    return folder / "run"


@pytest.mark.long
def test_each_attempt_has_its_steps_its_cost_and_its_proof(ckpt: Ckpt, killed: Path) -> None:
    """Retention has removed the snapshots that they resumed from; the record of attempts knows them."""
    found = ckpt("report", killed, "--json").json
    lives = found["lives"]
    there = [one["step"] for one in found["snapshots"]]  # one before the last stays if it was still being copied
    assert there[-1] == 160 and {60, 110}.isdisjoint(there)
    steps = [(one["resumed"], one["step"], one["lost_steps"]) for one in lives]
    assert steps == [(0, 66, 6), (60, 117, 7), (110, 160, None)], "the last step of each is cut off"
    assert [one["failed"] for one in lives] == [True, True, False]
    assert all(one["lost_seconds"] > 0.0 for one in lives[:2]) and lives[2]["lost_seconds"] is None
    assert [one["proof"].partition(" repeated")[0] for one in lives] == [
        "", "resume proved exact: 7 of 7", "resume proved exact: 8 of 8",
    ]  # fmt: skip
    assert found["overhead"] > 0.0 and found["budget"] is None, "every_n_steps has no budget"
    assert [one["url"] for one in found["unasked"]] == [f"file://{killed.parent / 'far'}"]


def test_the_curve_has_no_gap(ckpt: Ckpt, killed: Path, tmp_path: Path) -> None:
    """The line of each attempt begins at the height where the dashed line of the failure before it ends."""
    ckpt("report", killed, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    lines = [line.split() for line in re.findall(r'<polyline class="path" points="([^"]*)"', text)]
    back = re.findall(r'<path class="back" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', text)
    assert len(lines) == 3 and all(len(line) >= 2 for line in lines) and len(back) == 2
    for before, later, (x, y, _, later_y) in zip(lines, lines[1:], back, strict=False):
        assert before[-1] == f"{x},{y}", "the failure is at the end of its line"
        assert later[0].split(",")[1] == later_y, "and the next line begins where it resumed"
    assert "6 steps done again, " in text and "resume proved exact: 8 of 8" in text
    assert "no budget is set" in text
    assert str(killed.parent / "far") in text and "not asked: name the ckpt.yaml" in text
    assert "file://" not in text
