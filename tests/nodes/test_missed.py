"""A rank that takes no part in a snapshot into memory does not keep the others from the next one."""

from __future__ import annotations

from typing import Any

from ckpt_engine.ranks.session import Session
from ckpt_engine.snapshot.save_request import Mirroring, miss
from ckpt_engine.store.names import session_id
from tests.ranks.runs import SharedStore, ThreadRanks

IDS = [session_id("s", number, number) for number in range(4)]


def test_what_a_rank_has_missed_is_not_waited_for() -> None:
    """Keepers would never have it whole; an older one that somebody missed changes nothing."""
    store = SharedStore()
    sessions = [Session(rank, replicate=True) for rank in _ranks(store)]
    gate = Mirroring(sessions[0])
    miss(sessions[1], IDS[1])
    gate.took(IDS[2])
    assert not gate.keeps_up
    miss(sessions[1], IDS[2])
    assert gate.keeps_up
    gate.took(IDS[3])
    assert not gate.keeps_up
    miss(sessions[0], IDS[3])  # rank 0 does not wait for what it has not taken
    assert store.get("missed") == IDS[2]


def test_without_replication_no_rank_is_informed() -> None:
    """A missed snapshot leaves no key in the store: no rank waits for one."""
    store = SharedStore()
    _, other = _ranks(store)
    miss(Session(other), IDS[1])
    assert store.get("missed") is None


def _ranks(store: SharedStore) -> list[Any]:
    return [ThreadRanks(rank, 2, store) for rank in range(2)]
