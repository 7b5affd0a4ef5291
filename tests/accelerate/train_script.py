"""Trains loops in processes that can be killed: `python -m tests.accelerate.train_script` serves jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.accelerate.runs import train_accelerate
from tests.accelerate.test_exact_resume import CASES
from tests.loop.runs import stuck_case, train_plain
from tests.support.trainers import TraceFile, serve

PACE_SECONDS = 0.01


def run(job: dict[str, Any]) -> None:
    """One training process."""
    torch.set_num_threads(1)
    if "stuck" in job:
        case = stuck_case(stuck=job["stuck"])
    else:
        case = replace(CASES[job["case"]], accumulate=job["accumulate"], epochs=job["epochs"])
    train = {"accelerate": train_accelerate, "plain": train_plain}[job["loop"]]
    trace = TraceFile(job["trace"], PACE_SECONDS, job.get("wait_after"))
    options = {"tiers": job["root"], "every_n_steps": 2, "keep": {"last": 3}, **job.get("options", {})}
    done = train(case, options, seed=job["seed"], trace=trace)
    trace.append(("digest", done.digest))


if __name__ == "__main__":
    serve(run)
