"""A policy that learns, in place of the one that trains: what it has learned, and that it is asked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.frequency.failures import weibull
from ckpt_engine.frequency.policy import FrequencySettings, MemoryRhythm
from ckpt_engine.observe.events import MACHINE, PROCESS, SITE, AttemptsFound
from ckpt_engine.tools.simulate import Restart, SimulatedJob

HOUR = 3600.0


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples/plugins"))
    import learned_policy

    return learned_policy


def test_a_young_process_that_often_fails_is_believed_to_fail_soon(learned: Any) -> None:
    """Nine of ten lives end within a minute; an older one is safe for hours. Without evidence all are alike."""
    lasted = (*(60.0,) * 18, *(10 * HOUR,) * 2)
    hazard = learned.Hazard(AttemptsFound(lasted, (PROCESS,) * 20))
    assert hazard.factor(30.0) > 3.0
    assert hazard.factor(2000.0) < 1.0
    assert learned.Hazard(AttemptsFound((), ())).factor(30.0) == 1.0


def test_stalls_that_come_in_phases_are_expected_to_go_on(learned: Any) -> None:
    """A stall that comes alone is not expected to go on."""
    phases, alone = learned.Stalls(), learned.Stalls()
    for number in range(400):
        phases.learn(0.7 if number // 50 % 2 else 3.0)
        alone.learn(56.0 if number % 33 == 32 else 0.7)
    assert phases.expected() == pytest.approx(0.7, abs=0.2)
    alone.learn(56.0)
    assert alone.expected() < 5.0


@pytest.mark.long
@pytest.mark.parametrize("name", ["Learned", "Sampled"])
def test_it_drives_a_job_with_its_memory_of_earlier_lives(learned: Any, name: str) -> None:
    """The learned policy takes the place of the cadence, snapshots in memory included."""
    settings = FrequencySettings(memory=MemoryRhythm())
    training = {"settings": settings, "step_seconds": 5.0, "persist": 14.0}
    restart = Restart({PROCESS: 60.0, MACHINE: 300.0, SITE: 900.0}, 30.0, 30.0)
    made: list[Any] = []

    def rhythm(*given: Any) -> Any:
        made.append(getattr(learned, name)(settings, *given))
        return made[-1]

    job = SimulatedJob(weibull(0.7, 2 * HOUR, random.Random(7)), 3 * 24 * HOUR, restart, training, rhythm=rhythm).run()
    ours = SimulatedJob(weibull(0.7, 2 * HOUR, random.Random(7)), 3 * 24 * HOUR, restart, training).run()
    assert sum(made[-1].hazard.failed) >= len(made) - 1 > 10
    assert job.goodput == pytest.approx(ours.goodput, abs=0.02)
    assert job.goodput != ours.goodput
