"""Durations, sizes and shares as people read them."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.units import duration, share, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1e-7, "0 s"),
        (0.0042, "4.2 ms"),
        (0.05, "50 ms"),
        (0.211, "211 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (9.0, "9 s"),
        (14.7, "15 s"),
        (99.4, "99 s"),
        (99.6, "1.7 min"),
        (600.0, "10 min"),
        (6 * 3600.0, "6 h"),
        (12 * 86400.0, "12 d"),
        (math.inf, "forever"),
        (math.nan, "unknown"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """Two digits and the unit people would choose."""
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (312, "312 B"), (1500, "1.5 kB"), (1.5e9, "1.5 GB"), (214e9, "214 GB"), (3e12, "3 TB")],
)
def test_sizes(nbytes: float, text: str) -> None:
    """Sizes are shown in decimal units."""
    assert size(nbytes) == text


@pytest.mark.parametrize(("fraction", "text"), [(0.01, "1 %"), (0.035, "3.5 %"), (0.0002, "0.02 %"), (1.0, "100 %")])
def test_shares(fraction: float, text: str) -> None:
    """Per cent with two digits."""
    assert share(fraction) == text


@given(st.floats(min_value=0.0, max_value=1e12))
def test_durations_never_show_an_exponent(seconds: float) -> None:
    """No duration is shown as `1e+02 s`."""
    assert "e+" not in duration(seconds)


def test_system_clock_reads_the_clocks_of_the_machine() -> None:
    """`monotonic` is that of `time`, so that both processes of a run agree."""
    assert time.monotonic() <= SystemClock().monotonic() <= time.monotonic()
    assert time.time() - 60 < SystemClock().wall() < time.time() + 60
