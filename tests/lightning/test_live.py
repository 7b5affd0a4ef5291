"""Settings of a running job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from ckpt_engine.config import live
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.runs import Case, fit, saved
from tests.support.files import replace_text

PATIENCE_SECONDS = 60.0


class Edit(Callback):
    """Edits the file before some batches, and waits until that was noticed."""

    def __init__(self, ckpt: AdaptiveCheckpoint, path: Path, texts: dict[int, str]) -> None:
        self.ckpt, self.path, self.texts = ckpt, path, texts

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        run = self.ckpt._run
        assert run is not None
        file = run.engine.live
        assert file is not None
        run.engine.before_update()
        assert run.engine.wait(30)
        if (text := self.texts.get(trainer.global_step)) is None:
            return
        replace_text(self.path, text)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not file._found:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_an_edited_file_changes_the_run_at_its_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is safe is used from there on, the rest refused with a reason; a broken file changes nothing."""
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.01)
    path = tmp_path / "ckpt.yaml"
    text = f"tiers: {tmp_path / 'run'}\nwriter: thread\nat_end: false\nkeep: {{last: 100}}\n"
    path.write_text(text + "every_n_steps: 8\n")
    ckpt = AdaptiveCheckpoint(path)
    texts = {9: text + "every_n_steps: 2\nslots: 5\n", 12: text + "every_n_steps: nothing\n"}
    fit(Case(), [ckpt, Edit(ckpt, path, texts)])
    assert [one.step for one in saved(tmp_path / "run")] == [8, 10, 12, 14, 16]
    assert f"{path}: every_n_steps: 8 -> 2; not in a running job: slots; start it again for that" in caplog.text
    assert "the edited options are not used" in caplog.text and "every_n_steps: must be a whole number" in caplog.text
