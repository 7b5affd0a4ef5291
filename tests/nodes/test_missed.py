"""A rank that takes no part in a snapshot into memory does not keep the others from the next one."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.errors import RanksError
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
    session._session, session._next_seq = "s", 1
    return SharedSnapshots(session, lambda *_: None)


def _ranks(store: SharedStore) -> list[Any]:
    return [ThreadRanks(rank, 2, store) for rank in range(2)]
