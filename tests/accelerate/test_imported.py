"""A run that began with `accelerator.save_state` goes on with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accelerate_ckpt import AdaptiveCheckpoint
from ckpt_engine.cli.main import main
from ckpt_engine.errors import MismatchError
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.accelerate.runs import make_accelerator
from tests.loop.runs import LOADERS, Average, Case, Net, digest, report, seed_everything

STEPS = 5


class Script:
    """A script up to the place where `AdaptiveCheckpoint` is made."""

    def __init__(self, seed: int, model: Any = None) -> None:
        seed_everything(seed)
        self.accelerator: Accelerator = make_accelerator(Case())
        model = Net() if model is None else model
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        self.average = Average(model)
        prepared = self.accelerator.prepare(model, optimizer, LOADERS["shuffled"](), schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.accelerator.register_for_checkpointing(self.average)

    def train(self, steps: int) -> None:
        for _, (x, y, _ids) in zip(range(steps), self.loader, strict=False):
            self.accelerator.backward(((self.model(x) - y) ** 2).mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.average.update(self.model)

    def digest(self) -> dict[str, str]:
        """Of all that `save_state` stores, besides the streams."""
        found = digest(
            weights=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            schedule=self.schedule.state_dict(),
            average=self.average.weights,
        )
        del found["streams"]
        return found


@pytest.fixture
def imported(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A run of one snapshot that was imported, and the digest of what it is made of."""
    before = Script(0)
    before.train(STEPS)
    before.accelerator.save_state(str(tmp_path / "folder"))
    command = ["import", str(tmp_path / "folder"), str(tmp_path / "run"), "--step", str(STEPS)]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert not ended.value.code
    return tmp_path / "run", before.digest()


def test_a_folder_of_save_state_goes_on(imported: tuple[Path, dict[str, str]]) -> None:
    """All its objects are put back; the report says what the folder cannot have, and later snapshots are exact."""
    root, expected = imported
    after = Script(5)
    options = {"tiers": str(root), "every_n_steps": 10**9, "writer": "thread"}
    ckpt = AdaptiveCheckpoint(after.accelerator, options)
    assert after.digest() == expected
    assert (ckpt.global_step, ckpt.epoch, ckpt.resumed_batches) == (STEPS, 0, 0)
    found = report(root)
    assert [one.name for one in found.not_restored] == ["random streams", "data position"]
    assert {one.name for one in found.restored} == {"model", "optimizer", "scheduler", "custom_checkpoint_0"}
    after.train(100)
    after.accelerator.end_training()
    trained = after.digest()
    assert Repository(open_storage(root)).ids()[-1].step == STEPS + len(after.loader)
    again = Script(6)
    ckpt = AdaptiveCheckpoint(again.accelerator, options)
    assert again.digest() == trained
    assert ckpt.epoch == 1
    assert report(root).not_restored == ()
    ckpt.close()


def test_a_folder_of_another_model_is_refused(imported: tuple[Path, dict[str, str]]) -> None:
    """Before anything is changed, with the names of the weights."""
    root, _ = imported
    other = Script(1, torch.nn.Linear(6, 1))
    before = other.digest()
    with pytest.raises(MismatchError, match="weight"):
        AdaptiveCheckpoint(other.accelerator, {"tiers": str(root), "writer": "thread"})
    assert other.digest() == before
