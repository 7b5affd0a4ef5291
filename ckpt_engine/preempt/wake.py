"""Wakes a thread, from anywhere: other threads, signal handlers, and the system itself when a signal comes.

Python runs signal handlers on the main thread between two steps of the interpreter. A main thread that waits inside of
a collective for a rank that is gone does not get there. What the system writes here at once reaches the thread anyway.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress

_READ_BYTES = 4096
_RUNG = b"\0"
"""No signal has the number 0."""


class Wake:
    """A bell. Rings nowhere before `open` and after `close`."""

    def __init__(self) -> None:
        self._read = self._write = -1
        self._hears_signals = self._over = False

    def open(self) -> None:
        """From now on it may be waited for."""
        if self._write < 0:
            self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        """Nobody waits any more. Idempotent. Off the main thread it stays open where it hears signals."""
        self.ignore_signals()
        self._over = True
        if self._hears_signals:
            return  # the system would write to whatever gets the descriptor next
        read, write, self._read, self._write = self._read, self._write, -1, -1
        if write >= 0:
            os.close(write)
            os.close(read)

    def ring(self) -> None:
        """Wake who waits, or who waits next. May be called in signal handlers."""
        if self._write >= 0:
            with suppress(BlockingIOError):  # it is full of rings
                os.write(self._write, _RUNG)

    def wait(self, seconds: float) -> list[int]:
        """Wait until it rings, at most so long; the numbers of the signals that rang."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        if not poll.poll(max(0.0, seconds) * 1000.0):
            return []
        with suppress(BlockingIOError):
            return [number for number in os.read(self._read, _READ_BYTES) if number]
        return []

    def hear_signals(self) -> None:
        """Let every signal that has a handler in Python ring, unless somebody else hears them already (asyncio).

        On the main thread, after `open`. Another bell that hears them does not any more: its run was refused, say, and
        never ended.
        """
        global _hearer
        if self._write < 0 or self._hears_signals:
            return
        before, other = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False), _hearer
        if before >= 0 and (other is None or before != other._write):
            signal.set_wakeup_fd(before)
            return
        self._hears_signals, _hearer = True, self
        if other is not None:
            other._hears_signals = False
            if other._over:
                other.close()

    def ignore_signals(self) -> None:
        """Undo `hear_signals`. On the main thread. Idempotent."""
        global _hearer
        if not self._hears_signals or threading.current_thread() is not threading.main_thread():
            return
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._write):
            signal.set_wakeup_fd(before)  # somebody has replaced us meanwhile
        self._hears_signals, _hearer = False, None


_hearer: Wake | None = None
"""The bell that signals ring."""


def _after_fork() -> None:
    """What comes to a fork is not for the thread of its parent."""
    global _hearer
    if _hearer is not None:
        _hearer = None
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_after_fork)
