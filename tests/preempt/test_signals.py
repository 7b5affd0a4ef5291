"""Signals are noted, passed on, and given back; forks of the process are left alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.preempt.stop_requests import SignalWatch, Wake

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The test process gets its own handlers back."""
    before = {number: signal.getsignal(number) for number in (TERM, INT, USR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def watch(*numbers: signal.Signals) -> SignalWatch:
    made = SignalWatch(numbers, SystemClock(), Wake())
    assert made.install() == []
    return made


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_is_noted_with_its_moment_and_exit_code() -> None:
    """128 and its number, as shells say it. The first one stays."""
    before = SystemClock.monotonic()
    watched = watch(TERM, USR1)
    send(USR1)
    send(TERM)
    assert watched.heard is not None
    assert (watched.heard.who, watched.heard.exit_code, watched.heard.interrupts) == ("SIGUSR1", 138, False)
    assert before <= watched.heard.instant <= SystemClock.monotonic()


def test_the_handler_that_was_there_is_called_each_time_and_put_back() -> None:
    """Lightning's, a scheduler's, the user's own."""
    calls: list[str] = []

    def theirs(number: int, frame: Any) -> None:
        calls.append("theirs")

    signal.signal(TERM, theirs)
    watched = watch(TERM)
    send(TERM)
    send(TERM)
    assert calls == ["theirs", "theirs"]
    watched.remove()
    assert signal.getsignal(TERM) is theirs
    watched.remove()


def test_a_handler_that_came_later_stays() -> None:
    """A handler that replaced ours stays when we remove ours."""
    watched = watch(TERM)

    def later(number: int, frame: Any) -> None:
        pass

    signal.signal(TERM, later)
    watched.remove()
    assert signal.getsignal(TERM) is later


def test_the_first_ctrl_c_is_noted_and_the_second_interrupts() -> None:
    """Python's own handler is passed by once."""
    signal.signal(INT, signal.default_int_handler)
    watched = watch(INT)
    send(INT)
    assert watched.heard is not None and watched.heard.interrupts and watched.heard.who == "Ctrl-C"
    with pytest.raises(KeyboardInterrupt):
        send(INT)


def test_a_ctrl_c_after_another_signal_interrupts_at_the_second_press_too() -> None:
    """The first Ctrl-C of a run that stops already is noted, and the second one interrupts, as in any other run."""
    signal.signal(INT, signal.default_int_handler)
    watch(TERM, INT)
    send(TERM)
    send(INT)
    with pytest.raises(KeyboardInterrupt):
        send(INT)


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """A process under nohup ignores Ctrl-C, and goes on to ignore it."""
    signal.signal(INT, signal.SIG_IGN)
    watch(INT)
    assert signal.getsignal(INT) is signal.SIG_IGN


def test_signals_are_not_taken_on_other_threads() -> None:
    """Python allows it on the main one only: that is said, and nothing fails."""
    problems: list[str] = []
    made = SignalWatch([TERM], SystemClock(), Wake())
    before = signal.getsignal(TERM)
    thread = threading.Thread(target=lambda: problems.extend(made.install()) or made.remove())
    thread.start()
    thread.join(60)
    assert problems == ["SIGTERM: training does not run on the main thread"]
    assert signal.getsignal(TERM) is before


def in_fork(action: Callable[[], object]) -> int:
    """The exit status of a fork that does something; negative: a signal killed it."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_notes_nothing_and_ends_as_it_would_without_us() -> None:
    """`terminate` of a loader worker still works; a Ctrl-C, which the terminal sends to all, leaves it alone."""
    signal.signal(TERM, signal.SIG_DFL)
    watched = watch(TERM, INT)
    assert in_fork(lambda: send(TERM)) == -TERM
    assert in_fork(lambda: send(INT)) == 7
    assert in_fork(lambda: os._exit(signal.getsignal(TERM) is signal.SIG_DFL)) == 1, "it also ends one that waits in C"
    assert watched.heard is None


@pytest.mark.long
def test_a_signal_that_comes_to_a_fork_at_once_ends_it() -> None:
    """It may come before the fork has run a line, as `Pool.terminate` does to a worker that is just made."""
    signal.signal(TERM, signal.SIG_DFL)
    watch(TERM, INT)
    reader, writer = os.pipe()
    try:
        for _ in range(25):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                os.read(reader, 1)
                os._exit(7)
            os.kill(child, TERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -TERM
    finally:
        os.close(reader)
        os.close(writer)


def test_a_fork_passes_signals_on_to_the_handler_that_was_there() -> None:
    """It may be the one that ends it."""
    signal.signal(TERM, lambda number, frame: os._exit(9))
    watch(TERM)
    assert in_fork(lambda: send(TERM)) == 9


def test_a_run_that_never_ended_does_not_keep_signals_from_the_next_one() -> None:
    """A refused training never closes its watch, or closes it from another thread: the next run still gets signals."""
    for closes in (False, True):
        first, second = Wake(), Wake()
        for bell in (first, second):
            bell.open()
        watched = SignalWatch([USR1], SystemClock(), second)
        try:
            first.hear_signals()
            if closes:
                thread = threading.Thread(target=first.close)
                thread.start()
                thread.join(60.0)
            assert watched.install() == []
            send(USR1)
            assert second.wait(60.0) == [USR1]
        finally:
            watched.remove()
            first.close()
            second.close()
    assert signal.set_wakeup_fd(-1) == -1


def test_a_thread_hears_a_signal_while_the_main_one_is_stuck() -> None:
    """Handlers run between two steps of the interpreter, and inside of a collective there are none. Forks are alone."""
    bell = Wake()
    bell.open()
    watched = SignalWatch([USR1], SystemClock(), bell)
    heard: list[int] = []
    try:
        assert watched.install() == []
        thread = threading.Thread(target=lambda: heard.extend(bell.wait(60.0)))
        thread.start()
        send(USR1)
        thread.join(60.0)
        assert heard == [USR1]
        watched.heard = None
        watched.note(TERM)  # a signal that it does not watch
        assert watched.heard is None
        watched.note(USR1)
        assert watched.heard is not None and watched.heard.who == "SIGUSR1"
        bell.wait(0.0)
        assert in_fork(lambda: send(USR1)) == -USR1
        assert bell.wait(0.0) == []
        off = threading.Thread(target=bell.close)
        off.start()
        off.join(60.0)
        bell.ring()
        assert bell.wait(0.0) == [], "a ring is no signal, and it is still open"
    finally:
        watched.remove()
        bell.close()


def test_somebody_who_hears_signals_already_keeps_doing_so() -> None:
    """An event loop of asyncio, for example."""
    read, write = os.pipe2(os.O_NONBLOCK)
    before = signal.set_wakeup_fd(write)
    bell = Wake()
    bell.open()
    try:
        bell.hear_signals()
        assert signal.set_wakeup_fd(write) == write
        bell.close()
        assert signal.set_wakeup_fd(write) == write
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)
