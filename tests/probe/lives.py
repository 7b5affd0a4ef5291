"""Training in this process that ends behind its last snapshot, and is resumed: what the repeated steps show."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ckpt_engine import Checkpointer
from ckpt_engine.observe.resume_report import FILE_NAME, Replay, ResumeReport
from tests.restore.memory_tier.lives import until as wait_until

SNAPSHOT, END = 8, 14
"""The last snapshot is of the one step, and the process ends after the other."""
NOISE = 0.01


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Indices and targets, with noise of torch's stream."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.indices = torch.randint(0, 50, (160, 6), generator=generator)
        self.targets = torch.randn(160, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.indices[index], self.targets[index] + NOISE * torch.randn(4)


class Net(nn.Module):
    """Thirty tensors, of which some are much larger than others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(7))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(64, 4)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.embedding(indices).mean(1)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        out: torch.Tensor = self.head(self.dropout(x))
        return out


@dataclass
class Job:
    """What a process trains with; `at` is called before each step is trained."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loader: DataLoader[Any]
    at: Callable[[Job, int, list[torch.Tensor]], None] = lambda *_: None
    states: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    """What loggers got last."""

    def state(self) -> list[torch.Tensor]:
        """Copies of all weights and moments."""
        moments = [
            one for row in self.optimizer.state.values() for one in row.values() if isinstance(one, torch.Tensor)
        ]
        return [one.detach().clone() for one in (*self.model.parameters(), *moments)]


def make(seed: int = 0, rate: float = 1e-2, **optimizer: Any) -> Job:
    """Everything a script makes at its start."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = Net()
    made = torch.optim.AdamW(model.parameters(), lr=rate, **optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 3, 0.9)
    return Job(model, made, scheduler, DataLoader(Rows(), batch_size=8, shuffle=True))


def train(root: Path, job: Job, until: int, **options: Any) -> Mapping[str, Any]:
    """One process that ends after this step; its resume report, or nothing if it began."""
    (root / FILE_NAME).unlink(missing_ok=True)
    given = {"every_n_steps": SNAPSHOT, "at_end": False, "writer": "thread", "keep": {"last": 99}, **options}
    given.setdefault("log", {"loggers": "full"})
    with Checkpointer(None if "tiers" in given else root, **given) as ckpt:
        run = ckpt.track(model=job.model, optimizer=job.optimizer, scheduler=job.scheduler, loader=job.loader)
        while run.global_step < until:
            for indices, targets in job.loader:
                if run.global_step >= until:
                    break
                wait_until(ckpt.engine.ready, lambda: "no snapshot could be taken")  # else a slow writer shifts it
                batch = [indices, targets]
                job.at(job, run.global_step + 1, batch)
                loss = ((job.model(batch[0]) - batch[1]) ** 2).mean()
                job.optimizer.zero_grad()
                loss.backward()
                job.optimizer.step()
                job.scheduler.step()
                job.states[run.global_step] = job.state()
                job.numbers = run.numbers()
    path = root / FILE_NAME
    return dict(json.loads(path.read_text())) if path.exists() else {}


def replay_of(report: Mapping[str, Any]) -> Replay:
    """What the repeated steps have shown."""
    replay = ResumeReport.from_json(report).replay
    assert replay is not None
    return replay
