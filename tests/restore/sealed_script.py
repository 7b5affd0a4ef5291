"""A training loop of a sealed run, which its test kills: prints each step that is durable."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from ckpt_engine import Checkpointer


def train(config: dict[str, Any], last: int) -> None:
    """Resume, and save each step up to `last`: the values of a step follow from its number."""
    with Checkpointer(config) as ckpt:
        state = ckpt.load()
        step = 0 if state is None else int(state["step"])
        print(f"from {step}", flush=True)
        for step in range(step + 1, last + 1):  # noqa: B020
            weights = torch.arange(50_000.0) + (torch.arange(50_000) < step * 10) * step
            ckpt.save({"model": {"secret_name": weights, "frozen": torch.ones(70_000)}, "step": step}, step=step).wait(
                60
            )
            print(f"durable {step}", flush=True)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]), int(sys.argv[2]))
