"""A `Trainer` with several ranks that is killed and resumed is the uninterrupted one, bit for bit."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import Launcher
from tests.transformers_ranks.lives import (
    Lives,
    kill,
    require_continuation,
    require_each_sample_once,
    require_same_end,
)
from tests.transformers_ranks.train import SAMPLES

pytestmark = pytest.mark.timeout(1200)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"arguments": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}},
    "accumulation with a remainder": {"arguments": {"gradient_accumulation_steps": 3}},
    "workers": {"arguments": {"dataloader_num_workers": 2}},
    "evaluation": {"arguments": {"eval_strategy": "steps", "eval_steps": 3}},
    "best model": {
        "arguments": {
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_strategy": "steps",
            "save_steps": 6,
            "save_total_limit": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
        }
    },
    "language model": {"model": "language"},
    "no mean over devices": {"arguments": {"average_tokens_across_devices": False}},
    "split batches": {"arguments": {"accelerator_config": {"split_batches": True}}},
    "no seedable sampler": {"arguments": {"accelerator_config": {"use_seedable_sampler": False}}},
    "group by length": {"arguments": {"train_sampling_strategy": "group_by_length"}},
    "batch rebalance": {"arguments": {"train_sampling_strategy": "batch_rebalance"}},
    "dispatched stream": {"stream": True, "arguments": {"max_steps": 8, "num_train_epochs": 1}},
    "sharded stream": {
        "stream": True,
        "arguments": {"max_steps": 8, "accelerator_config": {"dispatch_batches": False}},
    },
    "dispatched": {"arguments": {"accelerator_config": {"dispatch_batches": True}}},
    "buckets": {"arguments": {"ddp_find_unused_parameters": False}},
}


def assert_survives(name: str, size: int, launcher: Launcher, folder: Path, *, kills: int, seed: int = 0) -> None:
    """So many lives end by force; the last comes to its end, and nobody can tell."""
    draw = random.Random(seed)
    reference = Lives(launcher, folder / "reference", **CASES[name]).whole(size)
    steps = reference.batches(0)[-1]["step"]
    lives = Lives(launcher, folder / "killed", **CASES[name])
    for number in range(kills):
        life = lives.start(size, pace=0.03)
        before = lives.snapshots()
        life.until(lambda: (len(lives.snapshots()) and lives.snapshots() != before) or not all_there(life))  # noqa: B023
        life.reach(draw.randint(2, max(3, steps // (2 * kills))))
        time.sleep(draw.uniform(0.0, 0.05))  # a random moment
        victims = draw.choice([life.pids, life.pids[:1], life.pids[-1:]])
        kill(victims, writers=draw.random() < 0.5)
        assert any(lives.join()), f"life {number} came to its end"
    last = lives.whole(size)
    starts = [require_continuation(life, reference) for life in lives.lives]
    assert len(set(starts)) > 1, f"nothing was resumed: {starts}"
    require_same_end(last, reference)
    assert lives.report()["not_restored"] == [], lives.report()
    if not CASES[name].get("stream"):
        require_each_sample_once(lives.lives, SAMPLES)


def all_there(life: Any) -> bool:
    """Whether no rank has ended."""
    return all(life.exit(rank) is None for rank in range(life.size))


def test_two_ranks_survive_kills(tmp_path: Path, launcher: Launcher) -> None:
    """One rank or all of them, at random moments."""
    assert_survives("accumulation", 2, launcher, tmp_path, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_whatever_a_trainer_does(size: int, name: str, tmp_path: Path, launcher: Launcher) -> None:
    """Three kills at random steps."""
    assert_survives(name, size, launcher, tmp_path, kills=3, seed=len(name) + size)
