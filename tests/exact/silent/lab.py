"""What the scripts share: a small model, a step, and the places where a process is killed and leaves its state.

A script that may be killed has only these lines of the test in it, and none of them keeps anything in the process.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ckpt_engine import Checkpointer

SNAPSHOT, KILL, STEPS = 10, 14, 24
"""The last snapshot is of the one step, the process is killed after the other, and a whole run has so many."""
EVERY = 5
PATIENCE_SECONDS = 60.0
ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))


def parts(rate: float = 1e-2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def shuffled(**options: Any) -> DataLoader[Any]:
    """Twelve batches."""
    return DataLoader(ROWS, batch_size=2, shuffle=True, **options)  # type: ignore[arg-type]


def checkpoints(**options: Any) -> Checkpointer:
    """As a script makes it."""
    return Checkpointer("ck", every_n_steps=EVERY, keep={"last": 99}, **options)


def learn(model: Any, optimizer: Any, x: torch.Tensor, scale: float = 1.0) -> float:
    """One step of training."""
    loss = (model(x) - 1).square().mean() * scale
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def at(step: int, *things: Any) -> None:
    """So many steps are done: leave the state of the models and optimizers, and be killed here if it is time.

    In the process that is killed, every snapshot that is due is durable two steps later.
    """
    _leave(str(step), things)
    if kill := os.environ.get("KILL"):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(list(Path("ck/snapshots").glob("[!.]*.json"))) < (step - 2) // EVERY:
            assert time.monotonic() < deadline, "no snapshot is taken"
            time.sleep(0.002)
        if step == int(kill):
            os.kill(os.getpid(), signal.SIGKILL)


def end(*things: Any) -> None:
    """The script is over."""
    _leave("end", things)


def _leave(name: str, things: Iterable[Any]) -> None:
    folder = Path(os.environ["STATES"])
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"".join(map(_bytes_of, things)))


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, nn.Module):
        return _bytes_of(list(value.state_dict().values()))
    if isinstance(value, torch.optim.Optimizer):
        return _bytes_of([value.state.get(p) for group in value.param_groups for p in group["params"]])
    if isinstance(value, dict):
        return _bytes_of(list(value.values()))
    if isinstance(value, list | tuple):
        return b"".join(map(_bytes_of, value))
    return _bytes_of(value.tolist()) if isinstance(value, torch.Tensor) else repr(value).encode().ljust(24)[:24]


def by_steps(feed: Callable[[int], Any], **tracked: Any) -> None:
    """A loop that makes its batches itself; what it feeds on belongs to the function that gives them."""
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, **tracked)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, *feed(step))
            run.step()
    end(model, optimizer)


def by_epochs(change: Callable[[torch.Tensor], Any], loader: Any = None, passes: int = 2) -> None:
    """A loop over a loader; what it does to its batches belongs to a function."""
    model, optimizer = parts()
    loader = shuffled() if loader is None else loader
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, passes):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * STEPS // passes + number, model, optimizer)
                learn(model, optimizer, *change(x))
    end(model, optimizer)


def library(text: str) -> Any:
    """A module with this text, as if pip had installed it."""
    folder = Path("site-packages").absolute()
    folder.mkdir(exist_ok=True)
    (folder / "alibrary.py").write_text(text)
    sys.path.insert(0, str(folder))
    return importlib.import_module("alibrary")
