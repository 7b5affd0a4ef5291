"""`ckpt goodput`: what the time of a run went into, from the record that its writers keep."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.observe.events import CLOSED, FAILED, GONE, AttemptsFound
from ckpt_engine.observe.run_times import RunTimes
from ckpt_engine.store import names
from ckpt_engine.tools.simulate import VirtualClock
from ckpt_engine.writer.attempts import Attempt, AttemptHistory, encode_attempts
from ckpt_engine.writer.control import Control
from ckpt_engine.writer.messages import Reply
from tests.support import interpreters

Ckpt = Callable[..., Any]
PATIENCE_SECONDS = 60.0
HOUR = 3600.0
LIVES = (
    Attempt("node1", "a", 60.0, 10 * HOUR - 60.0, GONE, started=0.0001, step=3000, times={"startup": 60.0, "training": 35700.0, "slowdown": 300.0, "slowdown_error": 20.0, "stall": 200.0}),  # noqa: E501
    Attempt("node1", "b", 10 * HOUR + 160.0, HOUR, None, started=10 * HOUR + 100.0, step=3200, times={"startup": 40.0, "restore": 20.0, "replay": 600.0, "training": 2900.0, "stall": 50.0}),  # noqa: E501
    Attempt("node2", "c", 11 * HOUR + 1960.0, 2 * HOUR, CLOSED, started=11 * HOUR + 1900.0, step=3900, times={"startup": 40.0, "restore": 20.0, "replay": 100.0, "training": 6900.0, "stall": 50.0, "validation": 120.0}),  # noqa: E501
)  # fmt: skip


class SteadyClock:
    """A wall clock that shows what the other one does."""

    def __init__(self, clock: VirtualClock) -> None:
        self.monotonic = self.wall = clock.monotonic


def record(root: Path, *rows: Attempt) -> Path:
    (root / names.ATTEMPTS).write_bytes(encode_attempts(AttemptHistory(rows)))
    return root


def test_a_table_whose_sum_is_the_wall_time(ckpt: Ckpt, run_folder: Any) -> None:
    """The rows add up to the time of all attempts and between them, within 80 columns."""
    done = ckpt("goodput", record(run_folder.path, *LIVES))
    lines = done.out.splitlines()
    assert lines[0] == f"goodput 92.7 % of 14 h at {run_folder.path}"
    assert [line.split()[0] for line in lines[3:-3]] == [
        "productive", "slowdown", "stall", "replay", "restore", "startup", "validation", "end", "down",
    ]  # fmt: skip
    assert "± 40 s" in next(line for line in lines if line.startswith("slowdown"))
    assert lines[-2] == "3 attempts, 2 failures (1 of process, 1 of machine)"
    assert lines[-1] == "the last attempt ended, or was stopped"
    assert max(map(len, lines[1:])) <= 80
    answer = ckpt("goodput", run_folder.path, "--json").json
    assert sum(answer["seconds"].values()) == pytest.approx(answer["wall_seconds"]) == 13 * HOUR + 1960.0
    assert answer["goodput"] == pytest.approx((35700.0 - 300.0 + 2900.0 + 6900.0) / answer["wall_seconds"], abs=1e-5)
    assert answer["seconds"]["down"] == pytest.approx(100.0 + 1740.0)
    assert answer["seconds"]["replay"] == pytest.approx(600.0 + 100.0 + 40.0 + 50.0)
    assert [one["step"] for one in answer["attempts"]] == [3000, 3200, 3900]


def test_what_loggers_get_is_what_the_command_shows(ckpt: Ckpt, run_folder: Any) -> None:
    """Of all attempts, the one that trains included; and how long ranks have waited for each other."""
    clock = VirtualClock(now=11 * HOUR + 1960.0)
    times = RunTimes(SteadyClock(clock), age=60.0)
    spent, until = AttemptHistory(LIVES[:2]).over
    times.found(AttemptsFound((1.0, 1.0), ("", ""), reached=3200, spent=asdict(spent), until=until))
    times.begin()
    clock.now += 2 * HOUR
    times.waited("stall", 50.0)
    times.boundary(3300)
    times.measured = lambda: {"slowdown": 20.0, "idle": 90.0}
    numbers = times.spent.numbers()
    last = replace(LIVES[2], end=None, times=times.seconds | dict(times.measured()), started=LIVES[2].began - 60.0)
    answer = ckpt("goodput", record(run_folder.path, *LIVES[:2], last), "--json").json
    assert numbers["goodput_percent"] == pytest.approx(100.0 * answer["goodput"])
    for name, seconds in answer["seconds"].items():
        assert numbers[f"run_{name}_seconds"] == pytest.approx(seconds, abs=1e-6), name
    assert sum(seconds for name, seconds in numbers.items() if name.startswith("run_") and "error" not in name) == (
        pytest.approx(answer["wall_seconds"])
    )
    assert numbers["idle_percent"] == pytest.approx(100.0 * answer["idle_share"]) != 0.0
    assert "ranks waited for each other for 0.2 %" in ckpt("goodput", run_folder.path).out


def test_a_run_that_trains_here_is_asked(ckpt: Ckpt, run_folder: Any) -> None:
    """What its writer has recorded may be a minute old."""
    began = time.time() - 100.0
    record(run_folder.path, Attempt("here", "a", began, 30.0, times={"training": 30.0}))
    said = {"started": began, "step": 99, "times": {"training": 95.0}}
    control = Control(str(run_folder.path), lambda _: Reply({"trainer": True, "spent": said}))
    control.open(PATIENCE_SECONDS)
    try:
        answer = ckpt("goodput", run_folder.path, "--json").json
    finally:
        control.close(PATIENCE_SECONDS)
    assert answer["attempts"][0]["step"] == 99
    assert answer["wall_seconds"] == pytest.approx(100.0, abs=30.0)
    assert "trains, or was lost" in ckpt("goodput", run_folder.path).out


def test_what_an_older_version_recorded_is_not_known(ckpt: Ckpt, run_folder: Any) -> None:
    """A record of an older version says only how long an attempt lasted."""
    record(run_folder.path, Attempt("here", "a", 1000.0, 500.0, FAILED))
    answer = ckpt("goodput", run_folder.path, "--json").json
    assert (answer["goodput"], answer["seconds"]["unknown"]) == (0.0, 500.0)


def test_without_a_record_the_message_says_what_to_look_at(ckpt: Ckpt, run_folder: Any) -> None:
    """A damaged record is named in the message as well."""
    done = ckpt("goodput", run_folder.path)
    assert (done.code, done.out) == (2, "")
    assert f"no attempts are recorded at {run_folder.path}" in done.err
    assert "ckpt ls" in done.err
    (run_folder.path / names.ATTEMPTS).write_bytes(b"{}")
    done = ckpt("goodput", run_folder.path)
    assert done.code == 2
    assert names.ATTEMPTS in done.err


SCRIPT = """
import os, signal, sys, time
print(time.time(), flush=True)
import torch
from ckpt_engine import Checkpointer
root, dies_at = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(400, 32), batch_size=4)
with Checkpointer(root, every_n_steps=20) as ckpt:
    run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
    for epoch in range(run.epoch, 3):
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)  # a step that computes something
            if run.global_step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
    print(time.time())
"""


@pytest.mark.long
def test_the_parts_of_a_real_run_that_is_killed_twice_add_up(ckpt: Ckpt, tmp_path: Path) -> None:
    """To the time from its first start until its end: the record is read that three processes have left."""
    script, root = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    interpreters.run([sys.executable, "-c", ""])  # what it imports is no time of the run
    asked, lines = time.time(), list[str]()
    for dies_at in (70, 150, -1):
        command = [sys.executable, str(script), str(root), str(dies_at)]
        done = interpreters.run(command, capture_output=True, text=True)
        assert (done.returncode == 0) == (dies_at < 0), done.stderr
        lines += done.stdout.split()
    ended = time.time()
    first, *_, last = map(float, lines)
    answer = ckpt("goodput", root, "--json").json
    spent = answer["seconds"]
    assert last - first <= sum(spent.values()) <= ended - asked
    assert [one["end"] for one in answer["attempts"]] == [GONE, GONE, CLOSED]
    assert spent["productive"] >= 300 * 0.01
    assert spent["replay"] >= 9 * 0.01
    assert min(spent["startup"], spent["restore"], spent["stall"]) > 0.0
    assert spent["unknown"] == 0.0
