"""Settings of a running loop: an edited file counts from the next step on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.config import live
from tests.loop.runs import LOADERS, Net, saved, seed_everything
from tests.support.files import replace_text

PATIENCE_SECONDS = 60.0


def test_an_edited_file_changes_a_loop_at_its_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is safe is used from there on, the rest refused with a reason."""
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.01)
    path = tmp_path / "ckpt.yaml"
    text = f"tiers: {tmp_path / 'run'}\nwriter: thread\nat_end: false\nlazy: off\nkeep: {{last: 100}}\n"
    path.write_text(text + "every_n_steps: 1000\n")
    seed_everything(0)
    model, loader = Net(), LOADERS["shuffled"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Checkpointer(path) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for _ in range(run.epoch, 2):
            for x, y, _ids in loader:
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert ckpt.wait(30)
                if run.global_step == 3:
                    replace_text(path, text + "every_n_steps: 2\nslots: 5\n")
                    deadline = time.monotonic() + PATIENCE_SECONDS
                    assert ckpt.engine.live is not None
                    while not ckpt.engine.live._found:
                        assert time.monotonic() < deadline
                        time.sleep(0.005)
    steps = [one.step for one in saved(tmp_path / "run")]
    assert steps[0] == 4 and len(steps) >= 3  # the one of the last step of an epoch comes a step later
    assert f"{path}: every_n_steps: 1000 -> 2; not in a running job: slots; start it again for that" in caplog.text


def test_what_no_loop_can_judge_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A plain loop gets a warning for `guard`, as it never asks the guard."""
    model, loader = Net(), LOADERS["shuffled"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Checkpointer(tmp_path / "run", writer="thread", guard="nan") as ckpt:
        ckpt.track(model=model, optimizer=optimizer, loader=loader)
    assert "`guard` and `rollback` work with Lightning only" in caplog.text
