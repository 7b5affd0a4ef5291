"""Decisions reach all ranks one step ahead, and every rank counts them alike."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.config import load_config
from ckpt_engine.errors import RanksError, WaitTimeoutError
from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.loop import rank_decisions
from ckpt_engine.loop.rank_decisions import SharedCadence, Together
from ckpt_engine.observe import events
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.events import LogSink
from ckpt_engine.observe.run_times import RunTimes
from ckpt_engine.preempt.stop_requests import Stop, StopNotice
from ckpt_engine.ranks.world import Waits
from tests.ranks.runs import PATIENCE_SECONDS, SharedStore, ThreadRanks, on_all


class Engine:
    """Remembers what a rank had no part in."""

    def __init__(self) -> None:
        self.missed: list[int] = []
        self.is_ready, self.memory = True, False
        self.times = RunTimes(SystemClock())

    def ready(self, *, durable: bool = True, cold: bool = False) -> bool:
        return self.is_ready

    def miss(self, step: int, why: str, *, durable: bool = True) -> None:
        self.missed.append(step)

    def wait(self, timeout: float | None = None) -> bool:
        return True


class Rank:
    """One rank with a cadence of its own."""

    def __init__(self, rank: int, store: SharedStore, every_n_steps: int) -> None:
        self.engine, self.store = Engine(), store
        cadence = Cadence(FrequencySettings(overhead=None, every_n_steps=every_n_steps), SystemClock(), LogSink())
        self.cadence = cadence
        self.together = Together(ThreadRanks(rank, 2, store), cadence.boundary, self.engine)
        cadence.start(0)
        self.together.start(0)
        self.took: list[int] = []

    def step(self, step: int, stop: Stop | None = None) -> str | None:
        found = self.together.decided(step)
        if found is not None and found.reason is not None:
            self.took.append(step)
            self.cadence.taken(step, 0.0)
        self.together.lead(step, stop, asked=False, fits=lambda _: True)
        return found.stop["stop"] if found is not None and found.stop is not None else None


def ranks(every_n_steps: int) -> tuple[Rank, Rank]:
    store = SharedStore()
    return Rank(0, store, every_n_steps), Rank(1, store, every_n_steps)


def test_snapshots_are_taken_at_the_very_steps_that_were_asked_for() -> None:
    """`every_n_steps` hits its multiples on all ranks, although rank 0 may already be a step further."""
    first, second = ranks(3)
    for step in range(1, 20):
        first.step(step)
        if step > 1:
            second.step(step - 1)
    assert first.took == [3, 6, 9, 12, 15, 18]
    assert second.took == [3, 6, 9, 12, 15, 18]
    assert second.engine.missed == []


def test_waiting_for_the_rank_that_a_snapshot_blocks_longest_is_known() -> None:
    """Rank 0 was blocked for 1 s and the other for 3 s: an average rank has waited for 1 s."""
    first, second = ranks(4)
    for step in range(1, 9):
        for one, seconds in ((first, 1.0), (second, 3.0)):
            one.step(step)
            if step == 4:
                one.engine.times.waited("stall" if one is first else "fence", seconds)
    assert (first.took, second.took) == ([4, 8], [4, 8])
    assert first.together.waits.seconds == 1.0
    assert second.together.waits.seconds == 0.0


def test_of_many_ranks_a_few_are_asked() -> None:
    """Spread over all of them."""
    waits = Waits(ThreadRanks(0, 1000, SharedStore()), lambda: 0.0)
    waits.look()
    assert waits.seconds == 0.0
    assert 10 <= len(waits._asked) <= 15
    assert waits._asked[-1] > 900


def test_every_step_is_possible() -> None:
    """The first step can be decided before there was any."""
    first, second = ranks(1)
    for step in range(1, 6):
        first.step(step)
        second.step(step)
    assert first.took == second.took == [1, 2, 3, 4, 5]


def test_a_rank_that_was_ahead_says_that_it_missed_a_decision() -> None:
    """It has no part in that snapshot, and takes the next one with all others."""
    first, second = ranks(2)
    second.step(1)
    second.step(2)  # nothing synchronised these steps: rank 0 has not even begun
    for step in range(1, 4):
        first.step(step)
    second.step(3)
    first.step(4)
    second.step(4)
    assert second.engine.missed == [2]
    assert (first.took, second.took) == ([2, 4], [4])


def test_a_rank_whose_training_ends_ahead_of_rank_0_misses_what_that_decided_meanwhile() -> None:
    """Ranks that average now and then end at different times; what rank 0 decided beyond its last step is for none."""
    first, second = ranks(2)
    for step in range(1, 8):
        second.step(step)
    waiting = threading.Thread(target=second.together.trained)
    waiting.start()
    for step in range(1, 8):
        first.step(step)
    first.together.trained()
    waiting.join(PATIENCE_SECONDS)
    assert first.took == [2, 4, 6]
    assert second.engine.missed == [2, 4, 6]


def test_a_long_wait_for_the_end_of_rank_0_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where ranks meet in a file nothing tells that rank 0 was killed."""
    monkeypatch.setattr(events, "TELL_SECONDS", 0.0)
    caplog.set_level("INFO")
    first, second = ranks(2)
    waiting = threading.Thread(target=second.together.trained)
    waiting.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "for rank 0 to end its own" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    first.together.trained()
    waiting.join(PATIENCE_SECONDS)
    assert not waiting.is_alive()


def test_a_stop_ends_the_wait_for_the_end_of_rank_0() -> None:
    """Rank 0 may be at work alone for long."""
    _, second = ranks(2)
    second.together.verdicts.patience = lambda seconds: 0.0
    with pytest.raises(WaitTimeoutError):
        second.together.trained()


def test_a_signal_on_any_rank_stops_all_after_the_same_step() -> None:
    """Rank 0 hears of it through the store and decides when."""
    first, second = ranks(100)
    now = time.monotonic()
    stop = Stop(StopNotice("SIGTERM", now, 30.0, 3), now + 30.0)
    stopped = []
    for step in range(1, 6):
        stopped.append((first.step(step), second.step(step, stop if step >= 2 else None)))
        if stopped[-1][0]:
            break
    assert stopped[-1] == ("SIGTERM", "SIGTERM")
    assert len(stopped) == 4
    assert first.took == second.took == [4]


def test_nothing_is_decided_while_rank_0_is_busy() -> None:
    """A due snapshot waits for a free slot."""
    first, second = ranks(2)
    first.engine.is_ready = False
    for step in (1, 2, 3):
        first.step(step)
        second.step(step)
    first.engine.is_ready = True
    for step in (4, 5):
        first.step(step)
        second.step(step)
    assert first.took == second.took == [5]


@pytest.mark.parametrize(("replicates", "resumed"), [(True, True), (True, False), (False, True)])
def test_a_resumed_run_is_copied_to_other_machines_after_its_first_step(replicates: bool, resumed: bool) -> None:
    """The writers that had the copies are gone; one that begins has nothing to lose yet."""
    ranks = ThreadRanks(0, 2, SharedStore())
    loaded = object() if resumed else None
    rest: dict[str, Any] = {"ready": lambda **_: True, "count": 0, "times": RunTimes(SystemClock()), "memory": True}
    engine: Any = SimpleNamespace(ranks=ranks, replicates=replicates, loaded=loaded, **rest)
    cadence = SharedCadence(
        FrequencySettings.of(load_config("/nowhere", every_n_steps=100)), SystemClock(), LogSink(), engine
    )
    cadence.start(40)
    found = []
    for step in (41, 42, 43):
        cadence.stop(step, None, asked=False, fits=lambda _: True)
        found.append(cadence.boundary(step))
        if found[-1] is not None:
            cadence.taken(step, 0.0)
            engine.count += 1
    assert found == ["resume" if replicates and resumed else None, None, None]


def test_a_deadline_counts_from_the_boundary_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left when a stop is published has gone on for a whole step when the ranks read it."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    first, second = ranks(100)
    signalled = Stop(StopNotice("SIGTERM", 100.0, 30.0, 143), 130.0)
    found: list[Stop] = []
    for step in range(1, 5):
        now[0] += 4.0
        for rank in (second, first):
            decision = rank.together.decided(step)
            if decision is not None and decision.stop is not None:
                found.append(rank.together.stop_of(decision.stop))
            rank.together.lead(step, signalled if rank is second else None, asked=False, fits=lambda _: True)
    assert found[0].notice.exit_code == 143
    assert all(stop.deadline <= signalled.deadline for stop in found)
    assert all(stop.deadline >= signalled.deadline - 4.0 for stop in found)


def test_rank_0_leaves_first() -> None:
    """Others wait until it has done what it does for all, and not beyond their time."""
    first, second = ranks(100)
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        second.store.wait("over", 0.01)
    second.together.leave(0.05)  # too early: it waits as long as it may
    assert time.monotonic() - began >= 0.05
    first.together.leave(0.0)
    second.together.leave(30.0)


def test_rank_0_stays_until_others_know_that_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may keep the store, in which they look for that again and again."""
    monkeypatch.setattr(rank_decisions, "_HEARD_SECONDS", PATIENCE_SECONDS)
    found = ranks(100)
    known: list[bool] = []

    def leave(rank: int) -> None:
        found[rank].together.leave(PATIENCE_SECONDS)
        if rank == 0:
            known.append(found[0].store.get("left/1") is not None)

    on_all(leave, 2)
    assert known == [True]


def test_at_the_end_rank_0_stays_for_one_that_ends_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has still to hear what rank 0 has said about the end, from a store that may end with rank 0."""
    monkeypatch.setattr(rank_decisions, "_HEARD_SECONDS", PATIENCE_SECONDS)
    first, second = ranks(100)
    leaving = threading.Thread(target=first.together.leave, args=(math.inf,))
    leaving.start()
    assert second.store.wait("over", PATIENCE_SECONDS) == ""
    assert leaving.is_alive()
    second.together.leave(0.0)  # it waits for nothing
    leaving.join(PATIENCE_SECONDS)
    assert not leaving.is_alive()


def test_training_that_is_over_does_not_fail_where_rank_0_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    """Where ranks average now and then one may end much later than rank 0, whose process kept the store."""

    class Gone(SharedStore):
        def get(self, key: str) -> str | None:
            raise RanksError("the store of the process group does not answer: Connection reset by peer")

    engine: Any = SimpleNamespace(
        ranks=ThreadRanks(1, 2, Gone()), memory=False, times=RunTimes(SystemClock()), divided=False, events=LogSink()
    )
    cadence = SharedCadence(FrequencySettings(overhead=None, every_n_steps=1), SystemClock(), LogSink(), engine)
    assert cadence.ended(7) is None
    assert "rank 0 is gone: there is no snapshot of the end" in caplog.text
