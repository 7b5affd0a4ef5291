"""A loop with a hook before the 10th batch is trained; as a script it ends there, and closes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer
from ckpt_engine.loop import failing_loop
from tests.support.digests import seed_everything

FAILS_AT = 9
BATCH = 4
EPOCHS = 2


class Failure(RuntimeError):
    """What ends the run."""


def fail(_: Script) -> None:
    raise Failure("late")


class Net(nn.Module):
    """Batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.tail = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tail(self.head(x))
        return out


class Script:
    """The loop.

    Args:
        root: where its snapshots go; None: it is not tracked.
        model: what it trains.
        options: more of the checkpointer's.
    """

    def __init__(self, root: Path | None, model: Callable[[], nn.Module] = Net, **options: Any) -> None:
        self.model: Any = model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.more: dict[str, Any] = {}
        self.loader = DataLoader(TensorDataset(torch.arange(132.0).view(22, 6).cos()), batch_size=BATCH, shuffle=True)
        self.ckpt: Any = None
        if root is not None:
            self.ckpt = Checkpointer(root, **{"every_n_steps": 5, "at_end": False, **options})

    def track(self) -> Any:
        return self.ckpt.track(model=self.model, optimizer=self.optimizer, loader=self.loader, **self.more)

    def train(self, late: Callable[[Script], object] = lambda _: None) -> None:
        """The whole loop, with a `with` around it if it is tracked."""
        if self.ckpt is None:
            self.loop(0, late)
            return
        with self.ckpt:
            self.loop(self.track().epoch, late)

    def loop(self, epoch: int, late: Callable[[Script], object]) -> None:
        steps = 0
        for _ in range(epoch, EPOCHS):
            for (x,) in self.loader:
                if steps == FAILS_AT:
                    late(self)
                self.optimizer.zero_grad()
                self.model(x + 0.1 * torch.randn(6)).pow(2).mean().backward()
                self.optimizer.step()
                steps += 1


def main() -> None:
    failing_loop.affordable = lambda *_: True  # its steps take no longer than a record of one
    torch.set_num_threads(1)  # as in the tests that compare it bit for bit
    seed_everything(0)
    root, how, writer = sys.argv[1:]
    script = Script(Path(root), writer=writer)
    script.loop(script.track().epoch, fail if how == "fail" else lambda _: sys.exit(3))


if __name__ == "__main__":
    main()
