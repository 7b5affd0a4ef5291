"""SIGTERM, a grace, and a `kill -9` at its end: what is durable then is what the arithmetic allows, or what was said.

Graces of 5, 30 and 120 seconds, tiers of 50 MB/s to 2 GB/s and states of 0.1 to 100 GB are scaled down together, so
that a run is over in seconds: what matters is how long a write, a step and the grace are beside each other.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt_engine.preempt.stop_plan import MARGIN
from tests.lightning.test_kill import Trainers
from tests.preempt.lives import Life

SCALE = 10.0
GRACES = (5.0, 30.0, 120.0)
SPEEDS = (50e6, 100e6, 200e6, 500e6, 1e9, 2e9)
STATES = (0.1e9, 0.5e9, 2e9, 8e9, 30e9)
RUNS = 60
NOISE_SECONDS = 0.25
"""What a process does beside: bookkeeping, hooks, and waiting for a core of a busy machine."""


@dataclass(frozen=True)
class Draw:
    """One run, in seconds that pass. `pressed`: a snapshot is on its way whenever the writer is free."""

    grace: float
    write: float
    step: float
    pressed: bool
    delay: float
    text: str

    @property
    def must_succeed(self) -> bool:
        """The rest of the step, what is in both slots, and the new snapshot fit, even at the slowest pace allowed."""
        queued = (2 if self.pressed else 1) * self.write
        return self.step + MARGIN * (queued + self.write) + NOISE_SECONDS <= self.grace


def drawn(number: int) -> Draw:
    """The run of that number: half of them near the border of what fits."""
    draw = random.Random(number)
    while True:
        grace, speed, state = draw.choice(GRACES), draw.choice(SPEEDS), draw.choice(STATES)
        made = Draw(
            grace / SCALE,
            state / speed / SCALE,
            draw.choice((0.02, 0.1, 0.3)) * grace / SCALE,
            draw.random() < 0.4,
            draw.random(),
            f"grace {grace:.0f} s, {state / 1e9:g} GB at {speed / 1e6:.0f} MB/s",
        )
        if 0.005 <= made.write <= 1.2 * made.grace and made.write + made.step < 6.0:
            return made


@pytest.mark.slow
@pytest.mark.parametrize("number", range(RUNS))
def test_what_fits_is_durable(number: int, tmp_path: Path, trainers: Trainers) -> None:
    """The step that runs, or the one before it; and where it does not fit, the log says what is lost instead."""
    run = drawn(number)
    life = Life(
        trainers,
        tmp_path,
        "shuffled",
        pace=run.step,
        write_seconds=run.write,
        trainer={"max_epochs": 10_000},
        options={
            "every_n_steps": 1 if run.pressed else 10**9,
            "every_seconds": 0.5 + 3 * run.write,
            "writer": "thread",
            "preemption": {"grace": run.grace},
        },
    )
    # A speed is measured once a snapshot is durable.
    life.until(lambda: life.root.exists() and life.steps)
    threading.Event().wait(run.delay * max(run.step, run.write))  # a moment within a step, with or without a write
    before = trained(life)
    os.kill(life.pid, signal.SIGTERM)
    killer = threading.Timer(run.grace, kill, (life.pid,))
    killer.start()
    status = life.join()
    killer.cancel()
    killer.join()
    log, newest = life.log, life.steps[-1]
    print(f"{run.text}: {'fits' if run.must_succeed else 'tight'}, step {before}, durable {newest}, status {status}")
    # The step that ran is number `before`; the one before it was finished.
    if run.must_succeed:
        assert newest >= before - 1, f"{run}\n{log}"
        assert status == 143, log
    elif newest < before - 1:
        assert re.search(r"\d+ steps? (is|are) lost|not durable yet|is tried on", log), f"{run}\n{log}"
    assert_promise_was_kept(log, newest, run)


def trained(life: Life) -> int:
    """Batches that were begun."""
    return sum(line.startswith("('train'") for line in life.lines)


def kill(pid: int) -> None:
    """As a scheduler does when the grace is over; the writer is a thread and goes with it."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def assert_promise_was_kept(log: str, newest: int, run: Draw) -> None:
    """What the plan at the boundary said to become durable is durable, up to the noise of the machine."""
    for left, step, needed in re.findall(
        r"SIGTERM: (\S+ \S+) left: a snapshot of step (\d+) will be durable on \S+ within (\S+ \S+)", log
    ):
        if seconds(needed) + NOISE_SECONDS <= seconds(left):
            assert newest >= int(step), f"{run}\n{log}"


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"ms": 1e-3, "s": 1.0, "min": 60.0}[unit]
