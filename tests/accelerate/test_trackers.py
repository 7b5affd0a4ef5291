"""`kill -9` at random moments: TensorBoard shows one curve, each step once, with the values of an unbroken run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate.log_script import run
from tests.lightning.log_script import read_mlflow
from tests.support.curves import Curve, kills, need, read_events, wait_for_a_snapshot
from tests.support.trainers import ForkServer, log, signal_after, wait_for_entries

PACE_SECONDS = 0.01
MOST_ENTRIES = 12
TIMED = ("runtime", "per_second", "flos")


class Trainers(ForkServer):
    """Jobs are those of `tests.accelerate.log_script`."""

    def __init__(self) -> None:
        super().__init__("tests.accelerate.log_script")


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    server = Trainers()
    yield server
    server.close()


def job_of(loop: str, folder: Path, life: Any, **more: Any) -> dict[str, Any]:
    """One start of the same command."""
    job = {"loop": loop, "folder": folder / "logs", "root": folder / "run", "trace": folder / f"{life}.trace"}
    return {**{key: str(value) for key, value in job.items()}, "seed": 0, "pace": PACE_SECONDS, **more}


def event_points(folder: Path) -> Curve:
    """Without those that measure time."""
    return [point for point in read_events(folder) if not any(one in point[0] for one in TIMED)]


def mlflow_points(folder: Path) -> Curve:
    """Of the one run below `folder`; the same."""
    return [point for point in read_mlflow(folder) if not any(one in point[0] for one in TIMED)]


@pytest.mark.parametrize(
    "loop", ["accelerate", "accelerate, trackers made last", "transformers", "transformers with mlflow"]
)
def test_a_killed_run_has_one_curve(loop: str, tmp_path: Path, trainers: Trainers) -> None:
    """Three processes are killed, and the fourth one ends the run."""
    loop, _, late = loop.partition(", ")
    loop, _, tool = loop.partition(" with ")
    tool = tool or "tensorboard"
    need(tool)
    more = {"tool": tool, **({"late": late} if late else {})}
    (tmp_path / "unbroken").mkdir()
    run(job_of(loop, tmp_path / "unbroken", 0, **more) | {"root": "", "pace": 0.0})
    points = {"tensorboard": event_points, "mlflow": mlflow_points}[tool]
    expected = points(tmp_path / "unbroken" / "logs")
    assert len(expected) > MOST_ENTRIES
    for life, (entries, delay_seconds) in enumerate(kills(MOST_ENTRIES)):
        job = job_of(loop, tmp_path, life, **more)
        pid = trainers.start(job)
        wait_for_entries(pid, Path(job["trace"]), entries)
        wait_for_a_snapshot(Path(job["root"]))
        signal_after(pid, delay_seconds)
        assert trainers.join() in (0, -signal.SIGKILL), log(job["trace"])
    job = job_of(loop, tmp_path, "last", **more)
    trainers.start(job)
    assert trainers.join() == 0, log(job["trace"])
    assert points(tmp_path / "logs") == expected


@pytest.mark.long
def test_runs_that_share_a_folder_keep_their_own(tmp_path: Path) -> None:
    """All runs of a project of Accelerate log into one folder: a resume takes away nothing of the others."""
    need("tensorboard")
    run(job_of("accelerate", tmp_path, "first") | {"root": str(tmp_path / "first"), "pace": 0.0})
    before = event_points(tmp_path / "logs")
    run(job_of("accelerate", tmp_path, "second") | {"root": str(tmp_path / "second"), "pace": 0.0})
    both = event_points(tmp_path / "logs")
    run(job_of("accelerate", tmp_path, "again") | {"root": str(tmp_path / "second"), "pace": 0.0})
    assert len(both) == 2 * len(before)
    assert event_points(tmp_path / "logs") == both
