"""One file per bar: each has `TITLE` and `run(bench) -> BarResult`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from benchmarks.run import Bench
from benchmarks.values import BarResult

NAMES = (
    "stall",
    "persist",
    "upload",
    "many-tensors",
    "overhead",
    "accelerate",
    "every-iteration",
    "memory-tier",
    "restore",
    "memory",
    "listing",
)
"""Bars in the order in which they run and are shown."""


def title(name: str) -> str:
    """What a bar is about, in a few words."""
    return cast(str, _module(name, "TITLE"))


def runner(name: str) -> Callable[[Bench], BarResult]:
    """The function that measures a bar."""
    return cast(Callable[[Bench], BarResult], _module(name, "run"))


def _module(name: str, attribute: str) -> object:
    if name not in NAMES:
        raise ValueError(f"no bar {name!r}; there are {', '.join(NAMES)}")
    return getattr(importlib.import_module(f"benchmarks.bars.{name.replace('-', '_')}"), attribute)
