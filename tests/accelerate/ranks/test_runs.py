"""A `Trainer` with several ranks that is killed and resumed is the uninterrupted one, bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.accelerate.ranks.lives import (
    Lives,
    kill,
    require_continuation,
    require_each_sample_once,
    require_same_end,
)
from tests.accelerate.ranks.train import SAMPLES

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
    "split batches": {"arguments": {"per_device_train_batch_size": 8, "accelerator_config": {"split_batches": True}}},
    "no seedable sampler": {"arguments": {"accelerator_config": {"use_seedable_sampler": False}}},
    "group by length": {"together": True, "arguments": {"train_sampling_strategy": "group_by_length"}},
    "batch rebalance": {"arguments": {"train_sampling_strategy": "batch_rebalance"}},
    "dispatched stream": {"stream": True, "samples": 256, "arguments": {"max_steps": 16}, "inexact": True},
    "sharded stream": {
        "stream": True,
        "samples": 256,
        "arguments": {"max_steps": 16, "accelerator_config": {"dispatch_batches": False}},
    },
    "dispatched": {"arguments": {"accelerator_config": {"dispatch_batches": True}}},
    "dispatched and split": {
        "arguments": {
            "per_device_train_batch_size": 8,
            "accelerator_config": {"dispatch_batches": True, "split_batches": True},
        }
    },
    "dispatched, with workers": {
        "arguments": {"dataloader_num_workers": 2, "accelerator_config": {"dispatch_batches": True}}
    },
    "fsdp2": {"model": "language", "arguments": {"fsdp": True, "fsdp_config": {"version": 2}}},
    "fsdp1": {
        "model": "untied",
        "arguments": {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False}},
    },
    "buckets": {"arguments": {"ddp_find_unused_parameters": False}},
}


def assert_survives(name: str, size: int, lives_in: Callable[..., Lives], *, kills: int, seed: int = 0) -> None:
    """So many lives are killed, and the last one ends as the uninterrupted run."""
    draw = random.Random(seed)
    job = {"samples": SAMPLES * size // 2, **CASES[name]}
    reference = lives_in("reference", **job).whole(size)
    lives = lives_in("killed", **job)
    for _ in range(kills):
        before = lives.snapshots()
        # However long its first snapshot takes, it is there to be killed.
        life = lives.start(size, pace=0.03, stands_at=12 + (before[-1][0] if before else 0))
        life.until(lambda: lives.snapshots() != before or not life.is_whole)  # noqa: B023
        life.reach(draw.randint(2, 6))
        time.sleep(draw.uniform(0.0, 0.05))  # a random moment
        victims = draw.choice([life.pids, life.pids[:1], life.pids[-1:]])
        kill(victims, writers=draw.random() < 0.5)
        if not any(lives.join()):
            break  # it was quicker
    else:
        life = lives.whole(size)
    starts = [require_continuation(one, reference) for one in lives.lives]
    assert len(set(starts)) > 1, f"nothing was resumed: {starts}"
    require_same_end(life, reference)
    reasons = [one["why"] for one in lives.report()["not_restored"]]
    if CASES[name].get("inexact"):
        assert all("dispatch_batches: where" in one for one in reasons), reasons  # a stream may end anywhere
    else:
        assert reasons == []
    if not CASES[name].get("stream"):
        require_each_sample_once(lives.lives, job["samples"])


def test_two_ranks_survive_kills(lives_in: Callable[..., Lives]) -> None:
    """The ranks are killed at a random moment, and the run is the uninterrupted one."""
    assert_survives("accumulation", 2, lives_in, kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_whatever_a_trainer_does(size: int, name: str, lives_in: Callable[..., Lives]) -> None:
    """Three kills at random steps."""
    assert_survives(name, size, lives_in, kills=3, seed=len(name) + size)


@pytest.mark.slow
def test_a_filled_last_batch_is_reported(lives_in: Callable[..., Lives]) -> None:
    """Accelerate fills it with the first samples of the pass: a resumed epoch is not exact, and the report says so."""
    lives = lives_in("lives", samples=61, arguments={"accelerator_config": {"dispatch_batches": True}})
    life = lives.start(stands_at=5)
    life.until(lambda: lives.snapshots() or not life.is_whole)
    kill(life.pids, writers=True)
    lives.join()
    lives.whole()
    reasons = [one["why"] for one in lives.report()["not_restored"]]
    assert len(reasons) == 1, reasons
    assert "dispatch_batches: where an epoch's last batch does not divide" in reasons[0]
