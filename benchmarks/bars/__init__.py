"""One file per bar: each has `TITLE` and `run(bench) -> BarResult`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import cast

from benchmarks.run import Bench
from benchmarks.values import BarResult

NAMES = (
    "stall",
    "persist",
    "upload",
    "many-tensors",
    "overhead",
    "budget",
    "short-runs",
    "irregular",
    "accelerate",
    "profile",
    "every-iteration",
    "peers",
    "memory-tier",
    "memory-ranks",
    "restore",
    "memory",
    "ranks",
    "node",
    "incremental",
    "listing",
    "recorder",
    "cuda",
    "codecs",
    "parity",
    "follow",
    "seal",
)
"""Bars in the order in which they run and are shown."""
STUDIES = ("study-checkfreq", "study-rojas", "study-learned")
"""Measured beside published numbers, one at a time: `python -m benchmarks study NAME`."""


def title(name: str) -> str:
    """What a bar is about, in a few words."""
    return cast(str, _module(name, "TITLE"))


def runner(name: str) -> Callable[[Bench], BarResult]:
    """The function that measures a bar."""
    return cast(Callable[[Bench], BarResult], _module(name, "run"))


def can_run(name: str) -> bool:
    """Whether this machine has what the bar measures."""
    import torch

    return not getattr(_imported(name), "NEEDS_GPU", False) or torch.cuda.is_available()


def _module(name: str, attribute: str) -> object:
    return getattr(_imported(name), attribute)


def _imported(name: str) -> ModuleType:
    if name not in (*NAMES, *STUDIES):
        raise ValueError(f"no bar {name!r}; there are {', '.join(NAMES)}")
    folder, file = ("studies", name.partition("-")[2]) if name in STUDIES else ("bars", name.replace("-", "_"))
    return importlib.import_module(f"benchmarks.{folder}.{file}")
