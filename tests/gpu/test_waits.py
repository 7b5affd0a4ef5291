"""A snapshot of a fit does not make the host wait for the device, whatever the module keeps there."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ckpt import AdaptiveCheckpoint

pytestmark = pytest.mark.gpu

OURS = ("/ckpt_engine/", "/lightning_ckpt/")
STEPS, READING_LOOKS = 64, 8
"""Snapshots at every step; the looks of the audit that read the device are those of the powers of two."""


class Module(pl.LightningModule):
    """Logs what it averages on the device, and keeps tensors there that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.Linear(64, 4))
        self.register_buffer("mask", torch.ones(16), persistent=False)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.loss = nn.functional.cross_entropy(self.net(x * self.mask), y)
        self.seen += 1
        self.log("loss", self.loss, on_step=False, on_epoch=True)
        return self.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@contextmanager
def watched(found: list[str]) -> Iterator[None]:
    """Collects our innermost line of every call that makes the host wait."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        lines = [one for one in traceback.extract_stack()[:-1] if not one.filename.endswith("warnings.py")]
        if "synchroniz" in str(message) and lines and any(folder in lines[-1].filename for folder in OURS):
            found.append(f"{lines[-1].filename}:{lines[-1].lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_only_few_looks_of_the_audit_wait_for_the_device(tmp_path: Path) -> None:
    """The others tell by a tensor's version whether it has moved; what has moved crosses behind training."""
    draw = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(4 * STEPS, 16, generator=draw), torch.randint(4, (4 * STEPS,), generator=draw))
    callback = AdaptiveCheckpoint({"tiers": [str(tmp_path)], "every_n_steps": 1})
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="gpu", devices=1, callbacks=[callback], **quiet)
    waits: list[str] = []
    with watched(waits):
        trainer.fit(Module(), DataLoader(data, batch_size=4))
    per_look = len(set(waits))
    assert len(waits) <= READING_LOOKS * 3 * max(1, per_look), sorted(set(waits))
    assert not [line for line in waits if "capture.py" in line]
