"""Optimizer steps that no boundary follows: no snapshot can be taken, and a stop ends the run at one of them."""

from __future__ import annotations

import logging

from ckpt_engine.loop.boundary import Stopping
from ckpt_engine.observe.units import count
from ckpt_engine.preempt.stop_requests import Stop

_REPORTED_STEPS = 100
_MOST_UNSTOPPED = 4
"""Optimizer steps after which a loop that has shown no boundary yet is stopped at one of them."""


class MissedBoundaries:
    """Counts the optimizer steps of a loop since its last boundary.

    Args:
        stopping: of the run.
        log: of the adapter.
    """

    def __init__(self, stopping: Stopping, log: logging.Logger) -> None:
        self._stopping, self._log = stopping, log
        self._steps = self._unstopped = 0
        self._has_boundaries = False
        """There was a boundary where a stop could end the run."""

    def reached(self, *, can_stop: bool) -> None:
        """The loop is at a boundary."""
        self._steps = 0
        if can_stop:
            self._unstopped, self._has_boundaries = 0, True

    def stepped(self) -> Stop | None:
        """An optimizer has made a step; the stop that ends the run here, as no boundary comes."""
        self._steps += 1
        self._unstopped += 1
        if self._steps == _REPORTED_STEPS:
            self._report()
        stop = self._stopping.watch.stop
        if stop is None or self._unstopped < _MOST_UNSTOPPED or self._stopping.halt.done:
            return None
        waits = self._has_boundaries and self._stopping.halt.seconds_left(1.0) > 0.0
        return None if waits else stop

    def end(self) -> None:
        """The loop has ended, and has announced no step."""
        if 0 < self._steps < _REPORTED_STEPS:
            self._report()

    def _report(self) -> None:
        self._stopping.watch.unseen = True
        self._log.warning(
            "%s, and no tracked loader was asked for a batch meanwhile: no snapshot can be taken; "
            "call step() at the end of the loop's body, or iterate the tracked loader",
            count(self._steps, "optimizer step"),
        )
