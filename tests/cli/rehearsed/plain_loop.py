"""A plain loop that resumes, or makes one of the usual mistakes: `python plain_loop.py RUN MISTAKE`."""

from __future__ import annotations

import random
import sys
import time

import numpy as np
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.data import rng


def main(run: str, mistake: str) -> None:
    if mistake == "new folder":
        run = f"{run}-{time.time_ns()}"
    if mistake != "no seed":
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    own = random.Random(7)
    start = 0
    with Checkpointer(run, overhead="1%") as ckpt:
        state = None if mistake == "forgets" else ckpt.load()
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            rng.restore(state["rng"])
            start = state["step"]
            if mistake == "draws at start":
                torch.rand(1)
        for step in range(start + 1, start + 6 if mistake == "counts starts" else 101):
            batch = torch.randn(8, 4)
            if mistake == "own generator":
                batch *= own.random()
            if mistake == "clock":
                batch *= time.time() % 1
            if mistake == "fails" and step == 3:
                raise ValueError("a mistake of the script")
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            ckpt.before_update()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if mistake != "saves nothing":
                ckpt.save({**state, "rng": rng.capture()}, step=step)
    print("the end, which no rehearsal reaches")


if __name__ == "__main__":
    main(sys.argv[1], " ".join(sys.argv[2:]))
