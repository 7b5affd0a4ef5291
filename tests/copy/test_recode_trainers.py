"""Steps of Adam are found in what each trainer stores: Lightning, and Accelerate with its own layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.copy.codec_selector import EncodeStats
from ckpt_engine.copy.transfer import RunText, adopt_run
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.copy.evolving import contents
from tests.support.copies import copy_encoded


def predicted(near: Path, far: Path) -> int:
    """Copies all snapshots, checks them, and returns how many have pieces that are stored as Adam's step."""
    source = Repository(LocalStorage(near))
    target = adopt_run(RunText.of(source), LocalStorage(far))
    found = 0
    for parsed in source.ids():
        copy_encoded(source, target, parsed.id, lambda _: "delta", EncodeStats())
        manifest = target.read(parsed.id)
        assert contents(target, manifest) == contents(source, source.read(parsed.id))
        grouped = {name for name, entry in manifest.entries.items() for piece in entry.pieces if piece.group}
        assert not grouped or {"exp_avg", "exp_avg_sq"} <= {name.rpartition("/")[2] for name in grouped}
        found += bool(grouped)
    return found


@pytest.mark.slow
def test_lightning(tmp_path: Path) -> None:
    """A real fit, saved at each batch."""
    import lightning.pytorch as pl

    from lightning_ckpt import AdaptiveCheckpoint

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"}
            ]

    data = torch.utils.data.TensorDataset(torch.randn(64, 64))
    options: dict[str, Any] = {"every_n_steps": 1, "keep": {"last": 99}, "writer": "thread", "slots": 4}
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[AdaptiveCheckpoint(str(tmp_path / "near"), **options)],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=8))
    assert predicted(tmp_path / "near", tmp_path / "far") >= 2


@pytest.mark.slow
def test_accelerate(tmp_path: Path) -> None:
    """A real loop with prepared objects."""
    from accelerate_ckpt import AdaptiveCheckpoint
    from tests.accelerate.runs import make_accelerator
    from tests.loop.runs import Case

    accelerator = make_accelerator(Case())
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 64)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    options = {"every_n_steps": 1, "keep": {"last": 99}, "writer": "thread", "slots": 4}
    ckpt = AdaptiveCheckpoint(accelerator, {"tiers": str(tmp_path / "near"), **options})
    for _ in range(ckpt.epoch, 1):
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    ckpt.close()
    assert predicted(tmp_path / "near", tmp_path / "far") >= 2
