"""The pulse: one page of memory in which the trainer reports its progress.

The writer can read it after the death of the trainer.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
import weakref
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from ckpt_engine.copy.host_memory import shared_memory
from ckpt_engine.observe.run_times import MEASURED, TIMES, RunTimes

_BEAT = struct.Struct("<qd")
_FILL = struct.Struct("<qq")
_FILL_OFFSET = 64
_SPENT_NAMES = (*TIMES, *MEASURED)
_SPENT = struct.Struct(f"<qdqq{len(_SPENT_NAMES)}d512sq")
_SPENT_OFFSET = 128
_SPENT_SECONDS = 1.0
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What the trainer said last: the step that it has begun, counted so that the snapshot before it has `step - 1`.

    `instant_monotonic` is the machine's `time.monotonic()` at that moment.
    """

    step: int
    instant_monotonic: float


@dataclass(frozen=True, slots=True)
class SpentTimes:
    """What the trainer says of its time; see `attempts.Attempt` for these fields."""

    started: float
    step: int
    times: dict[str, float]
    resumed_at: int = -1
    proof: str = ""


class HeartbeatPage:
    """The trainer's end: `fd`, which is closed with it, is what `WriterClient.attach_pulse` takes.

    Raises:
        StateError: the system refuses the memory.
    """

    def __init__(self) -> None:
        self.fd, self._page = shared_memory("ckpt-pulse", mmap.PAGESIZE)
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._step, self._moment = self._page[:8].cast("q"), self._page[8:16].cast("d")
        self._count, self._spends_at = 0, -math.inf
        self.beat(-1)
        self.fill(-1, -1)

    def beat(self, step: int) -> bool:
        """Say that `step` begins; whether it is time to `spend` again. Costs less than a microsecond."""
        now = time.monotonic()
        self._step[0], self._moment[0] = step, now
        return now >= self._spends_at

    def fill(self, slot: int, job: int) -> None:
        """Say that `slot` changes from now on, for `job`. Costs as little as `beat`."""
        _FILL.pack_into(self._page, _FILL_OFFSET, slot, job)

    def spend(self, times: RunTimes) -> None:
        """Say what the time went into."""
        self._count, self._spends_at = self._count + 1, time.monotonic() + _SPENT_SECONDS
        measured = times.measured()
        values = map(float, (*times.seconds.values(), *map(measured.get, MEASURED, repeat(0.0))))
        proof = b"" if times.replay is None else times.replay.text().encode()
        about = (times.started, times.step, times.resumed_at if times.step >= 0 else -1)
        _SPENT.pack_into(self._page, _SPENT_OFFSET, self._count, *about, *values, proof, self._count)


def read_pulse(fd: int) -> Heartbeat | None:
    """The last beat; None if there was none, or the descriptor is something else than a pulse.

    Of a trainer that lives the two numbers may be of two beats.
    """
    found = _read(fd, _BEAT, 0)
    return Heartbeat(*found) if found is not None and found[0] >= 0 else None


def read_fill(fd: int) -> tuple[int, int] | None:
    """The arena slot that the trainer has begun to fill last, and the job that it fills it for; None as `read_pulse`.

    Only of a trainer that is gone.
    """
    slot, job = _read(fd, _FILL, _FILL_OFFSET) or (-1, -1)
    return (slot, job) if slot >= 0 else None


def read_spent(fd: int) -> SpentTimes | None:
    """What the time went into, as it was said last; None as `read_pulse`. Also of a trainer that lives."""
    for _ in range(_LOOKS):
        found, again = _read(fd, _SPENT, _SPENT_OFFSET), _read(fd, _SPENT, _SPENT_OFFSET)
        if found is None or found[0] == 0:
            return None
        if found == again and found[0] == found[-1]:
            _, started, step, resumed_at, *values, proof, _ = found
            begun = read_pulse(fd)
            step = step if begun is None else max(step, begun.step - 1)  # it is said at each step
            times = {name: round(one, 6) for name, one in zip(_SPENT_NAMES, values, strict=True) if one >= 1e-6}
            return SpentTimes(started, step, times, resumed_at, proof.rstrip(b"\0").decode(errors="ignore"))
    return None


def _read(fd: int, kind: struct.Struct, offset: int) -> tuple[Any, ...] | None:
    try:
        data = os.pread(fd, kind.size, offset)
    except OSError:
        return None
    return kind.unpack(data) if len(data) == kind.size else None
