"""A rank that has stopped waits for rank 0, and a second Ctrl-C ends that wait: with the store of a process group."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.loop.halt import Halt
from ckpt_engine.loop.rank_decisions import SharedCadence
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.events import LogSink
from ckpt_engine.observe.run_times import RunTimes
from ckpt_engine.preempt.stop_requests import Stop, StopNotice
from ckpt_engine.ranks.process_group import GroupStore
from tests.ranks.runs import ThreadRanks

LATE_SECONDS = 30.0
PATIENCE_SECONDS = 60.0


class Looked(GroupStore):
    """Tells when somebody looks or waits for something."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store, "test")
        self.looked = threading.Event()

    def get(self, key: str) -> str | None:
        self.looked.set()
        return super().get(key)

    def wait(self, key: str, timeout: float) -> str:
        self.looked.set()
        return super().wait(key, timeout)


@pytest.fixture
def store() -> Iterator[Looked]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)  # it ends with this object
    yield Looked(server)
    signal.signal(signal.SIGINT, before)


class OtherLeavesLater(Looked):
    """Rank 1 has left when rank 0 looks for that a third time."""

    looks = 0

    def get(self, key: str) -> str | None:
        self.looks += 1
        if self.looks == 3:
            self.set("left/1", "")
        return super().get(key)


def halted(store: Looked, rank: int = 1, *, pressed_again: bool = False) -> Halt:
    """One rank of two, which Ctrl-C has stopped."""
    now = time.monotonic()
    stop = Stop(StopNotice("Ctrl-C", now, PATIENCE_SECONDS, 130, interrupts=True), now + PATIENCE_SECONDS)
    watch: Any = SimpleNamespace(stop=stop, signals=SimpleNamespace(interrupted=pressed_again))
    times = RunTimes(SystemClock())
    ranks = ThreadRanks(rank, 2, store)  # type: ignore[arg-type]
    newest = SimpleNamespace(loss=None)
    engine: Any = SimpleNamespace(ranks=ranks, memory=False, times=times, divided=False, newest=newest)
    cadence = SharedCadence(FrequencySettings(overhead=None, every_n_steps=1), SystemClock(), LogSink(), engine)
    halt = Halt(watch, engine, SystemExit, logging.getLogger("test"), cadence)
    halt.done = True
    return halt


def press_while_it_waits(store: Looked, over: threading.Event) -> list[str]:
    """Press Ctrl-C as soon as a rank waits; the list names what had to end the wait if Ctrl-C did not."""
    needed: list[str] = []

    def press() -> None:
        store.looked.wait(PATIENCE_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)
        if not over.wait(LATE_SECONDS):
            needed.append("rank 0")
            for key in ("over", "stuck"):
                store.set(key, "")

    threading.Thread(target=press, daemon=True).start()
    return needed


@pytest.mark.parametrize("waits", ["for the end of rank 0", "for what rank 0 finds"])
def test_a_ctrl_c_ends_the_wait(store: Looked, waits: str) -> None:
    """A wait inside of the store would go on: no handler of Python runs there."""
    halt, over = halted(store), threading.Event()
    assert halt.shared is not None
    stop = Stop(StopNotice("Ctrl-C", 0.0), time.monotonic() + PATIENCE_SECONDS)
    needed = press_while_it_waits(store, over)
    with pytest.raises(KeyboardInterrupt):
        halt.leave() if waits == "for the end of rank 0" else halt.shared.stop_stuck(stop, "here")
    over.set()
    assert needed == []


def test_after_a_second_ctrl_c_no_rank_is_waited_for(store: Looked) -> None:
    """It came while what is in flight was waited for."""
    halted(store, pressed_again=True).leave()
    assert not store.looked.is_set()


def test_a_second_ctrl_c_counts_where_the_handlers_were_put_back_already(store: Looked) -> None:
    """It is raised at once then, and on its way; the one that stops the run is not taken for it."""
    halt = halted(store)
    assert halt.stop is not None
    stop = Stop(StopNotice("Ctrl-C", 0.0, interrupts=True), 0.0)
    with pytest.raises(KeyboardInterrupt):
        try:
            raise halt.exit_of(stop)
        finally:
            store.set("over", "")
            halt.leave()
            assert store.looked.is_set()
            store.looked.clear()
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                halt.leave()
    assert not store.looked.is_set()


def test_a_rank_that_has_failed_says_once_what_is_late(store: Looked) -> None:
    """The launcher signals it as well, but the line about the exception was the last word."""
    halt = halted(store)
    assert halt.tells
    halt.fail()
    assert halt.stop is not None
    assert not halt.tells


def test_in_a_run_that_ends_by_itself_rank_0_stays_for_the_others() -> None:
    """Its process keeps the store, and they have still to read there what was said about the end."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)  # it ends with this object
    store = OtherLeavesLater(server)
    halt = halted(store, 0)
    halt.watch.stop, halt.done, halt.complete = None, False, True  # type: ignore[misc]
    halt.leave()
    assert store.get("left/1") is not None
    assert store.looks == 4
