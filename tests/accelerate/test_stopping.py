"""Scripts that get a stop request end at a boundary with a sensible status, and lose nothing of their work."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate.hf import train_hf
from tests.accelerate.runs import train_accelerate
from tests.accelerate.test_exact_resume import CASES
from tests.accelerate.test_kill import Trainers, log
from tests.loop.runs import every_boundary, only, resume_only, saved, stuck_case, train_plain
from tests.support.trainers import go_on, signal_after

WAITING_SECONDS = 0.5
"""After these it surely waits; if not, it stops at the same boundary all the same."""
RARELY: dict[str, Any] = {"every_n_steps": 10**9}


def job_of(folder: Path, number: int, loop: str, **options: Any) -> dict[str, Any]:
    """Life `number` of a script that takes no snapshot by itself."""
    return {
        "loop": loop,
        "case": "evaluation within epochs",
        "accumulate": 2,
        "epochs": 3,
        "root": str(folder / "run"),
        "trace": str(folder / f"{number}.trace"),
        "seed": 1000 * number,
        "options": {**RARELY, **options},
    }


def uninterrupted(loop: str) -> list[str]:
    """The trace of a run without a stop."""
    case = replace(CASES["evaluation within epochs"], accumulate=2, epochs=3)
    reference = {"accelerate": train_accelerate, "plain": train_plain}[loop](case, None)
    return [repr(entry) for entry in (*reference.trace, ("digest", reference.digest))]


@pytest.mark.parametrize("loop", ["accelerate", pytest.param("plain", marks=pytest.mark.slow)])
def test_sigterm_loses_nothing(loop: str, tmp_path: Path, trainers: Trainers) -> None:
    """143, as a shell reports it; the next life goes on with the next batch, bit for bit."""
    job = {**job_of(tmp_path, 0, loop), "wait_after": 5}

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        go_on(job["trace"])

    code, first = trainers.ends(job, 5, stop)
    assert code == 143, log(job)
    (snapshot,) = saved(tmp_path / "run")
    assert snapshot.reason == "signal"
    assert re.search(r"SIGTERM: a snapshot at the end of this step, then training stops; [\d.]+ s left", log(job))
    assert "is durable on" in log(job)
    second = trainers.live(job_of(tmp_path, 1, loop), None)
    assert [*first, *second] == uninterrupted(loop)


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "ahead"), [("plain", 0), ("accelerate", 1)])
def test_a_signal_that_ends_the_workers_a_loop_waits_for_loses_nothing(
    loop: str, ahead: int, tmp_path: Path, trainers: Trainers
) -> None:
    """Schedulers signal the whole job: the batch that the loop waits for never comes, and it is still the boundary.

    Accelerate waits for it one batch earlier, because it fetches ahead.
    """
    steps = 4 - ahead
    job = {**job_of(tmp_path, 0, loop), "stuck": True}
    code, first = trainers.ends(job, steps, lambda pid: signal_after(-pid, WAITING_SECONDS, signal.SIGTERM))
    assert code == 143, log(job)
    assert [(one.step, one.batch, one.reason) for one in saved(tmp_path / "run")] == [(steps, steps, "signal")]
    second = trainers.live({**job_of(tmp_path, 1, loop), "stuck": False}, None)
    reference = {"accelerate": train_accelerate, "plain": train_plain}[loop](stuck_case(stuck=False), None)
    assert [*first, *second] == [repr(entry) for entry in (*reference.trace, ("digest", reference.digest))]


@pytest.mark.slow
def test_a_stop_file_stops_the_script_and_the_status_file_says_so(tmp_path: Path, trainers: Trainers) -> None:
    """It may stay there: the next life is not stopped by it."""
    stop, status = tmp_path / "STOP", tmp_path / "status.json"
    options = {"preemption": {"sources": [{"file": str(stop), "every": 0.01}]}, "status": {"file": str(status)}}
    job = job_of(tmp_path, 0, "plain", **options)
    code, first = trainers.ends(job, 5, lambda _: stop.touch())
    assert code == 143, log(job)
    text = status.read_text()
    assert '"ended": true' in text
    assert f'"stopping": "the file {stop}"' in text
    second = trainers.live(job_of(tmp_path, 1, "plain", **options), None)
    assert [*first, *second] == uninterrupted("plain")


class Signals(list[Any]):
    """A trace that sends this process a SIGTERM when it has so many entries."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self._entries = entries

    def append(self, entry: Any) -> None:
        super().append(entry)
        if len(self) == self._entries:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_a_trainer_of_transformers_too(tmp_path: Path) -> None:
    """In the middle of an accumulation the step is finished first; nothing of the end of a training is done."""
    arguments = {"gradient_accumulation_steps": 2}
    before = signal.getsignal(signal.SIGTERM)
    reference = train_hf(arguments, None, tmp_path / "out")
    first = Signals(3)
    with pytest.raises(SystemExit) as ended:
        train_hf(arguments, every_boundary(tmp_path / "run", **RARELY), tmp_path / "out", trace=first)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    (snapshot,) = saved(tmp_path / "run")
    assert (snapshot.step, snapshot.reason) == (2, "signal")
    root = only(tmp_path / "run", snapshot, tmp_path / "resumed")
    resumed = train_hf(arguments, resume_only(root), tmp_path / "out", seed=11)
    assert [*first, *resumed.trace] == reference.trace
    assert resumed.digest == reference.digest
