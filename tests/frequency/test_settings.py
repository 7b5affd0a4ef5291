"""Frequency settings: which trigger is on, and refusal of impossible values."""

import math

import pytest

from ckpt_engine.errors import ConfigError
from ckpt_engine.frequency.policy import FrequencySettings


@pytest.mark.parametrize(
    ("options", "overhead"),
    [
        ({}, 0.01),
        ({"overhead": 0.05}, 0.05),
        ({"every_n_steps": 100}, None),
        ({"every_seconds": 600.0}, None),
        ({"every_n_steps": 100, "overhead": 0.02}, 0.02),
        ({"every_n_steps": 100, "max_lost_work_seconds": 60.0}, 0.01),
        ({"on_validation_end": True}, 0.01),
    ],
)
def test_a_fixed_interval_alone_switches_the_adaptive_trigger_off(
    options: dict[str, float], overhead: float | None
) -> None:
    """A budget or a maximum loss switches the adaptive trigger on beside it."""
    assert FrequencySettings.from_options(**options).overhead == overhead  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("overhead", 0.0),
        ("overhead", 1.5),
        ("overhead", math.nan),
        ("max_lost_work_seconds", -1.0),
        ("mtbf_seconds", math.inf),
        ("every_n_steps", 0),
        ("every_n_steps", 2.5),
        ("every_seconds", 0.0),
        ("slots", 0),
        ("bandwidth_bytes_per_second", 0.0),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, value: float) -> None:
    """The error names the field and the value."""
    with pytest.raises(ConfigError, match=rf"{name}.*not {value!r}"):
        FrequencySettings(**{name: value})  # type: ignore[arg-type]
