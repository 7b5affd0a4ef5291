"""Two ranks, one, four, two: each next life has the weights that were saved, and each sample comes once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.elastic_runs import SAMPLES, Lives, step_of
from tests.ranks.launch import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TRAINERS = ["lightning", "accelerate", "plain"]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Starts runs of any trainer."""
    made = Launcher("tests.ranks.train_elastic")
    yield made
    made.close()


def generations(lives: Lives, sizes: list[int], steps: list[int]) -> None:
    """Kill each life but the last after so many steps; every one that resumes has what was saved."""
    for size, after in zip(sizes[:-1], steps, strict=True):
        lives.run(size, kill_after=after, pace=0.03)
    assert lives.run(sizes[-1]) == [0] * sizes[-1], lives.logs()
    for life in range(1, len(sizes)):
        lives.require_saved_state(life)
    assert len({lives.start(life) for life in range(len(sizes))}) == len(sizes), "a life has saved nothing"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_generations_with_kills(trainer: str, launcher: Launcher, tmp_path: Path) -> None:
    """2 -> 1 -> 4 -> 2, all processes and writers killed each time."""
    lives = Lives(launcher, tmp_path, trainer, options={"writer": "process"})
    generations(lives, [2, 1, 4, 2], [5, 6, 3])
    lives.require_whole_epochs()
    report = lives.report()
    assert any("another number of ranks: 4 before, 2 now" in note for note in report["notes"]), report
    assert any(note.startswith("rng: derive") for note in report["notes"])
    assert lives.whole_logs().count("another number of ranks: 2 go on") == 1, "not said once"


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("sizes", [[1, 2], [4, 1], [1, 4], [2, 4]])
def test_one_change(trainer: str, sizes: list[int], launcher: Launcher, tmp_path: Path) -> None:
    """From one process and to one; the samples do not fill whole rows, and only that is made up for."""
    lives = Lives(launcher, tmp_path, trainer, samples=181)
    generations(lives, sizes, [4])
    padding = 4 * max(sizes) if trainer == "accelerate" else max(sizes)
    lives.require_whole_epochs(padding - 1)
    assert max(sum(line["epoch"] == 0 for line in lives.lines(1, rank)) for rank in range(sizes[1])) == min(
        sum(line["epoch"] == 0 for line in lives.lines(1, rank)) for rank in range(sizes[1])
    )


@pytest.mark.parametrize(
    ("trainer", "changes"),
    [
        ("accelerate", {"arguments": {"split_batches": True}}),
        ("accelerate", {"arguments": {"use_seedable_sampler": True}}),
        ("accelerate", {"arguments": {"even_batches": False}}),
        ("plain", {"shuffle": False}),
        ("lightning", {"workers": 2}),
    ],
)
def test_other_samplers(trainer: str, changes: dict[str, Any], launcher: Launcher, tmp_path: Path) -> None:
    """Every way in which these divide an epoch."""
    lives = Lives(launcher, tmp_path, trainer, **changes)
    generations(lives, [2, 4, 1], [5, 3])
    lives.require_whole_epochs()


@pytest.mark.parametrize(("trainer", "wrap"), [*((one, "first") for one in TRAINERS), ("plain", "late")])
@pytest.mark.parametrize("size", [2, 4])
def test_the_same_ranks_go_on_exactly_in_an_epoch_of_others(
    trainer: str, wrap: str, size: int, launcher: Launcher, tmp_path: Path
) -> None:
    """1 -> n killed -> n is bitwise 1 -> n: the seed of the script does not matter.

    From three ranks on DDP adds up gradients in another order in its first step than later, which is mended, also where
    a loop wraps its model after it has resumed.
    """
    lives = Lives(launcher, tmp_path, trainer, wrap=wrap)
    generations(lives, [1, size, size], [5, 3])
    start, middle = lives.start(1), lives.start(2)
    for path in (tmp_path / "run" / "snapshots").glob("*.json"):
        if step_of(path.name) != start:
            path.unlink()
    assert lives.run(size) == [0] * size, lives.logs()
    for rank in range(size):
        straight = [line for line in lives.lines(3, rank) if line["step"] >= middle]
        assert straight == lives.lines(2, rank)


def test_a_first_step_that_may_differ_is_said(launcher: Launcher, tmp_path: Path) -> None:
    """DDP was around the model, and is now around something that has it."""
    lives = Lives(launcher, tmp_path, "plain")
    lives.run(3, kill_after=5, pace=0.03)
    assert lives.run(3, wrap="around") == [0] * 3, lives.logs()
    (line,) = lives.report()["not_restored"]
    assert line["name"] == "order of sums of gradients"
    assert "is around fewer tracked models" in line["why"]


def test_lightning_counts_the_batches_of_the_epoch(launcher: Launcher, tmp_path: Path) -> None:
    """The epoch of two numbers of ranks has a length of its own: it accumulates, validates and ends by that."""
    arguments = {"accumulate_grad_batches": 2}
    lives = Lives(launcher, tmp_path, "lightning", arguments=arguments, validates=True, logs=True)
    generations(lives, [2, 1], [4])
    lives.require_whole_epochs()
    lines = lives.lines(1, 0)
    done = 2 * lives.start(1)
    total = done + (SAMPLES - done * 8) // 4
    epoch = [line for line in lines if line.get("epoch") == 0]
    assert [(line["batch"], line["batches"]) for line in epoch] == [(at, total) for at in range(done, total)]
    assert [line["step"] for line in epoch] == [at // 2 for at in range(done, total)]
    following = [line for line in lines if line.get("epoch") == 1]
    assert [(line["batch"], line["batches"]) for line in following] == [(at, 48) for at in range(48)]
    validated = [at for at, line in enumerate(lines) if "validated" in line]
    assert validated == [len(epoch), len(epoch) + 1 + len(following)], "a validation at another place"
    (problem,) = lives.report()["not_restored"]
    assert problem["name"] == "running means"


def test_lightning_says_of_a_logged_mean_one_thing(launcher: Launcher, tmp_path: Path) -> None:
    """One process does not know whether several reduce it: it begins again, and no rank has it."""
    lives = Lives(launcher, tmp_path, "lightning", logs=True)
    generations(lives, [1, 2], [4])
    (problem,) = lives.report()["not_restored"]
    assert problem["name"] == "running value of 'loss'"
