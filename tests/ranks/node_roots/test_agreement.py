"""Ranks find out which of them see one root, and start their writers by places."""

from __future__ import annotations

import errno
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.copy import job
from ckpt_engine.copy.job import RankConfig, Started, WriterConfig
from ckpt_engine.errors import LeaseHeldError, RanksError, StorageError, WriterError
from ckpt_engine.ranks import session, world
from ckpt_engine.ranks.session import Beacon, Session, Sight, divide, sees
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.ranks.runs import PATIENCE_SECONDS, SharedStore, ThreadRanks, on_all

EVERYBODY = ((0, 1, 2, 3),)


class Client:
    """A writer that is only started."""

    def __init__(self, ranks: RankConfig, first_seq: int) -> None:
        self.ranks, self.started, self.closed = ranks, Started(first_seq, None), False

    def close(self, timeout: float) -> bool:
        self.closed = True
        return True


def sessions(roots: list[Path | None], nodes: list[str]) -> list[Session]:
    store = SharedStore()
    return [
        Session(
            ThreadRanks(rank, len(roots), store, node=nodes[rank]), root=None if root is None else LocalStorage(root)
        )
        for rank, root in enumerate(roots)
    ]


def on_two_nodes(tmp_path: Path) -> list[Session]:
    """Four ranks; each of two nodes has a folder for itself."""
    return sessions([tmp_path / f"n{rank // 2}" for rank in range(4)], ["n0", "n0", "n1", "n1"])


def places_of(found: list[Session], *, make: bool = True) -> Any:
    (one,) = set(on_all(lambda rank: found[rank].places(make=make), len(found)))
    return one


def test_ranks_that_see_one_folder_are_one_place(tmp_path: Path) -> None:
    """Whatever their machines are: a shared file system. Nothing is left in the folder."""
    assert places_of(sessions([tmp_path / "run"] * 4, ["n0", "n0", "n1", "n1"])) == EVERYBODY
    assert list((tmp_path / "run").iterdir()) == []


def test_folders_of_nodes_are_places(tmp_path: Path) -> None:
    """Ranks that do not see the folder of rank 0 are the place of their node, each of them knows all places."""
    assert places_of(on_two_nodes(tmp_path)) == ((0, 1), (2, 3))
    mixed = sessions([tmp_path / name for name in "abac"], ["n0", "n1", "n2", "n3"])
    assert places_of(mixed) == ((0, 2), (1,), (3,))
    assert not any(path.name.startswith(".tmp") for path in tmp_path.rglob("*"))


def test_without_a_folder_no_rank_is_asked(tmp_path: Path) -> None:
    """An object store is one place, and one process is too: no word in the store, no file."""
    remote = sessions([None] * 4, ["n0", "n1", "n2", "n3"])
    assert [one.places(make=True) for one in remote] == [EVERYBODY] * 4
    (alone,) = sessions([tmp_path / "run"], ["n0"])
    assert alone.places(make=True) == ((0,),)
    assert not (tmp_path / "run").exists()


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    """Where rank 0 has none each node counts as a place, until there is one to look for the beacon in."""
    found = on_two_nodes(tmp_path)
    assert places_of(found, make=False) == ((0, 1), (2, 3))
    assert list(tmp_path.iterdir()) == []
    shared = sessions([tmp_path / "run"] * 4, ["n0", "n0", "n1", "n1"])
    assert places_of(shared, make=False) == ((0, 1), (2, 3))
    assert places_of(shared, make=True) == EVERYBODY
    assert places_of(shared, make=False) == EVERYBODY


def test_a_folder_that_cannot_be_written_says_nothing_of_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that only reads counts each machine as a place; ranks that write all raise the error."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Beacon, "__init__", refuse)
    found = sessions([tmp_path] * 4, ["n0", "n0", "n1", "n1"])
    assert places_of(found, make=False) == ((0, 1), (2, 3))

    def make(rank: int) -> None:
        with pytest.raises(StorageError, match=r"cannot leave a file in .*: Disk quota exceeded"):
            found[rank].places(make=True)

    on_all(make, 4)


def test_a_beacon_is_swept_like_an_interrupted_put(tmp_path: Path) -> None:
    """It is no object; alive it stays, and what a dead process has left goes with the next sweep."""
    root = LocalStorage(tmp_path / "run")
    beacon = Beacon(root, make=True)
    assert sees(root, beacon.name)
    assert Repository(root).record() is None  # not a stranger's file
    root.sweep()
    assert sees(root, beacon.name)
    (tmp_path / "run" / ".tmp-0123456789abcdef-beacon").touch()
    root.sweep()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [beacon.name]
    beacon.put_out()
    assert not sees(root, beacon.name)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")) | st.none(), max_size=8))
def test_every_rank_is_in_one_place(others: list[tuple[bool, str] | None]) -> None:
    """Places are in the order of their leaders, ranks in order, and those of one place answer alike."""
    said = [Sight(True, "a"), *(None if one is None else Sight(*one) for one in others)]
    found = divide(said)
    assert sorted(rank for place in found for rank in place) == list(range(len(said)))
    assert [place[0] for place in found] == sorted(place[0] for place in found)
    assert found[0][0] == 0
    for place in found:
        assert list(place) == sorted(place)
        assert len({one.sees or one.node for rank in place if (one := said[rank]) is not None}) == 1


def test_leaders_start_before_their_ranks_and_numbers_are_free_everywhere(tmp_path: Path) -> None:
    """Rank 0 first, then the other leaders; all ranks go on from the highest number that any of them knows."""
    started: list[RankConfig] = []

    def start(ranks: RankConfig) -> Any:
        started.append(ranks)
        if ranks.rank == 0:
            Repository(LocalStorage(tmp_path / "n0")).create_if_absent()
        return Client(ranks, {0: 3, 2: 40}.get(ranks.rank, 1))

    found = on_two_nodes(tmp_path)
    on_all(lambda rank: found[rank].open(start), 4)
    assert [one.rank for one in started[:2]] == [0, 2]
    assert [(one.place, one.leads, one.first_seq) for one in sorted(started, key=lambda one: one.rank)] == [
        ((0, 1), True, None),
        ((0, 1), False, 40),
        ((2, 3), True, None),
        ((2, 3), False, 40),
    ]
    assert {one.places for one in started} == {((0, 1), (2, 3))}
    record = (tmp_path / "n0" / "ckpt.json").read_text()
    assert {one.record for one in started if one.rank} == {record}
    assert len({one.number(7, None) for one in found}) == 1
    again = found[2].open(start).ranks  # type: ignore[attr-defined]
    assert (again.place, again.first_seq, again.record) == ((2, 3), 41, record)


def test_one_place_starts_as_ever(tmp_path: Path) -> None:
    """With one root for all ranks the writers get no places."""
    started: list[RankConfig] = []

    def start(ranks: RankConfig) -> Any:
        started.append(ranks)
        return Client(ranks, 5)

    found = sessions([tmp_path] * 2, ["n0", "n1"])
    on_all(lambda rank: found[rank].open(start), 2)
    assert [(one.rank, one.place, one.places, one.record, one.leads) for one in started] == [
        (0, (), (), "", True),
        (1, (), (), "", False),
    ]


def test_a_leader_that_cannot_start_is_heard_of_by_all(tmp_path: Path) -> None:
    """No rank starts, and the writers that have started are ended."""
    clients: list[Client] = []

    def start(ranks: RankConfig) -> Any:
        if ranks.rank == 2:
            raise LeaseHeldError("somebody writes here")
        Repository(LocalStorage(tmp_path / "n0")).create_if_absent()
        clients.append(Client(ranks, 1))
        return clients[-1]

    found = on_two_nodes(tmp_path)

    def open_it(rank: int) -> str:
        with pytest.raises(LeaseHeldError) as refused:
            found[rank].open(start)
        return refused.value.message

    assert on_all(open_it, 4) == [
        "on rank 2: somebody writes here",
        "on rank 2: somebody writes here",
        "somebody writes here",
        "on rank 2: somebody writes here",
    ]
    assert [client.closed for client in clients] == [True]
    assert not found[0].is_open


def test_a_leader_that_fails_by_an_error_of_others_is_heard_of_too(tmp_path: Path) -> None:
    """No rank waits for it: it raises what it has, and the others a writer's error that names it."""

    def start(ranks: RankConfig) -> Any:
        if ranks.rank == 2:
            raise RuntimeError("can't start new thread")
        Repository(LocalStorage(tmp_path / "n0")).create_if_absent()
        return Client(ranks, 1)

    found = on_two_nodes(tmp_path)

    def open_it(rank: int) -> str:
        with pytest.raises(RuntimeError if rank == 2 else WriterError) as refused:
            found[rank].open(start)
        return str(refused.value)

    said = on_all(open_it, 4)
    assert said[2] == "can't start new thread"
    assert all("on rank 2: RuntimeError: can't start new thread" in one for one in (*said[:2], said[3]))


def test_a_rank_that_cannot_look_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for the beacon fails on one rank: all ranks raise, and the next question has an answer again."""
    found = on_two_nodes(tmp_path)

    def look(root: LocalStorage, beacon: str) -> bool:
        if root is found[1].root:
            raise KeyError("x")
        return sees(root, beacon)

    monkeypatch.setattr(session, "sees", look)

    def ask(rank: int) -> str:
        with pytest.raises(KeyError if rank == 1 else WriterError, match=r"^'x'$|on rank 1: KeyError: 'x'"):
            found[rank].places(make=True)
        return found[rank].agree(lambda: "next", PATIENCE_SECONDS)

    assert on_all(ask, 4) == ["next"] * 4


@pytest.mark.parametrize("mib", [5, 9])
def test_what_ranks_agree_on_may_be_large(mib: int) -> None:
    """The store's server takes 8 MiB at once: the rest goes in pieces, in both directions."""
    store = SharedStore()
    found = [Session(ThreadRanks(rank, 2, store)) for rank in range(2)]
    large = "ä" + "0123456789abcdef" * (mib << 16)
    assert on_all(lambda rank: found[rank].agree(lambda: large, PATIENCE_SECONDS), 2) == [large] * 2
    assert on_all(lambda rank: found[rank].meet(lambda: large, lambda said: said[1]), 2) == [large] * 2
    assert on_all(lambda rank: found[rank].agree(lambda: rank, PATIENCE_SECONDS), 2) == [0] * 2


def test_pieces_of_something_else_are_not_taken() -> None:
    """The digest of the pieces is compared, and other pieces are refused."""
    store = SharedStore()
    world.say(store, "key", {"value": "x" * (5 << 20)})
    store.set("key/piece/1", store.wait("key/piece/1", PATIENCE_SECONDS).replace("x", "y", 1))
    with pytest.raises(RanksError, match="are not what was put there"):
        world.hear(store, "key", PATIENCE_SECONDS)


def test_what_rank_0_cannot_say_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store does not take the answer: the others hear of it, and do not wait for it."""
    monkeypatch.setattr(world, "PIECE_BYTES", 64 << 20)
    store = SharedStore()
    found = [Session(ThreadRanks(rank, 2, store)) for rank in range(2)]

    def ask(rank: int) -> None:
        with pytest.raises(RanksError, match="the connection is reset"):
            found[rank].agree(lambda: "x" * (9 << 20), PATIENCE_SECONDS)

    on_all(ask, 2)


def test_what_combining_raises_is_raised_everywhere(tmp_path: Path) -> None:
    """Ranks that meet agree on an error, too."""
    store = SharedStore()
    found = [Session(ThreadRanks(rank, 2, store)) for rank in range(2)]

    def refuse(said: list[Any]) -> None:
        raise StorageError(f"heard {said}")

    def meet(rank: int) -> None:
        with pytest.raises(StorageError, match=r"heard \[0, 1\]"):
            found[rank].meet(lambda: rank, refuse)

    on_all(meet, 2)


def test_places_cross_to_the_writer_process() -> None:
    """As the tuples that they are."""
    ranks = RankConfig(2, 4, "s", None, 1.0, place=(2, 3), places=((0, 1), (2, 3)), record="r")
    config = WriterConfig("/r", ranks=ranks)
    assert msgspec.convert(asdict(config), job.WriterConfig) == config
