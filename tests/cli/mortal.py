"""A process that works on runs and is killed with SIGKILL at one of its system calls: `python -m tests.cli.mortal`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import main

ADAPTER = 20_000
"""The numbers of an adapter."""
CALLS = {"open", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "os.truncate"}


def adapter(fork: int, step: int) -> torch.Tensor:
    """What a run has trained by this step."""
    return torch.randn(ADAPTER, generator=torch.Generator().manual_seed(1000 * fork + step))


def train(root: Path, fork: int, step: int, base: torch.Tensor | None = None) -> None:
    """One more snapshot of a run, which keeps its newest two."""
    with Checkpointer(root, writer="thread", keep={"last": 2}) as run:
        state = {"base": base} if base is not None else run.load()
        run.save({**state, "adapter": adapter(fork, step), "fork": fork, "step": step}, step=step).wait(60)


def die_at(call: int) -> None:
    """Kill this process before its call of this number that looks at or changes a disk."""
    made = 0

    def count(event: str, _: Any) -> None:
        nonlocal made
        if event in CALLS:
            made += 1
            if made == call:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


if __name__ == "__main__":
    last, verb, *arguments = sys.argv[1:]
    die_at(int(last))
    if verb == "rm":
        shutil.rmtree(arguments[0])
    elif verb == "train":
        train(Path(arguments[0]), *map(int, arguments[1:]))
    else:
        main([verb, *arguments])
