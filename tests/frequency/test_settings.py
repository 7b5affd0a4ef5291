"""Frequency settings: which trigger is on."""

from typing import Any

import pytest

from ckpt_engine.config import load_config
from ckpt_engine.frequency.policy import FrequencySettings


@pytest.mark.parametrize(
    ("options", "overhead"),
    [
        ({}, 0.01),
        ({"overhead": 0.05}, 0.05),
        ({"every_n_steps": 100}, None),
        ({"every_seconds": 600.0}, None),
        ({"every_n_steps": 100, "overhead": 0.02}, 0.02),
        ({"every_n_steps": 100, "max_lost_work": 60.0}, 0.01),
        ({"on_validation_end": True}, 0.01),
    ],
)
def test_a_fixed_interval_alone_switches_the_adaptive_trigger_off(
    options: dict[str, Any], overhead: float | None
) -> None:
    """A budget or a maximum loss switches the adaptive trigger on beside it."""
    assert FrequencySettings.of(load_config("/d", **options)).overhead == overhead
