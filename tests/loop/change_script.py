"""Resumes scripts with changes in processes that kill themselves: `python -m tests.loop.change_script` serves jobs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.accelerate.hf import train_hf
from tests.loop.changes import SEED, Objects, Setup
from tests.loop.runs import every_boundary
from tests.loop.test_resume_changes import TRAINERS
from tests.support.trainers import TraceFile, serve

CONSTANT = {"num_train_epochs": 2, "lr_scheduler_type": "constant"}
RESTART = {"only": ["model"]}, {"only": ["model", "optimizer"]}
RECIPES: dict[str, tuple[Setup, dict[str, Any], dict[str, Any]]] = {
    "weights": (Setup(rate=3e-3, schedule="step"), {"learning_rate": 3e-3}, {"resume": RESTART[0]}),
    "moments": (Setup(schedule="warmup"), {"lr_scheduler_type": "cosine"}, {"resume": RESTART[1]}),
    "head": (Setup(outputs=3), {}, {"resume": {"strict": False}}),
    "epochs": (Setup(epochs=3), {"num_train_epochs": 3}, {}),
    "batch": (Setup(batch=3), {"per_device_train_batch_size": 3}, {"data": "continue"}),
    "accumulation": (Setup(accumulate=2), {"gradient_accumulation_steps": 2}, {"data": "continue"}),
    "streams": (Setup(), {}, {"resume": {"skip": ["rng"]}}),
}
"""What is changed in the script, in the arguments of a transformers `Trainer`, and in the options."""


PART = {"resume": {"skip": ["model.transformer.ln_f"]}}
"""What is as a head where the model stays the same."""


class Mortal(TraceFile):
    """A trace whose process is killed with its entry of this number; 0: with none."""

    def __init__(self, path: str, last: int) -> None:
        super().__init__(path)
        self._last = last

    def append(self, entry: Any) -> None:
        super().append(entry)
        if len(self) == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


def train(trainer: str, recipe: str | None, root: Path, trace: list[Any], seed: int, **options: Any) -> None:
    """One process; without a recipe that of the script before its change."""
    setup, arguments, changed = RECIPES[recipe] if recipe is not None else (Setup(), {}, {})
    options = every_boundary(root, **changed, **options)
    if trainer == "transformers":
        options |= PART if recipe == "head" else {}
        found = train_hf({**CONSTANT, **arguments}, options, root.parent / "out", seed=seed, trace=trace)
        trace.append(("end", found.digest["weights"], found.digest["optimizer"]))
        return
    Objects.journal = lambda: trace  # type: ignore[misc]
    try:
        trace.append(("end", TRAINERS[trainer].train(setup, options, seed)[1]))
    finally:
        Objects.journal = list  # type: ignore[misc]


def run(job: dict[str, Any]) -> None:
    """One training process, with the same command as the one before it."""
    torch.set_num_threads(1)
    train(job["trainer"], job["recipe"], Path(job["root"]), Mortal(job["trace"], job["last"]), SEED, writer="process")


if __name__ == "__main__":
    serve(run)
