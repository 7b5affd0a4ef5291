"""Requests to stop: from signals, a file, a command, a cloud's page or the launcher, and as values.

Python runs signal handlers on the main thread between two steps of the interpreter. A main thread that waits inside a
collective for a rank that is gone does not get there. What the system writes to a `Wake` reaches its thread at once.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from ckpt_engine.config.sections import Source
from ckpt_engine.observe.clock import Clock
from ckpt_engine.writer.channel import readable

ANSWER_SECONDS = 5.0
"""How long a page or a command may take."""
_PAGE_BYTES = 65_536
_LAUNCHERS = (
    *("accelerate", "accelerate-launch", "accelerate.commands.accelerate_cli", "accelerate.commands.launch"),
    *("torchrun", "torch.distributed.run"),
)
"""Programs and modules whose only work is to start processes that train, and to wait for them."""
_LOOK_SECONDS = 1.0
EXIT_CODE_OF_NOTICES = 143
"""As if SIGTERM had come: schedulers take it for a job that was stopped and is not complete."""
_READ_BYTES = 4096
_hearer: Wake | None = None
"""The bell that signals ring."""
_installed: list[SignalWatch] = []
_forking = threading.local()


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
        self.signals = tuple(signals)
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
            return [f"{one.name}: training does not run on the main thread" for one in self.signals]
        problems = []
        for number in self.signals:
            previous = signal.getsignal(number)
            if previous is None:
                problems.append(f"{number.name}: its handler was not set by Python and could not be put back")
            elif number is not signal.SIGINT or previous is not signal.SIG_IGN:  # ignored under nohup: it stays so
                self._previous[number] = previous
                signal.signal(number, self._handler)
        if self._previous:
            self._wake.hear_signals()
            _installed.append(self)
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
        if self in _installed:
            _installed.remove(self)
        if self._of_children is not None and signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL:
            signal.signal(signal.SIGCHLD, self._of_children)
        while self._previous:
            number, previous = self._previous.popitem()
            if signal.getsignal(number) == self._handler:
                signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return
        previous = self._previous.get(number)
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

    def leave_fork(self) -> None:
        """In a fork: put back what was there, but for Ctrl-C. Ours would never run where the fork waits in C."""
        for number, previous in self._previous.items():
            if number != signal.SIGINT and signal.getsignal(number) == self._handler:
                signal.signal(number, previous)


def notice_of(number: int, instant: float) -> StopNotice:
    """The notice that a signal is; the process ends as a shell reports it, with 128 and the signal's number."""
    interrupts = number == signal.SIGINT
    who = "Ctrl-C" if interrupts else signal.Signals(number).name
    return StopNotice(who, instant, exit_code=128 + number, interrupts=interrupts)


@dataclass(frozen=True, slots=True)
class PreemptionSource:
    """Something that may know that the process is about to be stopped. Used by one thread.

    Args:
        ask: who wants the run to stop, for people; None: it goes on. Returns within some seconds; raises
            `PreemptionSourceError` where there is no answer.
        clock: the source of moments.
        every_seconds: how often it is asked.
        grace_seconds: that its notices leave; None: as configured.
    """

    ask: Callable[[], str | None]
    clock: Clock
    every_seconds: float
    grace_seconds: float | None = None

    def poll(self) -> StopNotice | None:
        """A notice, if there is one now.

        Raises:
            PreemptionSourceError: the source does not answer; it is asked again later.
        """
        who = self.ask()
        return None if who is None else StopNotice(who, self.clock.monotonic(), self.grace_seconds)


def _of_file(path: Path) -> Callable[[], str | None]:
    """A stop-file: it appears, or is touched or replaced.

    One that is there when the run starts is from an earlier stop: it counts once it changes.
    """
    before: tuple[int, int] | None = None

    def look() -> tuple[int, int] | None:
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        except OSError as err:
            raise PreemptionSourceError(f"the file {path} cannot be looked at: {err.strerror or err}") from err
        return stat.st_ino, stat.st_mtime_ns

    def ask() -> str | None:
        nonlocal before
        found = look()
        if found is not None and found != before:
            return f"the file {path}"
        before = found
        return None

    with suppress(PreemptionSourceError):  # `ask` will say it
        before = look()
    return ask


def _of_page(url: str, options: Source) -> Callable[[], str | None]:
    """A page that is missing (404, 410) or does not match as long as nothing is wrong, as clouds have them.

    It is asked with GET, never through a proxy: metadata services are on the machine, and a proxy would ask those of
    another one.
    """
    request = urllib.request.Request(url, headers=dict(options.headers))
    host = urlsplit(url).netloc.rpartition("@")[2]  # in messages, without a password
    match = re.compile("" if options.match is None else options.match)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask() -> str | None:
        try:
            page = _read(opener, request)
        except urllib.error.HTTPError as err:
            with err:
                if err.code in (404, 410):
                    return None
                raise PreemptionSourceError(f"{host} answers {err.code} {err.reason}") from err
        except (OSError, ValueError) as err:
            raise PreemptionSourceError(f"{host} does not answer: {err}") from err
        return f"a notice of {host}" if match.search(page) else None

    return ask


def _read(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> str:
    """What the page says, at most so much of it and for so long: a server may send a byte a second."""
    deadline = time.monotonic() + ANSWER_SECONDS
    parts: list[bytes] = []
    with opener.open(request, timeout=ANSWER_SECONDS) as answer:
        while sum(map(len, parts)) < _PAGE_BYTES and (part := answer.read1(_PAGE_BYTES)):
            parts.append(part)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no whole answer within {ANSWER_SECONDS:.0f} s")
    return b"".join(parts).decode("utf-8", "replace")


def _ask_command(command: Sequence[str]) -> str | None:
    """A command that ends with 0 if the run must stop, and with 1 if not; anything else is trouble. No shell."""
    name = command[0]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as err:
        raise PreemptionSourceError(f"the command {name} did not end within {ANSWER_SECONDS:.0f} s") from err
    except OSError as err:
        raise PreemptionSourceError(f"the command {name} cannot be run: {err.strerror or err}") from err
    if done.returncode in (0, 1):
        return None if done.returncode else f"the command {name}"
    said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    raise PreemptionSourceError(f"the command {name} ended with {done.returncode}{f': {said}' if said else ''}")


def launcher_source(clock: Clock) -> PreemptionSource | None:
    """What watches the parent of this process, if that is a launcher: who has stopped it wants no training to go on.

    `accelerate launch` ends at a SIGTERM and does not pass it on; any launcher may be killed.
    """
    parent = os.getppid()
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    # The program may be a script of an interpreter, or a module: `python -m torch.distributed.run`.
    first = [word for word in words[:4] if not word.startswith("-")]
    name = next((Path(word).name for word in first if Path(word).name in _LAUNCHERS), None)
    if name is None:
        return None

    ended = f"the end of {name} (process {parent}), which has started this"
    return PreemptionSource(lambda: None if os.getppid() == parent else ended, clock, _LOOK_SECONDS)


def open_source(options: Source, clock: Clock) -> PreemptionSource:
    """The source that one entry of `preemption.sources` describes."""
    if options.file is not None:
        ask = _of_file(Path(options.file))
    elif options.http is not None:
        ask = _of_page(options.http, options)
    else:
        ask = partial(_ask_command, tuple(options.command or ()))
    return PreemptionSource(ask, clock, options.every, options.grace)


@dataclass(frozen=True, slots=True)
class StopNotice:
    """Somebody wants the run to stop.

    Args:
        who: for people, e.g. `SIGTERM` or `the file /run/STOP`.
        instant: monotonic seconds at which it was noticed.
        grace_seconds: until the process is killed; None: as configured.
        exit_code: with which the process ends.
        interrupts: it is a Ctrl-C: training ends with `KeyboardInterrupt`.
    """

    who: str
    instant: float
    grace_seconds: float | None = None
    exit_code: int = EXIT_CODE_OF_NOTICES
    interrupts: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """The run stops: everything must be over at `deadline` (monotonic seconds)."""

    notice: StopNotice
    deadline: float


class PreemptionSourceError(Exception):
    """A preemption source did not answer. Reported once, and never to the user's code."""


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
        """No thread waits any more. Idempotent. Off the main thread it stays open where it hears signals."""
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
                os.write(self._write, b"\0")  # no signal has this number

    def wait(self, seconds: float) -> list[int]:
        """Wait until it rings, at most so long; the numbers of the signals that rang."""
        if not readable(max(0.0, seconds), self._read):
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


def _before_fork() -> None:
    """A signal to a fork waits until its handlers are right: Python drops what comes before.

    Not Ctrl-C, which a fork ignores: what its handler raises would be lost where it runs in `_after_fork`.
    """
    signals = {number for one in _installed for number in one.signals} - {signal.SIGINT}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_fork() -> None:
    """What comes to a fork is not for its parent."""
    global _hearer
    for one in _installed:
        one.leave_fork()
    if _hearer is not None:
        _hearer = None
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_fork)
