"""Writers of dead ranks commit the newest snapshot that all of them have in memory, whatever was written before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.copy.job import RankConfig
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.events import Event, FanOutSink, MemoryFlushed
from ckpt_engine.preempt.watch import open_watch
from ckpt_engine.store import names
from ckpt_engine.writer import control
from ckpt_engine.writer.crash_recovery import CrashRecovery
from tests.ranks.runs import SharedStore, ThreadRanks, on_all
from tests.ranks.train_plain import state_of

WAIT_SECONDS = 60.0
PATIENCE_SECONDS = 2 * WAIT_SECONDS
"""Of the writers: all of them are there, and none gives up on another one that takes its time."""


@dataclass
class Order:
    """A snapshot that a writer holds."""

    snapshot: str
    durable: bool = False


@dataclass
class Tier:
    """The part records of all ranks, and what is committed."""

    there: dict[str, set[int]]
    bad: frozenset[str] = frozenset()
    committed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Place:
    """The tier as one rank sees it.

    Args:
        waits_for: it cannot write before this is set.
    """

    def __init__(self, tier: Tier, rank: int, waits_for: threading.Event | None = None) -> None:
        self.tier, self.rank, self.waits_for = tier, rank, waits_for
        self.looks = 0
        self.has_left: Callable[[], object] = lambda: None

    def look(self) -> dict[str, set[int]]:
        self.looks += 1
        with self.tier.lock:
            return {snapshot: set(ranks) for snapshot, ranks in self.tier.there.items() if ranks}

    def leave(self, order: Order) -> None:
        if self.waits_for is not None:
            assert self.waits_for.wait(WAIT_SECONDS)
        with self.tier.lock:
            self.tier.there.setdefault(order.snapshot, set()).add(self.rank)
        self.has_left()

    def commit(self, order: Order) -> bool:
        if order.snapshot in self.tier.bad:
            return False
        with self.tier.lock:
            self.tier.committed.append(order.snapshot)
            self.tier.there.clear()
        order.durable = True
        return True

    def exists(self, snapshot: str) -> bool:
        return snapshot in self.tier.committed


def meet(
    tier: Tier,
    kept: list[list[Order]],
    waits_for: dict[int, threading.Event] | None = None,
    *,
    give_up_at_first: bool = False,
) -> list[str]:
    """What is committed once the writers of all ranks have agreed; `kept`: snapshots in memory by rank, newest first.

    Args:
        give_up_at_first: who finds that nothing is left to do but to wait does not do so before it has left something.
    """
    places = [Place(tier, rank, (waits_for or {}).get(rank)) for rank in range(len(kept))]

    def run(rank: int) -> None:
        ranks = _rank(rank, len(kept))
        orders: Any = kept[rank]
        recovery = CrashRecovery(ranks, places[rank], 0.2 if give_up_at_first else PATIENCE_SECONDS)
        places[rank].has_left = lambda: setattr(recovery, "_patience_seconds", PATIENCE_SECONDS)
        recovery.run(orders)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(kept))]
    for thread in threads:
        thread.start()
    if waits_for:
        until_looked_twice(places[0])
        for event in waits_for.values():
            event.set()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    return tier.committed


def until(condition: Callable[[], object]) -> None:
    """Wait for it, with an end."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def until_looked_twice(place: Place) -> None:
    """Rank 0 has left its newest share, and has seen what the others have left."""
    for _ in range(int(WAIT_SECONDS * 100)):
        if place.looks >= 2:
            return
        threading.Event().wait(0.01)
    raise AssertionError("rank 0 does not look")


def test_what_is_complete_already_does_not_end_the_wait_for_what_is_newer() -> None:
    """All ranks have m. X was being written when they died and is complete now; rank 1 takes longer to write m."""
    tier = Tier({"X": {0, 1}})
    kept = [[Order("m"), Order("X")], [Order("m"), Order("X", durable=True)]]
    assert meet(tier, kept, {1: threading.Event()}) == ["m"]


def test_a_snapshot_that_was_taken_back_is_not_taken_for_a_committed_one() -> None:
    """X failed on the coordinator, which removed all records. Rank 1 had written its share; all ranks have w."""
    assert meet(Tier({}), [[Order("X"), Order("w")], [Order("X", durable=True), Order("w")]]) == ["w"]


def test_a_share_that_was_cancelled_is_none() -> None:
    """There are records of all ranks, and one of them says that its rank has no share."""
    tier = Tier({"X": {0, 1, 2}}, frozenset({"X"}))
    kept = [[Order("X"), Order("w")], [Order("X", durable=True), Order("w")], [Order("w")]]
    assert meet(tier, kept, give_up_at_first=True) == ["w"]


@pytest.mark.parametrize("ahead", [(0, 0, 0), (2, 1, 0), (0, 1, 2), (1, 0, 2)])
def test_ranks_at_different_snapshots_meet_at_the_newest_that_all_hold(ahead: tuple[int, int, int]) -> None:
    """Each holds three; how far each was when it died."""
    kept = [[Order(str(7 + far - back)) for back in range(3)] for far in ahead]
    assert meet(Tier({}), kept) == ["7"]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("first_to_ask", [0, 1])
def test_what_one_rank_did_not_have_yet_counts_at_the_next_meeting(late: int, first_to_ask: int) -> None:
    """The ranks meet at x, and one gets its z a moment later. Whichever writer is asked first waits for the other."""
    tier = Tier({})
    kept: list[Any] = [[Order("z"), Order("x")], [Order("z"), Order("x")]]
    places = [Place(tier, rank) for rank in range(2)]
    reunions = [CrashRecovery(_rank(rank), places[rank], PATIENCE_SECONDS) for rank in range(2)]

    def meet_again(orders: list[Any], after: Callable[[], object]) -> None:
        def run(rank: int) -> None:
            if rank != first_to_ask:
                after()
            reunions[rank].run(orders[rank])

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()

    meet_again([orders[1:] if rank == late else orders for rank, orders in enumerate(kept)], lambda: None)
    assert tier.committed == ["x"]
    before = places[first_to_ask].looks
    meet_again(kept, lambda: until(lambda: places[first_to_ask].looks >= before + 2))
    assert tier.committed == ["x", "z"]
    assert kept[0][0].durable and kept[1][0].durable


def _rank(rank: int, size: int = 2) -> RankConfig:
    return RankConfig(rank, size, "session", None, WAIT_SECONDS)


class Over:
    """Hears of meetings that are over."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.all: list[Event] = []

    def emit(self, event: Event) -> None:
        self.all.append(event)
        if isinstance(event, MemoryFlushed):
            self.steps.append(event.step)


def flushes(root: Path, rank: int) -> object:
    """The step that a rank's writer makes durable now."""
    reply = control.ask(str(root), {"what": control.Question.FLUSH}, WAIT_SECONDS, rank)
    return None if reply is None else reply.body["step"]


def test_writers_of_living_trainers_meet_twice(tmp_path: Path) -> None:
    """Rank 1 has one snapshot at the first flush and both at the second: the second flush writes no data again."""
    root, store = tmp_path / "run", SharedStore()
    tiers = ["memory", str(root)]
    engines = [Checkpointer(tiers=tiers, ranks=ThreadRanks(rank, 2, store), linger=1) for rank in range(2)]
    on_all(lambda rank: engines[rank].engine.start(), 2)
    ledger, watch = open_watch(engines[0].config, SystemClock(), engines[0].engine.ranks)
    engines[0].engine.events = FanOutSink(ledger)
    engines[0].engine.events.add(watch)
    over = Over()
    engines[0].engine.events.add(over)

    def hold(rank: int, step: int) -> None:
        engines[rank].save(state_of(step, rank), step=step, durable=False).wait(WAIT_SECONDS)

    def meet(step: int) -> None:
        """Rank 1 has left that before rank 0 looks."""
        until(lambda: flushes(root, 1) == step)
        until(lambda: list((root / names.PARTS).glob(f"*-s{step:010}-*-r00001.json")))
        assert watch.run.flush.begin() == step
        until(lambda: engines[0].engine.poll() or over.steps)
        over.steps.clear()
        assert not watch.run.flush.is_pending

    on_all(lambda rank: hold(rank, 1), 2)
    hold(0, 2)
    meet(1)
    assert [info.step for info in engines[0].snapshots()] == [1]
    hold(1, 2)
    meet(2)
    assert [info.step for info in engines[0].snapshots()] == [1, 2], over.all
    on_all(lambda rank: engines[rank].close(), 2)
