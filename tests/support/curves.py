"""Reads back what loggers wrote, and waits for a run's first snapshot."""

from __future__ import annotations

import importlib.util
import random
import time
from pathlib import Path

import pytest

from tests.support.trainers import PATIENCE_SECONDS

Curve = list[tuple[str, int, str]]
"""Tag, step and value of every point, in order."""


def need(package: str) -> None:
    """Skip where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")


def read_events(folder: Path) -> Curve:
    """The scalars of the one folder below that has event files, as TensorBoard's own reader finds them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (found,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    reader = EventAccumulator(str(found), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return [
        (tag, point.step, repr(point.value))
        for tag in sorted(reader.Tags()["scalars"])
        if "ckpt/" not in tag
        for point in reader.Scalars(tag)
    ]


def kills(most: int, number: int = 0) -> list[tuple[int, float]]:
    """Entries of the trace before each of three kills, and seconds after that; 0: others in every run."""
    draw = random.SystemRandom() if number == 0 else random.Random(number)
    return [(draw.randint(4, most), draw.uniform(0, 0.05)) for _ in range(3)]


def wait_for_a_snapshot(root: Path) -> None:
    """A start before the first one is a run of its own."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any((root / "snapshots").glob("*.json")):
        assert time.monotonic() < deadline, "no snapshot"
        time.sleep(0.001)
