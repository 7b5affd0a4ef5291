"""Two processes of DDP are killed and resumed: rank 0 reports what both have found at the steps that they repeat."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.observe.resume_report import Replay, ReplayDifference, ResumeReport
from ckpt_engine.store.rows import read_lives
from ckpt_engine.store.storage.local import LocalStorage
from tests.ranks.launch import Launcher
from tests.restore.memory_tier.lives import until

SNAPSHOT, KILL, END = 4, 7, 9
"""Each so many steps there is a snapshot; both ranks are killed behind a step; those that resume end after another."""
SIZE, KILLED = 2, -9
Resume = Callable[..., tuple[Replay, str]]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher("tests.ranks.train_proved")
    yield made
    made.close()


@pytest.fixture(scope="module", params=["plain", pytest.param("lightning", marks=pytest.mark.slow)])
def resume(request: pytest.FixtureRequest, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Resume:
    """Resumes a run that was killed, each time as it was; what it reports, and what rank 0 says."""
    folder = tmp_path_factory.mktemp(request.param)
    job = {"trainer": request.param, "every": SNAPSHOT, "ends": END, "at_end": False}
    job |= {"changes": [], "noisy": None, "seed": 1}
    lives = iter(range(99))

    def live(root: Path, *, kills: int, status: int, **changes: Any) -> str:
        log = folder / f"log{next(lives)}"
        launcher.start({**job, "root": str(root), "kills": kills, **changes}, SIZE, log)
        assert launcher.join() == [status] * SIZE, Path(f"{log}.0").read_text() + Path(f"{log}.1").read_text()
        return Path(f"{log}.0").read_text()

    live(folder / "killed", kills=KILL, status=KILLED)
    storage = LocalStorage(str(folder / "killed"))

    def recorded(rank: int) -> int:
        return max((row.step for life in read_lives([storage], rank) for row in life.rows), default=0)

    until(lambda: [recorded(rank) for rank in range(SIZE)] == [KILL] * SIZE, lambda: "the writers keep no rows")

    def resumed(**changes: Any) -> tuple[Replay, str]:
        root = folder / f"run{next(lives)}"
        shutil.copytree(folder / "killed", root, ignore=shutil.ignore_patterns(".tmp-*"))  # the writers live on
        said = live(root, kills=0, status=0, seed=2, **changes)
        found = ResumeReport.from_json(json.loads((root / "resume-report.json").read_text())).replay
        assert found is not None
        return found, said

    return resumed


def test_rank_0_reports_a_proof_where_both_have_proved_their_steps(resume: Resume) -> None:
    """Neither noise nor order of the two ranks is the same, nor the seed of the resumed processes."""
    replay, said = resume()
    count = KILL - SNAPSHOT
    assert (replay.result, replay.steps, replay.first) == ("exact", count, None)
    assert said.count(f"resume proved exact: {count} of {count} repeated steps gave the same batches and weights") == 1


def test_training_may_end_with_the_last_repeated_step(resume: Resume) -> None:
    """Rank 1 makes it when rank 0 has ended training: the last snapshot waits for both."""
    replay, said = resume(ends=KILL, at_end=True)
    assert (replay.result, replay.steps) == ("exact", KILL - SNAPSHOT), said


@pytest.mark.parametrize(
    ("changes", "rank", "step", "what"),
    [
        ({"changes": [(1, 6), (0, 7)]}, 1, 6, "weights"),
        ({"noisy": 1}, 1, 5, "batch"),
        pytest.param({"changes": [(0, 5), (1, 7)]}, 0, 5, "weights", marks=pytest.mark.slow),
        pytest.param({"changes": [(1, KILL)]}, 1, KILL, "weights", marks=pytest.mark.slow),
    ],
    ids=["rank 1 is first", "data of rank 1, weights of both", "rank 0 is first", "the last repeated step"],
)
def test_the_earliest_difference_is_reported_with_its_rank(
    resume: Resume, changes: dict[str, Any], rank: int, step: int, what: str
) -> None:
    """Gradients are averaged, so that both ranks differ one step later. The next snapshot names replicas apart."""
    replay, said = resume(**changes)
    assert replay.result == "different"
    assert isinstance(first := replay.first, ReplayDifference)
    assert (first.step, first.what) == (step, what)
    assert replay.why.startswith(f"on rank {rank}: ")
    assert said.count("resume not exact: ") == 1
    assert said.count(f"replicas differ at step {2 * SNAPSHOT}: ") == ("changes" in changes)
