"""A training process to be killed: `python -m tests.real.cycle_trainer TRACE STEPS [CONFIG]`.

A small model with dropout, Adam and shuffled batches, trained for STEPS steps, with a snapshot after every one that the
arena has room for. Each line of TRACE is one thing that happened, and is written before anything else happens:
`resumed STEP`, `step STEP LOSS`, `durable STEP`, and at the end `digest DIGEST` of everything that training changes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_engine import Checkpointer

BATCH = 16
SAMPLES = 160
PACE_SECONDS = 0.02
"""Each step takes so long at least, so that there are moments to be killed at."""
AHEAD = 8
"""It is never so many steps ahead of its newest durable snapshot: it must not end before it is killed."""


class Trace:
    """Lines that survive the death of this process, whatever file system they are on."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())


class Training:
    """Everything that changes from step to step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(SAMPLES, 32)
        self.y = torch.randn(SAMPLES, 1)
        self.model = nn.Sequential(nn.Linear(32, 256), nn.Dropout(0.2), nn.ReLU(), nn.Linear(256, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.order: list[int] = []
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loop": {"step": self.step, "order": list(self.order), "rng": torch.get_rng_state()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.order = state["loop"]["step"], list(state["loop"]["order"])
        torch.set_rng_state(state["loop"]["rng"])

    def train_step(self, before_update: Any) -> float:
        if len(self.order) < BATCH:
            self.order = torch.randperm(SAMPLES).tolist()
        batch, self.order = self.order[:BATCH], self.order[BATCH:]
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.x[batch]), self.y[batch])
        loss.backward()
        before_update()
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    def digest(self) -> str:
        found = hashlib.sha256()
        for tensor in [*self.model.state_dict().values(), torch.get_rng_state()]:
            found.update(tensor.numpy().tobytes())
        for slots in self.optimizer.state_dict()["state"].values():
            for name in sorted(slots):
                found.update(slots[name].numpy().tobytes())
        return found.hexdigest()


def train(trace: Trace, steps: int, config: str | None) -> None:
    """One life of the training."""
    training = Training()
    if config is None:
        while training.step < steps:
            trace.write(f"step {training.step + 1} {training.train_step(lambda: None).hex()}")
    else:
        with Checkpointer(Path(config)) as ckpt:
            ckpt.engine.start()
            state = ckpt.load()
            if state is not None:
                training.restore(state)
            trace.write(f"resumed {training.step}")
            waiting: list[Any] = []
            durable = training.step
            while training.step < steps:
                time.sleep(PACE_SECONDS)
                trace.write(f"step {training.step + 1} {training.train_step(ckpt.before_update).hex()}")
                waiting.append(ckpt.save(training.state(), step=training.step))
                if training.step - durable >= AHEAD:
                    ckpt.wait(600.0)
                for handle in [one for one in waiting if one.done()]:
                    waiting.remove(handle)
                    if handle.error:
                        raise handle.error
                    if handle.snapshot:
                        durable = handle.step
                        trace.write(f"durable {durable}")
            # What is resumed next must be the very end, whatever was skipped on the way.
            ckpt.wait(600.0)
            ckpt.save(training.state(), step=training.step).wait(600.0)
    trace.write(f"digest {training.digest()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Trace(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
