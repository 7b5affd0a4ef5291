"""A small network that is really trained, the same way each time; its state in the form that a plain loop stores it in.

As a program it trains and saves until it is killed: `python -m tests.copy.training ROOT NEAR_CODEC [memory]`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import CkptError
from ckpt_engine.store.container import digest

KEEP = {"near": 3, "far": 2}
WIDTH, STEPS = 768, 250
"""Of the program: large enough that encoding takes longer than anything else."""


class Training:
    """Batches depend on the number of the step only, so that a run that goes on from a state ends with the same bits.

    Args:
        width: of the hidden layer.
        before: steps taken at once.
    """

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        width: int = 256,
        before: int = 15,
        **options: Any,
    ) -> None:
        torch.manual_seed(5)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.LayerNorm(width), torch.nn.Linear(width, 16)
        )
        self.optimizer = optimizer(self.network.parameters(), **{"lr": 1e-3, **options})
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.97**step)
        self.target = torch.randn(64, 16)
        self.steps = 0
        self.step(before)

    def step(self, count: int = 1) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # on a busy machine more take far longer for something so small
        for _ in range(count):
            self.steps += 1
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(self.steps))
            self.optimizer.zero_grad()
            torch.nn.functional.mse_loss(self.network(x), torch.tanh(x @ self.target)).backward()
            self.optimizer.step()
            self.scheduler.step()
        torch.set_num_threads(threads)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "steps": self.steps,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.steps = state["steps"]


def digest_of(value: Any) -> str:
    """Of every bit of a state."""
    return digest(b"".join(_bytes(value)))


def _bytes(value: Any) -> list[bytes]:
    if isinstance(value, torch.Tensor):
        return [value.detach().contiguous().numpy().tobytes()]
    if isinstance(value, dict):
        return [data for key, one in value.items() for data in (str(key).encode(), *_bytes(one))]
    if isinstance(value, list | tuple):
        return [data for one in value for data in _bytes(one)]
    return [repr(value).encode()]


def main(root: Path, near_codec: str, *memory: str) -> None:
    """Train from wherever it was. With `memory` as one more argument there is a memory tier."""
    near = {"url": str(root / "near"), "codec": near_codec, "keep": {"last": KEEP["near"]}}
    far = {"url": str(root / "far"), "codec": "delta", "keep": {"last": KEEP["far"]}}
    training = Training(width=WIDTH, before=0)
    with Checkpointer(tiers=[*memory, near, far]) as ckpt:
        state = ckpt.load()
        if state is not None:
            training.load(state)
        place = ckpt.loaded.place if ckpt.loaded is not None else "nowhere"
        print(f"resumed {training.steps} {place} {digest_of(training.state())}", flush=True)
        while training.steps < STEPS:
            training.step()
            try:
                ckpt.save(training.state(), step=training.steps).wait(60)
            except CkptError as err:
                print(f"failed {training.steps}: {err}", flush=True)  # its writer was killed: the next one has another
                time.sleep(0.1)  # a step that takes longer, so that there are some left once saving works again
            else:
                print(f"durable {training.steps}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
