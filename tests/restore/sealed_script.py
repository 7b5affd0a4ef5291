"""A training loop of a sealed run, which its test kills: prints each step that is durable."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import SnapshotSkippedError


def save(ckpt: Checkpointer, state: dict[str, Any], step: int) -> None:
    """Until the state is durable: while the writer of an earlier process ends, snapshots are skipped."""
    deadline = time.monotonic() + 60
    while True:
        try:
            ckpt.save(state, step=step).wait(60)
        except SnapshotSkippedError:
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(0.05)
        else:
            return


def train(config: dict[str, Any], last: int) -> None:
    """Resume, and save each step up to `last`: the values of a step follow from its number."""
    with Checkpointer(config) as ckpt:
        state = ckpt.load()
        step = 0 if state is None else int(state["step"])
        print(f"from {step}", flush=True)
        for step in range(step + 1, last + 1):  # noqa: B020
            weights = torch.arange(50_000.0) + (torch.arange(50_000) < step * 10) * step
            save(ckpt, {"model": {"secret_name": weights, "frozen": torch.ones(70_000)}, "step": step}, step)
            print(f"durable {step}", flush=True)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]), int(sys.argv[2]))
