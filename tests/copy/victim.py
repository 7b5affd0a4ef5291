"""A run to be killed: a table of which few rows change, what is frozen, is there twice or comes back; by step.

`python -m tests.copy.victim ROOT WRITER` resumes from the newest snapshot, says each step that is durable, and
ends only when it is killed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ckpt_engine import Checkpointer
from ckpt_engine.copy.write_snapshot import cut
from tests.support.bounds import bounds

ROWS, WIDTH, FROZEN = 40_000, 8, 100_000
KEEP = 3


def state(step: int) -> dict[str, Any]:
    """The state after a step."""
    table = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    for one in range(1, step + 1):
        change(table, one)
    generator = torch.Generator().manual_seed(1)
    frozen = torch.randn(FROZEN, generator=generator)
    twice = {"frozen": frozen, "teacher": frozen.clone(), "phase": phase(step)}
    return {"table": table, **twice, "head": torch.full((100,), step), "step": step}


def phase(step: int) -> torch.Tensor:
    """What is the same in each second step."""
    return torch.randn(FROZEN, generator=torch.Generator().manual_seed(2 + step % 2))


def change(table: torch.Tensor, step: int) -> None:
    """What a step does to the table."""
    rows = torch.randint(ROWS, (ROWS // 100,), generator=torch.Generator().manual_seed(step))
    table[rows] += step


def share_everything() -> None:
    """Small pieces and short chains, so that in little time all happens that may happen to a large table."""
    setattr(*bounds("PLAIN", least_bytes=0, most_bases=6, most_share=0.06))
    cut.__defaults__ = (100_000,)


def main(root: str, writer: str) -> None:
    share_everything()
    with Checkpointer(root, keep={"last": KEEP}, writer=writer) as checkpointer:
        loaded = checkpointer.load()
        live = state(loaded["step"] if loaded is not None else 0)
        while True:
            live["step"] += 1
            change(live["table"], live["step"])
            live["head"].fill_(live["step"])
            live["phase"] = phase(live["step"])
            checkpointer.save(live, step=live["step"]).wait(120)
            print(live["step"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
