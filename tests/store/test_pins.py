"""A pinned snapshot stays, whichever process prunes, whenever it was pinned."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import execute, plan_prune, prune
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.store import names, pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import Lease
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepLast, policy_from
from ckpt_engine.store.storage.local import LocalStorage
from tests.store.samples import files, save

WAIT_SECONDS = 60.0


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(LocalStorage(tmp_path))


@pytest.fixture
def lease(repository: Repository) -> Iterator[Lease]:
    with acquire(repository.storage) as taken:
        yield taken


def test_a_pinned_snapshot_stays_with_its_reason(repository: Repository, lease: Lease, tmp_path: Path) -> None:
    """Retention leaves it and its data alone, and says why; unpinned it goes."""
    ids = [save(repository, step) for step in range(4)]
    pins.pin(repository, ids[0], "the paper")
    pins.pin(repository, ids[1])
    done = prune(repository, lease, KeepLast(1))
    assert done.plan.keep == {ids[0]: "pinned: the paper", ids[1]: "pinned", ids[3]: "last 1 of 1"}
    assert {names.data_name(ids[0]), names.manifest_name(ids[0]), names.pin_name(ids[0])} <= files(tmp_path)
    assert pins.unpin(repository, ids[0]) is True
    assert pins.unpin(repository, ids[0]) is False
    assert prune(repository, lease, KeepLast(1)).plan.remove == (ids[0],)
    assert names.pin_name(ids[0]) not in files(tmp_path)


def test_a_limit_does_not_remove_a_pinned_snapshot(repository: Repository, lease: Lease) -> None:
    """A quota does not either; the result says how much is too much."""
    ids = [save(repository, step) for step in range(3)]
    pins.pin(repository, ids[0])
    decided = plan_prune(repository, policy_from({"last": 3, "quota": 1}))
    assert decided.remove == ()
    assert decided.short_bytes > 0
    assert set(decided.keep) == set(ids)


def test_pinning_twice_replaces_the_note(repository: Repository) -> None:
    """One pin for each snapshot, listed by age."""
    first, second = save(repository, 1), save(repository, 2)
    pins.pin(repository, second, "b", created=7.0)
    pins.pin(repository, first, "a", created=5.0)
    pins.pin(repository, first, "ä", created=6.0)
    assert pins.pins(repository.storage) == [pins.Pin(first, "ä", 6.0), pins.Pin(second, "b", 7.0)]


def test_what_does_not_exist_cannot_be_pinned(repository: Repository, tmp_path: Path) -> None:
    """The error says how to find the right name; nothing is written."""
    save(repository)
    with pytest.raises(StorageMissingError, match="ckpt ls"):
        pins.pin(repository, names.snapshot_id(7, 7))
    assert not (tmp_path / "pins").exists()


def test_a_damaged_pin_still_pins(repository: Repository, lease: Lease, tmp_path: Path) -> None:
    """Its name is what counts: losing a note must not cost a snapshot. Foreign files there mean nothing."""
    first, _ = save(repository, 1), save(repository, 2)
    pins.pin(repository, first, "x")
    (tmp_path / names.pin_name(first)).write_bytes(b"\0\0")
    (tmp_path / "pins/notes.txt").write_text("mine")
    assert prune(repository, lease, KeepLast(1)).plan.keep[first] == "pinned"
    assert (tmp_path / "pins/notes.txt").read_text() == "mine"


def test_a_pin_made_after_the_plan_is_honoured(
    repository: Repository, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between planning and executing somebody pins what is to be removed: its manifest is not touched."""
    ids = [save(repository, step) for step in range(3)]
    forgotten: list[str] = []
    forget = repository.forget

    def recorded(gone: Iterable[str]) -> None:
        forgotten.extend(gone)
        forget(forgotten)

    monkeypatch.setattr(repository, "forget", recorded)
    decided = plan_prune(repository, KeepLast(1))
    pins.pin(repository, ids[1])
    done = execute(repository, lease, decided)
    assert done.plan.remove == (ids[0],)
    assert done.plan.keep[ids[1]] == "pinned meanwhile"
    assert ids[1] not in forgotten
    assert [one.id for one in repository.list()] == ids[1:]


@pytest.mark.parametrize("tidy", [True, False])
def test_a_pin_made_while_manifests_go_brings_its_snapshot_back(
    repository: Repository, lease: Lease, monkeypatch: pytest.MonkeyPatch, tidy: bool
) -> None:
    """The pin lands after the last look and before the manifest is gone: its maker saw the snapshot, so it is whole."""
    ids = [save(repository, step) for step in range(3)]
    forget = repository.forget

    def pinned_first(snapshots: object) -> None:
        pins.pin(repository, ids[0])
        forget(snapshots)  # type: ignore[arg-type]
        monkeypatch.setattr(repository, "forget", forget)

    monkeypatch.setattr(repository, "forget", pinned_first)
    done = prune(repository, lease, KeepLast(1), tidy=tidy)
    assert done.plan.remove == (ids[1],)
    fresh = Repository(repository.storage)
    assert [one.id for one in fresh.list()] == [ids[0], ids[2]]
    assert fresh.read(ids[0]).files[0].name in {item.name for item in fresh.storage.list(names.DATA)}


def test_a_pin_that_comes_too_late_is_refused_and_gone(
    repository: Repository, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention removes the snapshot while its pin is being written: `pin` raises, and no pin is left."""
    first, _ = save(repository, 1), save(repository, 2)
    put = repository.storage.put

    def pruned_first(name: str, blocks: object, **options: bool) -> None:
        monkeypatch.setattr(repository.storage, "put", put)
        prune(repository, lease, KeepLast(1))
        put(name, blocks, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(repository.storage, "put", pruned_first)
    with pytest.raises(StorageMissingError):
        pins.pin(repository, first)
    assert pins.pins(repository.storage) == []


def test_pinning_and_pruning_at_the_same_time_never_loses_a_pinned_snapshot(
    repository: Repository, lease: Lease, tmp_path: Path
) -> None:
    """A snapshot whose pin was acknowledged is whole afterwards."""
    for step in range(12):
        save(repository, step)
    candidates = [one.id for one in repository.list()]
    acknowledged: list[str] = []
    go = threading.Barrier(2, timeout=WAIT_SECONDS)

    def pin_all() -> None:
        mine = Repository(LocalStorage(tmp_path))
        go.wait()
        for snapshot in candidates:
            try:
                pins.pin(mine, snapshot)
            except StorageMissingError:
                continue
            acknowledged.append(snapshot)

    pinning = threading.Thread(target=pin_all)
    pinning.start()
    go.wait()
    for keep in range(10, 0, -1):
        prune(repository, lease, KeepLast(keep))
    pinning.join(WAIT_SECONDS)
    assert not pinning.is_alive()
    fresh = Repository(LocalStorage(tmp_path))
    alive = {one.id for one in fresh.list()}
    data = {item.name for item in fresh.storage.list(names.DATA)}
    assert set(acknowledged) <= alive
    assert all(file.name in data for snapshot in alive for file in fresh.read(snapshot).files)


class _PrunerDies(Exception):
    pass


def _pinned_under_a_dying_pruner(repository: Repository, lease: Lease, patch: pytest.MonkeyPatch) -> list[str]:
    """Three snapshots; the first is pinned just before its manifest goes, and then the pruner dies."""
    ids = [save(repository, step) for step in range(3)]
    other = Repository(repository.storage)
    forget = repository.forget

    def killed_after(snapshots: Iterable[str]) -> None:
        pins.pin(other, ids[0], "kept")
        forget(snapshots)
        raise _PrunerDies

    with patch.context() as until_dead:
        until_dead.setattr(repository, "forget", killed_after)
        with pytest.raises(_PrunerDies):
            prune(repository, lease, KeepLast(1))
    assert [one.id for one in Repository(repository.storage).list()] == ids[2:]
    return ids


def test_a_pin_outlives_a_pruner_that_was_killed(
    repository: Repository, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was acknowledged while manifests went: the next retention brings the snapshot back, data and all."""
    ids = _pinned_under_a_dying_pruner(repository, lease, monkeypatch)
    fresh = Repository(repository.storage)
    assert names.data_name(ids[1]) in prune(fresh, lease, KeepLast(1)).collected.removed
    assert [one.id for one in fresh.list()] == [ids[0], ids[2]]
    assert fresh.read(ids[0]).files[0].name in {item.name for item in fresh.storage.list(names.DATA)}
    again = prune(fresh, lease, KeepLast(1))
    assert (again.plan.remove, again.collected.removed) == ((), ())
    assert again.plan.keep[ids[0]] == "pinned: kept"


def test_a_snapshot_of_which_data_is_missing_is_not_brought_back(
    repository: Repository, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest never names data that is not there; the pin stays, and can be taken away."""
    ids = _pinned_under_a_dying_pruner(repository, lease, monkeypatch)
    repository.storage.delete(names.data_name(ids[0]))
    fresh = Repository(repository.storage)
    prune(fresh, lease, KeepLast(1))
    assert [one.id for one in fresh.list()] == ids[2:]
    assert pins.unpin(fresh, ids[0]) is True


def test_without_its_pin_the_snapshot_goes_as_planned(
    repository: Repository, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpinned before the next retention: nothing is brought back."""
    ids = _pinned_under_a_dying_pruner(repository, lease, monkeypatch)
    pins.unpin(repository, ids[0])
    fresh = Repository(repository.storage)
    prune(fresh, lease, KeepLast(1))
    assert [one.id for one in fresh.list()] == ids[2:]
    assert {item.name for item in fresh.storage.list(names.DATA)} == {names.data_name(ids[2])}


def test_a_long_note_is_read_whole(repository: Repository) -> None:
    """Listing pins reads their beginnings only, and more where that is not enough."""
    snapshot = save(repository)
    pins.pin(repository, snapshot, "ä" * 10_000)
    assert pins.pins(repository.storage)[0].note == "ä" * 10_000
