"""Trains the recipes' loop in a worker of Ray Train: `python -m tests.recipes.ray_driver STORAGE ROOT LINES [PACE]`."""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.recipes.train import train


def train_worker(config: dict[str, Any]) -> None:
    """In the worker."""
    train(*config["arguments"])


if __name__ == "__main__":
    storage, root, lines, *pace = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=True)
    TorchTrainer(
        train_worker,
        train_loop_config={"arguments": (root, lines, float((pace or ["0"])[0]))},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=5)),
    ).fit()
    ray.shutdown()
