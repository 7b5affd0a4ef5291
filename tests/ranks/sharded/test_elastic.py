"""FSDP1, FSDP2 and tensor parallelism on other numbers of ranks, killed each time: all that was saved is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.ranks.elastic_runs import Lives
from tests.ranks.launch import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Starts runs of any trainer."""
    made = Launcher("tests.ranks.train_elastic")
    yield made
    made.close()


def generations(lives: Lives, layouts: Sequence[tuple[int, str, int]]) -> None:
    """Lives of (ranks, layout, ranks that share a model), each killed after some steps but the last.

    A life that resumes has bitwise the weights and the optimizer state that were saved; each sample comes once; the
    ranks that share a model go on with the same samples and draws.
    """
    *killed, (size, layout, team) = layouts
    for number, (before, kind, together) in enumerate(killed):
        lives.run(before, layout=kind, team=together, kill_after=5 - number, pace=0.03)
    assert lives.run(size, layout=layout, team=team) == [0] * size, lives.logs()
    for life in range(1, len(layouts)):
        lives.require_saved_state(life)
    for life in range(len(layouts)):
        lives.require_teams(life)
    assert len({lives.start(life) for life in range(len(layouts))}) == len(layouts), "a life has saved nothing"
    lives.require_whole_epochs()


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_a_loop_with_other_numbers_of_ranks(layout: str, launcher: Launcher, tmp_path: Path) -> None:
    """2 -> 1 -> 4 in one epoch."""
    generations(Lives(launcher, tmp_path, "plain"), [(2, layout, 1), (1, layout, 1), (4, layout, 1)])


def test_a_loop_changes_its_layout(launcher: Launcher, tmp_path: Path) -> None:
    """FSDP1 -> FSDP2 -> DDP: a snapshot does not tell who has taken it."""
    generations(Lives(launcher, tmp_path, "plain"), [(4, "fsdp1", 1), (2, "fsdp2", 1), (4, "ddp", 1)])


@pytest.mark.parametrize("trainer", ["plain", "lightning"])
def test_tensor_parallelism_with_other_numbers_of_ranks(trainer: str, launcher: Launcher, tmp_path: Path) -> None:
    """2 -> 4 -> 2 ranks of which two share each layer; then one alone."""
    generations(Lives(launcher, tmp_path, trainer), [(2, "tp", 2), (4, "tp", 2), (2, "tp", 2), (1, "ddp", 1)])


@pytest.mark.parametrize("trainer", ["plain", "lightning"])
def test_tensor_parallelism_comes_and_goes(trainer: str, launcher: Launcher, tmp_path: Path) -> None:
    """FSDP2 on two ranks, then FSDP2 over tensor parallelism on four, then FSDP2 on two."""
    generations(Lives(launcher, tmp_path, trainer), [(2, "fsdp2", 1), (4, "tp", 2), (2, "fsdp2", 1)])


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_accelerate_with_other_numbers_of_ranks(layout: str, launcher: Launcher, tmp_path: Path) -> None:
    """2 -> 1 -> 4; alone it is not FSDP at all."""
    generations(Lives(launcher, tmp_path, "accelerate"), [(2, layout, 1), (1, layout, 1), (4, layout, 1)])


def test_lightning_with_other_numbers_of_ranks(launcher: Launcher, tmp_path: Path) -> None:
    """2 -> 1 -> 4."""
    generations(Lives(launcher, tmp_path, "lightning"), [(2, "fsdp2", 1), (1, "ddp", 1), (4, "fsdp2", 1)])
