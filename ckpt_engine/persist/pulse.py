"""The pulse: one page of memory in which the trainer says what it is doing, readable by the writer after its death."""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from typing import Any

_BEAT = struct.Struct("<qd")
_FILL = struct.Struct("<qq")
_FILL_OFFSET = 64


@dataclass(frozen=True, slots=True)
class Beat:
    """What the trainer said last: the step that it has begun, counted so that the snapshot before it has `step - 1`.

    `instant_monotonic` is the machine's `time.monotonic()` at that moment.
    """

    step: int
    instant_monotonic: float


@dataclass(frozen=True, slots=True)
class Fill:
    """The arena slot that the trainer has begun to fill last, and the job that it fills it for."""

    slot: int
    job: int


class Pulse:
    """The trainer's end: `fd` is what `WriterClient.attach_pulse` takes."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ckpt-pulse", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._page = mmap.mmap(self.fd, mmap.PAGESIZE)
        self.beat(-1)
        self.fill(-1, -1)

    def beat(self, step: int) -> None:
        """Say that `step` begins. Costs less than a microsecond; no system call."""
        _BEAT.pack_into(self._page, 0, step, time.monotonic())

    def fill(self, slot: int, job: int) -> None:
        """Say that `slot` changes from now on, for `job`. Costs as little as `beat`."""
        _FILL.pack_into(self._page, _FILL_OFFSET, slot, job)

    def close(self) -> None:
        """Give the page back; whoever has the descriptor keeps it. Idempotent."""
        if self.fd >= 0:
            self._page.close()
            os.close(self.fd)
            self.fd = -1


def read_pulse(fd: int) -> Beat | None:
    """The last beat; None if there was none, or the descriptor is something else than a pulse.

    Only of a trainer that is gone: a beat under way is read torn.
    """
    found = _read(fd, _BEAT, 0)
    return Beat(*found) if found is not None and found[0] >= 0 else None


def read_fill(fd: int) -> Fill | None:
    """What was filled last; None as `read_pulse`. Only of a trainer that is gone."""
    found = _read(fd, _FILL, _FILL_OFFSET)
    return Fill(*found) if found is not None and found[0] >= 0 else None


def _read(fd: int, kind: struct.Struct, offset: int) -> tuple[Any, ...] | None:
    try:
        data = os.pread(fd, kind.size, offset)
    except OSError:
        return None
    return kind.unpack(data) if len(data) == kind.size else None
