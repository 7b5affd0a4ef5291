"""Quantities with and without units."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.config import parse_duration_seconds, parse_fraction
from ckpt_engine.config.option_types import (
    SECONDS_PER_UNIT,
    parse_bytes,
    parse_bytes_per_second,
    parse_count,
    parse_flag,
)


@pytest.mark.parametrize(
    ("value", "share"), [("1%", 0.01), ("3.5 %", 0.035), (0.01, 0.01), ("0.01", 0.01), ("1e-2", 0.01), (" 5% ", 0.05)]
)
def test_a_share_is_a_percentage_or_a_number(value: object, share: float) -> None:
    """`1%`, `0.01` and the text `1e-2` that YAML 1.1 readers deliver mean the same."""
    assert parse_fraction(value) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("value", ["", "%", "1%%", "one", None, True, [0.01], "0.01 s", "nan", "nan%"])
def test_what_is_no_share_is_refused(value: object) -> None:
    """A share has no unit other than percent, and a boolean is not a number."""
    with pytest.raises(ValueError, match="must be a share"):
        parse_fraction(value)


@pytest.mark.parametrize("value", [0, 1, -0.1, "0%", "100%", "-1%", 5, "250%"])
def test_a_share_lies_strictly_between_0_and_1(value: object) -> None:
    """A budget of nothing or of everything is impossible."""
    with pytest.raises(ValueError, match="above 0% and below 100%"):
        parse_fraction(value)


def test_a_bare_5_asks_whether_percent_was_meant() -> None:
    """`overhead: 5` is most likely a forgotten percent sign."""
    with pytest.raises(ValueError, match="for 5 percent write '5%'"):
        parse_fraction(5)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("90", 90.0),
        ("1e3", 1000.0),
        ("90 s", 90.0),
        ("250ms", 0.25),
        ("10 min", 600.0),
        ("10m", 600.0),
        ("1.5 hours", 5400.0),
        ("1h30min", 5400.0),
        ("1 h 30 min", 5400.0),
        ("2 Days", 172800.0),
        ("1 week", 604800.0),
    ],
)
def test_a_duration_has_units_or_is_in_seconds(value: object, seconds: float) -> None:
    """Numbers are seconds; texts may add units up."""
    assert parse_duration_seconds(value) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "value",
    ["", "soon", "10 parsecs", "10 M", "1 h 30", "min", "10:00", "1 h, 5 min", None, False, [1], math.nan, "inf"],
)
def test_what_is_no_duration_is_refused(value: object) -> None:
    """Ambiguous texts (`10:00`, `1 h 30`, a capital M) are refused instead of guessed."""
    with pytest.raises(ValueError, match="must be a duration such as"):
        parse_duration_seconds(value)


@pytest.mark.parametrize("value", [0, -1, "-10 min", "0 s", "1 h -60 min"])
def test_a_duration_is_positive(value: object) -> None:
    """No time and negative time are impossible."""
    with pytest.raises(ValueError, match="above 0"):
        parse_duration_seconds(value)


@given(st.floats(1e-3, 5e3), st.sampled_from(sorted(SECONDS_PER_UNIT)), st.sampled_from(["", " "]))
def test_number_times_unit(number: float, unit: str, gap: str) -> None:
    """A number followed by a unit is their product, for every unit."""
    assert parse_duration_seconds(f"{number!r}{gap}{unit}") == pytest.approx(number * SECONDS_PER_UNIT[unit])


@pytest.mark.parametrize("value", [1e300, "40000 days", 2**63])
def test_a_duration_is_one_that_a_clock_of_the_system_waits_for(value: object) -> None:
    """A thread that is to wait longer dies of it."""
    with pytest.raises(ValueError, match="at most 100 years"):
        parse_duration_seconds(value)


@given(st.text(max_size=20) | st.floats() | st.integers() | st.none() | st.booleans())
def test_any_value_is_a_positive_duration_or_refused(value: object) -> None:
    """No input makes the parser fail in another way or return an impossible duration."""
    try:
        seconds = parse_duration_seconds(value)
    except ValueError:
        return
    assert 0 < seconds < math.inf


@pytest.mark.parametrize(("value", "count"), [(1, 1), ("500", 500), ("1e3", 1000), (1000.0, 1000), ("1_000", 1000)])
def test_a_count_is_a_whole_number(value: object, count: int) -> None:
    """Whole numbers in any notation are counts."""
    parsed = parse_count(value)
    assert parsed == count
    assert type(parsed) is int


@pytest.mark.parametrize("value", [0, -3, 1.5, "x", None, True, "1 step", math.inf])
def test_what_is_no_count_is_refused(value: object) -> None:
    """Fractions, zero, negative numbers, booleans and units are not counts."""
    with pytest.raises(ValueError, match="whole number"):
        parse_count(value)


@pytest.mark.parametrize(("value", "flag"), [(True, True), ("yes", True), ("On", True), (False, False), ("off", False)])
def test_a_flag_takes_both_yaml_dialects(value: object, flag: bool) -> None:
    """What one YAML dialect reads as a boolean and another as a text means the same."""
    assert parse_flag(value) is flag


@pytest.mark.parametrize("value", [0, 1, "maybe", "", None])
def test_what_is_no_flag_is_refused(value: object) -> None:
    """A number is not a flag."""
    with pytest.raises(ValueError, match="true or false"):
        parse_flag(value)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        ("500 GB", 500 * 10**9),
        ("1.5TB", 1500 * 10**9),
        ("64 GiB", 64 << 30),
        ("1e3 kB", 10**6),
        ("10 MB ", 10**7),
        ("10mb", 10**7),
        ("10 KB", 10**4),
        ("12 B", 12),
        ("12", 12),
        ("2 G", 2 * 10**9),
    ],
)
def test_a_size_is_bytes_or_has_a_unit(value: object, nbytes: int) -> None:
    """`GB` is a power of 1000 and `GiB` of 1024."""
    assert parse_bytes(value) == nbytes


@pytest.mark.parametrize(
    "value", ["", "GB", "10 Gb", "10 XB", "10%", "1 GB 2 MB", None, True, [1], "nan", -1, 0, "0 GB"]
)
def test_what_is_no_size_is_refused(value: object) -> None:
    """`Gb` would be bits, and nothing is no size."""
    with pytest.raises(ValueError, match="must be a size"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("value", "rate"), [("200 MB/s", 2e8), (5e7, 5e7), ("1 GiB / s", 1 << 30), ("100", 100), ("3 MB/sec", 3e6)]
)
def test_a_rate_is_bytes_per_second(value: object, rate: float) -> None:
    """A size per second, or a plain number."""
    assert parse_bytes_per_second(value) == rate


@pytest.mark.parametrize("value", ["200 MB", "200 Mb/s", "/s", "fast", 0, None, "200 MB/min"])
def test_what_is_no_rate_is_refused(value: object) -> None:
    """A size alone is no rate."""
    with pytest.raises(ValueError, match="must be a rate such as '200 MB/s'"):
        parse_bytes_per_second(value)
