"""A process that follows a run of `test_follow.state`, compares all it has with that, and is killed at any time."""

from __future__ import annotations

import sys

import torch

from ckpt_engine import follow
from tests.restore.test_follow import EVERY, same, state


def main(root: str) -> None:
    """Print the step of each snapshot whose tensors, put together, are those of that step and of no other."""
    has: dict[str, torch.Tensor] = {}
    for step, changed in follow(root, "model", EVERY):
        has |= changed
        print(step if same(has, state(step)["model"]) else f"a mixture at step {step}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
