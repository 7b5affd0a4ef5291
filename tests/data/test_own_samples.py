"""Data sets that make their samples with what trains: a resume gets others, and the refusal names what helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine import Checkpointer
from ckpt_engine.errors import MismatchError
from lightning_ckpt import AdaptiveCheckpoint

STEPS = 12


class Rollouts(IterableDataset[torch.Tensor]):
    """Gives fewer samples once the model has learned, and keeps a list of all."""

    def __init__(self, model: torch.nn.Linear) -> None:
        self.model, self.given = model, list[float]()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(30 if float(self.model.bias.detach()) > -0.1 else 3):
            self.given.append(number)
            yield torch.full((2,), float(number))


class KilledError(Exception):
    """Stands for the end of the process."""


def plain(root: Path, *, stop: int | None = None, **options: Any) -> int:
    """A run of `STEPS` steps; how many this process has trained."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Rollouts(model), batch_size=1)
    trained = 0
    with Checkpointer(root, every_n_steps=1, writer="thread", **options) as checkpointer:
        run = checkpointer.track(model=model, optimizer=optimizer, loader=loader)
        while run.global_step < STEPS:
            for _ in loader:
                assert checkpointer.wait(60)
                if trained == stop:
                    raise KilledError
                trained += 1
                model.bias.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.global_step >= STEPS:
                    break
    return trained


class Agent(pl.LightningModule):
    def __init__(self, stop: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(self.net.bias)
        self.stop, self.trained = stop, 0
        self.wait: Callable[[float], bool] = bool

    def training_step(self, batch: Any, _: int) -> Any:
        assert self.wait(60)
        if self.trained == self.stop:
            raise KilledError
        self.trained += 1
        return self.net.bias.sum()

    def train_dataloader(self) -> Any:
        return DataLoader(Rollouts(self.net), batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def lightning(root: Path, *, stop: int | None = None, **options: Any) -> int:
    agent = Agent(stop)
    callback = AdaptiveCheckpoint(str(root), every_n_steps=1, writer="thread", hidden="off", resume="auto", **options)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        max_steps=STEPS, max_epochs=-1, accelerator="cpu", enable_model_summary=False, callbacks=[callback], **quiet
    )
    agent.wait = lambda timeout: callback._run is None or callback._run.engine.wait(timeout)
    trainer.fit(agent)
    return agent.trained


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*num_workers", "ignore:.*IterableDataset")
@pytest.mark.parametrize("train", [plain, lightning])
def test_a_resume_is_refused_until_the_option_is_set(train: Callable[..., int], tmp_path: Path) -> None:
    """Refused at each start until then; the error is the last one of the traceback."""
    with pytest.raises(KilledError):
        train(tmp_path, stop=6)
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"ended after 3 of [56] batches") as caught:
            train(tmp_path)
        assert "data: restart_epoch" in str(caught.value)
    assert train(tmp_path, data="restart_epoch") >= STEPS - 7
    assert "it begins again" in (tmp_path / "resume-report.json").read_text()
