"""Trains loops and a transformers `Trainer` with TensorBoard: `python -m tests.accelerate.log_script` serves jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from accelerate_ckpt import AdaptiveCheckpoint
from tests.accelerate.hf import train_hf
from tests.lightning.runs import Augmented, seed_everything
from tests.support.trainers import TraceFile, serve

EPOCHS = 4


def train_loop(job: dict[str, Any], trace: TraceFile) -> None:
    """A loop of Accelerate that logs every step."""
    seed_everything(job["seed"])
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=job["folder"])
    if job.get("late") is None:
        accelerator.init_trackers("project")
    model, loader = torch.nn.Linear(6, 1), DataLoader(Augmented(), batch_size=4, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ckpt = AdaptiveCheckpoint(accelerator, job["root"], every_n_steps=2) if job["root"] else None
    if job.get("late") is not None:
        accelerator.init_trackers("project")
    step = 0 if ckpt is None else ckpt.global_step
    for _ in range(0 if ckpt is None else ckpt.epoch, EPOCHS):
        for x, y, _ in loader:
            loss = ((model(x) - y) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.log({"loss": loss.item()}, step=step)
            trace.append(step)
    accelerator.end_training()


def run(job: dict[str, Any]) -> None:
    """One training process."""
    torch.set_num_threads(1)
    trace = TraceFile(job["trace"], job["pace"])
    if job["loop"] == "accelerate":
        train_loop(job, trace)
    else:
        options = {"tiers": job["root"], "every_n_steps": 2} if job["root"] else None
        tool = job.get("tool", "tensorboard")
        os.environ.update(MLFLOW_TRACKING_URI=f"file://{job['folder']}/mlruns", MLFLOW_ALLOW_FILE_STORE="true")
        arguments = {"report_to": [tool], "logging_steps": 1}
        train_hf(arguments, options, Path(job["folder"]), seed=job["seed"], trace=trace)
    trace.append(("digest", ""))


if __name__ == "__main__":
    serve(run)
