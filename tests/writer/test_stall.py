"""A call that hangs is distinguished from a slow one, and left behind; one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ckpt_engine.errors import StorageStalledError
from ckpt_engine.store.storage import watchdog
from ckpt_engine.store.storage.watchdog import AbandonedError, CallProgress, StuckCallRunner
from ckpt_engine.writer.memory_snapshots import SlotReaders
from tests.writer.staged import WAIT_SECONDS


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a call that does not hang is never taken for one that does."""
    monkeypatch.setattr(watchdog, "STALL_SECONDS", WAIT_SECONDS)


@contextmanager
def short() -> Iterator[None]:
    """A call that hangs is given up after a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "STALL_SECONDS", 0.1)
        yield


def hanging(end: threading.Event) -> Callable[[], str]:
    def work() -> str:
        assert end.wait(WAIT_SECONDS)
        return "late"

    return work


def test_a_call_returns_what_its_work_does() -> None:
    """Values, errors and even what ends a program pass; its lane is free again at once."""
    lane = StuckCallRunner("file:///x")
    assert lane.call(lambda: 7) == 7
    for kind in (ValueError, SystemExit):

        def fail(kind: type[BaseException] = kind) -> None:
            raise kind("no")

        with pytest.raises(kind, match="no"):
            lane.call(fail)
    assert not lane.stuck
    assert lane.call(lambda: 8) == 8


def test_a_call_that_hangs_is_left_behind_alone() -> None:
    """The caller goes on with an error that names the tier; while it hangs no other one is begun."""
    end, over, left = threading.Event(), threading.Event(), []
    lane = StuckCallRunner("file:///x", ended=over.set)
    before = set(threading.enumerate())
    with short(), pytest.raises(StorageStalledError, match="file:///x made no progress"):
        lane.call(hanging(end), left=left.append)
    assert lane.stuck
    begun = []
    for _ in range(5):
        with pytest.raises(StorageStalledError):
            lane.call(lambda: begun.append(1))
        with pytest.raises(StorageStalledError):
            lane.refuse_if_stuck()
    assert begun == []
    assert len(set(threading.enumerate()) - before) == 1
    assert left == []
    end.set()
    assert over.wait(WAIT_SECONDS)
    assert left == [None]
    assert not lane.stuck
    assert lane.call(lambda: 8) == 8


def test_a_call_that_gets_on_may_take_as_long_as_it_likes() -> None:
    """Only the time since the last sign of progress counts."""
    lane, now, looked = StuckCallRunner("file:///x"), [0.0], threading.Event()

    def clock() -> float:
        if threading.current_thread() is threading.main_thread():
            looked.set()
        return now[0]

    def work() -> int:
        for _ in range(20):
            now[0] += 0.9 * watchdog.STALL_SECONDS
            lane.progress.moved()
            looked.clear()
            while not looked.wait(0.01):  # it must have had the occasion to give up
                lane.look()
        return 3

    lane.progress = CallProgress(clock)
    assert lane.call(work) == 3


def test_the_time_in_which_the_whole_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGSTOP and SIGCONT, or in a container that was frozen, a call has as long as it had before."""
    lane, ahead, looked = StuckCallRunner("file:///x"), [0.0], threading.Event()

    def clock() -> float:
        if threading.current_thread() is threading.main_thread():
            looked.set()
        return time.monotonic() + ahead[0]

    def work() -> int:
        for seconds in (10 * watchdog.STALL_SECONDS, 0.0, 0.0):
            looked.clear()
            while not looked.wait(0.01):  # it must have had the occasion to give up
                lane.look()
            with lane._changed:  # it waits
                ahead[0] += seconds
        return 3

    lane.progress = CallProgress(clock)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=clock, time=time.time))
    assert lane.call(work) == 3


def test_a_rest_that_was_announced_is_no_stall() -> None:
    """A call that announces a wait, for bandwidth or for a big object without progress, gets that much more time."""
    now = [0.0]
    progress = CallProgress(lambda: now[0])
    progress.moved(50.0)
    now[0] = 50.0
    assert progress.left() > 0
    now[0] = 50.2 + watchdog.STALL_SECONDS
    assert progress.left() < 0


def test_what_was_left_behind_does_not_go_on() -> None:
    """Its next look at the progress ends it; the next call may."""
    lane, end, found = StuckCallRunner("file:///x"), threading.Event(), []
    done = threading.Event()

    def work() -> None:
        end.wait(WAIT_SECONDS)
        lane.progress.check()

    def left(error: BaseException | None) -> None:
        found.append(type(error))
        done.set()

    with short(), pytest.raises(StorageStalledError):
        lane.call(work, left=left)
    end.set()
    assert done.wait(WAIT_SECONDS)
    assert found == [AbandonedError]
    while lane.stuck:
        done.wait(0.01)
    lane.call(lane.progress.check)


def test_a_caller_may_go_on_waiting() -> None:
    """`give_up` decides, and is asked again; a call that comes back is then like any other."""
    lane, end, asked = StuckCallRunner("file:///x"), threading.Event(), []

    def no(error: StorageStalledError) -> None:
        asked.append(error)
        if len(asked) == 2:
            end.set()

    with short():
        assert lane.call(hanging(end), give_up=no) == "late"
    assert len(asked) >= 2


def test_a_lane_that_does_not_keep_its_calls_is_free_at_once() -> None:
    """A call that hangs in another place does not block the calls that follow."""
    lane, end = StuckCallRunner("file:///x", keeps=False), threading.Event()
    with short(), pytest.raises(StorageStalledError):
        lane.call(hanging(end))
    assert not lane.stuck
    assert lane.call(lambda: 8) == 8
    end.set()


def test_the_last_thing_is_done_when_the_call_has_ended() -> None:
    """At the end there is nothing to wait for: a free lane says so."""
    lane, end, done = StuckCallRunner("file:///x"), threading.Event(), threading.Event()
    assert not lane.last(done.set)
    with short(), pytest.raises(StorageStalledError):
        lane.call(hanging(end))
    assert lane.last(done.set)
    assert not done.is_set()
    end.set()
    assert done.wait(WAIT_SECONDS)


def test_a_slot_is_freed_by_its_last_reader() -> None:
    """Two calls may hang on one snapshot: the slot is free when both end, and a job settled before is reported once."""
    freed: list[int] = []
    holds = SlotReaders(freed.append)
    said: list[bool] = []
    with holds.reading(3):
        with holds.reading(3):
            assert freed == []
        holds.settle(3, said.append)
        assert (said, freed) == ([True], [])
    assert freed == [3]
    with holds.reading(3):
        pass
    holds.settle(3, said.append)
    assert (said, freed) == ([True, False], [3])
