"""Trains on handwritten digits, and evaluates each durable snapshot in a process that the option `on` starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train() -> None:
    torch.manual_seed(0)
    images, labels = digits()
    loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=64, shuffle=True)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    evaluate_it = [sys.executable, str(Path(__file__).resolve())]
    # A command may take longer than the interval: the snapshots that wait for it must not be removed.
    options = {"every_n_steps": 24, "keep": 20, "on": {"durable": evaluate_it}}
    with Checkpointer("evaluated-out", **options) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for _ in range(run.epoch, 3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()


def evaluate(snapshot: str, step: str) -> None:
    weights = Path(f"weights-{step}.safetensors")
    subprocess.run(["ckpt", "export", snapshot, str(weights), "--only", "model", "--force"], check=True)
    model = network()
    model.load_state_dict(load_file(weights))
    weights.unlink()
    images, labels = digits()
    with torch.no_grad():
        right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    with Path("evaluations.jsonl").open("a") as file:
        file.write(json.dumps({"step": int(step), "snapshot": snapshot, "accuracy": right}) + "\n")


if __name__ == "__main__":
    if os.environ.get("CKPT_EVENT") == "durable":
        evaluate(os.environ["CKPT_SNAPSHOT"], os.environ["CKPT_STEP"])
    else:
        train()
