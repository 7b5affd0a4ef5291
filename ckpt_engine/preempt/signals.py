"""Signals that ask a run to stop: a handler that notes them, and gives everything else to who was there before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ckpt_engine.observe.clock import Clock
from ckpt_engine.preempt.notice import StopNotice
from ckpt_engine.preempt.wake import Wake

_SHELL_CODE = 128


class SignalWatch:
    """Notes the first of some signals.

    The handler sets an attribute, wakes who waits on `wake`, and calls the handler that was there before. It runs
    between any two steps of the interpreter, so it takes no lock and logs nothing. Who waits may hear of the signal
    before it, see `note`. From then on the end of a child
    process is no news: a signal to the whole job ends loader workers too, and torch's handler would raise in the middle
    of the step that is to be finished. The first Ctrl-C is only noted, the
    second one interrupts at once. In a fork of the process (loader workers) nothing is noted: a Ctrl-C, which goes to
    the whole group of processes, is ignored there, and every other signal does what it would without us.

    Args:
        signals: which ones.
        clock: the source of moments.
        wake: rings with every signal; open.
    """

    def __init__(self, signals: Sequence[signal.Signals], clock: Clock, wake: Wake) -> None:
        self._signals = tuple(signals)
        self._now = clock.monotonic
        self._wake = wake
        self._owner = os.getpid()
        self._previous: dict[int, Any] = {}
        self._handler = self._handle  # a bound method is a new object each time
        self._pressed = False
        self._of_children: Any = None
        self.heard: StopNotice | None = None
        self.interrupted = False
        """Whether there was a second Ctrl-C."""

    def install(self) -> list[str]:
        """Start watching; what cannot be watched, and why. Signals belong to the main thread of Python."""
        if threading.current_thread() is not threading.main_thread():
            return [f"{one.name}: training does not run on the main thread" for one in self._signals]
        problems = []
        for number in self._signals:
            previous = signal.getsignal(number)
            if previous is None:
                problems.append(f"{number.name}: its handler was not set by Python and could not be put back")
            elif number is not signal.SIGINT or previous is not signal.SIG_IGN:  # ignored under nohup: it stays so
                self._previous[number] = previous
                signal.signal(number, self._handler)
        if self._previous:
            self._wake.hear_signals()
        return problems

    def note(self, number: int) -> None:
        """A signal came, and the main thread may be where no handler can run. Any thread."""
        if self.heard is None and number in self._previous:
            self.heard = notice_of(number, self._now())

    def remove(self) -> None:
        """Put back what was there, unless somebody else has replaced us meanwhile. Idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._wake.ignore_signals()
        if self._of_children is not None and signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL:
            signal.signal(signal.SIGCHLD, self._of_children)
        while self._previous:
            number, previous = self._previous.popitem()
            if signal.getsignal(number) == self._handler:
                signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if os.getpid() != self._owner:
            self._handle_in_fork(number, frame, previous)
            return
        again = number == signal.SIGINT and self._pressed
        self._pressed |= number == signal.SIGINT
        self.interrupted |= again
        if self.heard is None:
            self.heard = notice_of(number, self._now())
        if self._of_children is None:
            self._of_children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._wake.ring()
        if callable(previous) and (previous is not signal.default_int_handler or again):
            previous(number, frame)

    def _handle_in_fork(self, number: int, frame: FrameType | None, previous: Any) -> None:
        if number == signal.SIGINT:
            return
        if callable(previous):
            previous(number, frame)
        elif previous is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def notice_of(number: int, instant: float) -> StopNotice:
    """The notice that a signal is; the process ends as a shell reports it, with 128 and the signal's number."""
    interrupts = number == signal.SIGINT
    who = "Ctrl-C" if interrupts else signal.Signals(number).name
    return StopNotice(who, instant, exit_code=_SHELL_CODE + number, interrupts=interrupts)
