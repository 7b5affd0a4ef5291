"""Small trainings whose states are converted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn


class Loop:
    """A plain loop: a network with batch norm, AdamW and a schedule."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.step = 0

    def trained(self, steps: int) -> Self:
        """After some steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(6, 4)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
        return self

    def state(self) -> dict[str, Any]:
        """What a user would save."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
        }


def tiny_trainer(out: Path, *, steps: int, seed: int = 0, **more: Any) -> Any:
    """A transformers Trainer over a tiny GPT-2 with tied weights and dropout, made offline."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = np.random.default_rng(0).integers(0, 32, (40, 8))
    data = [{"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)} for row in rows]
    arguments = TrainingArguments(
        str(out),
        **{
            "max_steps": steps,
            "per_device_train_batch_size": 4,
            "save_steps": 4,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "seed": 3,
            **more,
        },
    )
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)


def same_tree(one: Any, other: Any, where: str = "") -> None:
    """Fails, naming the place, unless both are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor), where
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        ), where
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, where
        assert np.array_equal(one, other), where
    elif isinstance(one, Mapping):
        assert list(one) == list(other), where
        for key in one:
            same_tree(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            same_tree(*pair, f"{where}/{index}")
    else:
        assert one == other, where
