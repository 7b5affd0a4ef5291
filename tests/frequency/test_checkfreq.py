"""CheckFreq's Algorithm 1 against hand-computed values."""

import pytest

from ckpt_engine.frequency.checkfreq import Profile, plan


@pytest.mark.parametrize(
    ("profile", "overhead", "steps", "mode"),
    [
        (Profile(1, 0.1, 3, 0.2, 10, 1, 10, 80), 0.035, 13, "device"),
        (Profile(1, 0.1, 3, 0.2, 10, 1, 79.5, 80), 0.035, 60, "cpu"),
        (Profile(1, 0.1, 0.5, 0.2, 4, 1, 10, 80), 0.035, 5, "cpu"),
        (Profile(0.2, 0.02, 0.15, 0.01, 0.05, 1, 10, 80), 0.05, 1, "cpu"),
    ],
)
def test_golden_values(profile: Profile, overhead: float, steps: int, mode: str) -> None:
    """The four worked examples give the known interval and the known place of the copy."""
    result = plan(profile, overhead)
    assert (result.interval_steps, result.mode) == (steps, mode)


def test_exact_multiples_do_not_cost_a_step() -> None:
    """A stall of 0.7 against 5 % is 14 steps, although 0.7 / 0.05 is not 14 in binary arithmetic."""
    assert plan(Profile(1, 0, 1.7, 9, 0, 1, 0, 0), 0.05).interval_steps == 14
