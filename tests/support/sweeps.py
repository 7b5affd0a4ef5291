"""Sweeps over two things at once: the quick suite has each value of both, and the slow one each pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def crossed(firsts: Sequence[Any], seconds: Sequence[Any], whole: int = 1) -> list[Any]:
    """All pairs as parameters of a test. Quick are those of the first value of `seconds`, and of the first `whole` of
    `firsts`."""
    return [
        pytest.param(one, other, marks=pytest.mark.slow if row >= whole and column else ())
        for row, one in enumerate(firsts)
        for column, other in enumerate(seconds)
    ]
