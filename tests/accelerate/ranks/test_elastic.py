"""Another number of ranks goes on with a `Trainer` where each step keeps its number of samples; else it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.accelerate.ranks.lives import Life, Lives, kill, require_each_sample_once
from tests.accelerate.ranks.train import SAMPLES

pytestmark = pytest.mark.timeout(600)


def of(batch: int, accumulate: int = 1, **more: Any) -> dict[str, Any]:
    return {"arguments": {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate, **more}}


def killed(lives: Lives, size: int, steps: int, **changes: Any) -> Life:
    """A life that trains and saves, stands still in its step after so many, and is killed there."""
    before = lives.snapshots()
    life = lives.start(size, stands_at=steps + (before[-1][0] if before else 0), **changes)
    life.until(lambda: not life.is_whole or lives.snapshots() != before)
    kill(life.pids, writers=True)
    assert any(lives.join()), life.log()
    return life


@pytest.mark.parametrize(
    "generations",
    [
        pytest.param([(2, of(4)), (1, of(8)), (2, of(4))], marks=pytest.mark.slow),
        pytest.param([(4, of(2)), (2, of(2, 2)), (2, of(2, 2)), (1, of(8))], marks=pytest.mark.slow),
        pytest.param([(1, of(4, 2)), (2, of(4)), (4, of(2)), (4, of(2))], marks=pytest.mark.slow),
    ],
    ids=["batch size", "fewer ranks accumulate", "more ranks"],
)
def test_generations(generations: list[tuple[int, dict[str, Any]]], lives_in: Callable[..., Lives]) -> None:
    """Each sample of each epoch comes once, and the run has as many steps as any of them would have had."""
    lives = lives_in("lives", samples=128)
    for size, changes in generations[:-1]:
        killed(lives, size, 5, **changes)
    size, changes = generations[-1]
    last = lives.whole(size, **changes)
    require_each_sample_once(lives.lives, 128)
    assert max(line["step"] for line in last.batches(0)) == 3 * 128 // 8 - 1
    assert lives.snapshots()[-1] == (3 * 128 // 8, "end")
    for life in lives.lives:
        assert len({life.batches(rank)[0]["step"] for rank in range(life.size)}) == 1


@pytest.mark.slow
def test_other_steps_are_refused(lives_in: Callable[..., Lives]) -> None:
    """With twice as many ranks an epoch would have half the steps; the message says what to change."""
    lives = lives_in("lives")
    killed(lives, 1, 3, **of(8))  # a snapshot of step 2, and of no other
    life = lives.start(2, lets_end=True, **of(8))
    assert any(lives.join()), life.log()
    assert "transformers would train 2 more batches of the epoch, the snapshot leaves 3" in life.exit(0), life.log()
    assert "gradient_accumulation_steps, so that each step has as many samples as before" in life.exit(0)
    last = lives.whole(2, **of(4))
    require_each_sample_once([lives.lives[0], last], SAMPLES)


@pytest.mark.slow
def test_a_run_that_would_end_at_once_is_refused(lives_in: Callable[..., Lives]) -> None:
    """In its last epoch, with so many ranks that transformers takes it for complete."""
    lives = lives_in("lives", options={"every_n_steps": 14})
    killed(lives, 1, 16, **of(8))
    life = lives.start(2, lets_end=True, **of(8))
    assert any(lives.join()), life.log()
    found = re.search(r"resumes in epoch 3, the snapshot is of epoch 1: the samples of a step", life.exit(0))
    assert found, life.log()
    assert "end" not in [reason for _, reason in lives.snapshots()]


@pytest.mark.slow
def test_a_dispatched_epoch_is_not_divided(lives_in: Callable[..., Lives]) -> None:
    """The message names the reason, and what goes on: as many processes as before."""
    lives = lives_in("lives")
    dispatched = {"accelerator_config": {"dispatch_batches": True}}
    killed(lives, 1, 3, **of(8, **dispatched))
    life = lives.start(2, lets_end=True, **of(4, **dispatched))
    assert any(lives.join()), life.log()
    assert "one process fetches the batches of all (dispatch_batches)" in life.exit(0), life.log()
    assert "resume with 1 rank to the end of the epoch" in life.exit(0)
    lives.whole(1, **of(8, **dispatched))
