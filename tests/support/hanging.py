"""A place that hangs while its run is asked: its time is over as soon as all other places have answered."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckpt_engine.restore import ask_tiers

WAIT_SECONDS = 60.0


class Hanging:
    """Hangs in `here`, and is the clock by which `restore.ask_tiers` waits for an answer, once."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self._hangs = threading.Event()
        self._hanging: threading.Thread | None = None
        self._asked = False
        self.later = math.inf
        """Seconds that have passed when all others have answered."""

    def here(self) -> None:
        """Hang until the end of the test."""
        self._hanging = threading.current_thread()
        self._hangs.set()
        assert self._end.wait(WAIT_SECONDS)

    def end(self) -> None:
        """Hang no longer."""
        self._end.set()

    def monotonic(self) -> float:
        """No time passes before everybody else has answered, and then all of it."""
        if not self._asked:
            self._asked = True
            return 0.0
        assert self._hangs.wait(WAIT_SECONDS)
        for thread in threading.enumerate():
            if thread.name == "ckpt-places" and thread is not self._hanging:
                thread.join(WAIT_SECONDS)
        return self.later


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    """For one question to several places."""
    made = Hanging()
    monkeypatch.setattr(ask_tiers, "time", made)
    try:
        yield made
    finally:
        made.end()
