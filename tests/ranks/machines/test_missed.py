"""A rank that takes no part in a snapshot into memory does not keep the others from the next one."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.errors import RanksError
from ckpt_engine.observe.events import WriterLost
from ckpt_engine.ranks.session import Session
from ckpt_engine.snapshot import save_request
from ckpt_engine.snapshot.save_request import SharedSnapshots
from ckpt_engine.store.names import session_id
from tests.ranks.runs import SharedStore, ThreadRanks

IDS = [session_id("s", number, number) for number in range(4)]


def test_what_a_rank_has_missed_is_not_waited_for() -> None:
    """Keepers would never have it whole; an older one that somebody missed changes nothing."""
    store = SharedStore()
    gate, other = (_shared(rank) for rank in _ranks(store))
    other.miss(1, None, "busy", durable=False)
    gate.took(IDS[2], None)
    assert not gate.keeps_up
    other.miss(2, None, "busy", durable=False)
    assert gate.keeps_up
    gate.took(IDS[3], None)
    assert not gate.keeps_up
    missed = store.get("missed")
    gate.miss(3, None, "busy", durable=False)  # rank 0 does not wait for what it has not taken
    assert store.get("missed") == missed == IDS[2]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_writer_had_that_is_lost_is_not_waited_for(rank: int) -> None:
    """Its share, and what it kept for others, will not be there; the next snapshot will."""
    gates = [_shared(one) for one in _ranks(SharedStore())]
    for number in (1, 2):
        for gate in gates:
            gate.took(IDS[number], None)
        assert not gates[0].keeps_up
        gates[rank].heard(WriterLost("killed"))
        assert gates[0].keeps_up


def test_in_the_end_rank_0_says_what_another_node_lacks() -> None:
    """Nothing of it is to be seen in what the node of rank 0 has."""
    gates = [_shared(one) for one in _ranks(SharedStore())]
    for gate in gates:
        gate._session._places = ((0,), (1,))
    first, second = gates
    first.committed(IDS[1])
    second.lacks(IDS[1])
    assert f"last snapshot, {IDS[1]}; on all nodes none is known" in (first.lacking() or "")
    for gate in gates:
        gate.committed(IDS[2])
    assert first.lacking() is None
    first.committed(IDS[3])
    assert first.lacking() is None  # the other node may yet have it
    second.lacks(IDS[3])
    assert f"{IDS[3]}; on all nodes step 2 is the newest" in (first.lacking() or "")
    assert second.lacking() is None


def test_a_store_that_is_gone_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once rank 0 has waited long enough, it needs no answer to go on with snapshots in memory."""
    store = SharedStore()
    gate = _shared(_ranks(store)[0])
    gate.took(IDS[2], None)

    def gone(key: str) -> str | None:
        raise RanksError(f"nothing answers for {key}")

    monkeypatch.setattr(store, "get", gone)
    with pytest.raises(RanksError):
        assert gate.keeps_up
    monkeypatch.setattr(save_request, "PATIENCE_SECONDS", -1.0)
    assert gate.keeps_up


def test_without_replication_no_rank_is_informed() -> None:
    """A missed snapshot leaves no key in the store: no rank waits for one."""
    store = SharedStore()
    _, other = _ranks(store)
    _shared(other, replicate=False).miss(1, None, "busy", durable=False)
    assert store.get("missed") is None


def _shared(ranks: Any, *, replicate: bool = True) -> SharedSnapshots:
    """Of ranks that have agreed on their numbers."""
    session = Session(ranks, machines=2 * replicate)
    session.name, session._next_seq = "s", 1
    return SharedSnapshots(session, lambda *_: None)


def _ranks(store: SharedStore) -> list[Any]:
    return [ThreadRanks(rank, 2, store) for rank in range(2)]
