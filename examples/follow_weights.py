"""Evaluates each new snapshot of `plain_loop.py` while that trains: start it in another terminal."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

from ckpt_engine import follow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", default="plain-out")
    args = parser.parse_args()

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)).eval()
    weights: dict[str, torch.Tensor] = {}
    for step, changed in follow(args.root, component="model"):
        weights |= changed
        model.load_state_dict(weights)
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).float().mean().item()
        print(f"step {step}: {len(changed)} tensors are new, {right:.1%} right", flush=True)
    print("the run has ended")


if __name__ == "__main__":
    main()
