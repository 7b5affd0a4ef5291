"""Time passes at once for calls that hang, and as ever for all others, however slow the machine is."""

from __future__ import annotations

import math
import threading

import pytest

from ckpt_engine.store.storage import watchdog
from ckpt_engine.store.storage.watchdog import StuckCallRunner
from tests.writer.staged import WAIT_SECONDS

_this = threading.local()


def let_time_pass_where_calls_hang(patch: pytest.MonkeyPatch) -> None:
    """From now on a call hangs only if it calls `it_hangs`; a slow machine makes no other call look like it."""
    run = StuckCallRunner._run

    def noted(lane: StuckCallRunner, *call: object) -> None:
        _this.lane = lane
        run(lane, *call)  # type: ignore[arg-type]

    patch.setattr(StuckCallRunner, "_run", noted)
    patch.setattr(watchdog, "STALL_SECONDS", WAIT_SECONDS)


def it_hangs() -> None:
    """Say that the call on this thread hangs: all who wait for it give up at once."""
    lane: StuckCallRunner | None = getattr(_this, "lane", None)
    if lane is not None:
        lane.progress.moved(-math.inf)
        lane.look()


def until_it_is_back(url: str) -> None:
    """Wait until no call to a tier is left: one that has hung frees its slot before others may use the tier."""
    for thread in threading.enumerate():
        if thread.name == f"ckpt-tier {url}":
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), f"{thread.name} does not end"
