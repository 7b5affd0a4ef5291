"""Collection removes exactly what no snapshot needs, and nothing it cannot prove unneeded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import collect, plan_prune, prune
from ckpt_engine.errors import LeaseHeldError, StorageError
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import Lease
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepBest, KeepLast
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.testing import put
from tests.store.samples import data_file, files, info, manifest, save


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(LocalStorage(tmp_path))


@pytest.fixture
def lease(repository: Repository) -> Iterator[Lease]:
    with acquire(repository.storage) as taken:
        yield taken


def _names(*snapshots: str) -> set[str]:
    made = {names.RECORD, names.LEASE}
    for snapshot in snapshots:
        made |= {names.manifest_name(snapshot), names.data_name(snapshot)}
    return made


def _orphan(repository: Repository, seq: int) -> str:
    """Data that was written and never committed."""
    name = names.data_name(names.snapshot_id(seq, 1))
    put(repository.storage, name, data_file())
    return name


def test_pruning_forgets_and_frees(repository: Repository, lease: Lease, tmp_path: Path) -> None:
    """Snapshots that retention does not keep are gone with their data; the result says how many bytes."""
    ids = [save(repository, step) for step in range(4)]
    done = prune(repository, lease, KeepLast(2))
    assert done.plan.remove == tuple(ids[:2])
    assert set(done.collected.removed) == {names.data_name(snapshot) for snapshot in ids[:2]}
    assert done.collected.freed_bytes == 2 * len(data_file())
    assert files(tmp_path) == _names(*ids[2:])
    assert [one.id for one in repository.list()] == ids[2:]
    again = prune(repository, lease, KeepLast(2))
    assert (again.plan.remove, again.collected.freed_bytes) == ((), 0)


def test_what_an_interrupted_write_left_is_collected(repository: Repository, lease: Lease, tmp_path: Path) -> None:
    """Data never committed, older or newer than the newest snapshot, and temporary files."""
    snapshot = save(repository)
    old, new = _orphan(repository, 0), _orphan(repository, 9)
    (tmp_path / "data" / f".tmp-{'0' * 16}-x.safetensors").write_bytes(b"12345")
    done = collect(repository, lease)
    assert set(done.removed) == {old, new}
    assert done.freed_bytes == 2 * len(data_file()) + 5
    assert files(tmp_path) == _names(snapshot)


def test_data_being_written_is_left_alone(repository: Repository, lease: Lease) -> None:
    """Several ranks write before one commits: what is in flight is not garbage."""
    save(repository)
    busy, dead = _orphan(repository, 5), _orphan(repository, 6)
    owner = names.data_owner(busy)
    assert owner is not None
    assert collect(repository, lease, in_flight=[owner.id]).removed == (dead,)


def test_data_of_a_forgotten_snapshot_lives_while_another_needs_it(
    repository: Repository, lease: Lease, tmp_path: Path
) -> None:
    """Data stays as long as a snapshot refers to it, whichever snapshot wrote it."""
    first = save(repository, 1)
    second = save(repository, 2, shared=[names.data_name(first)])
    third = save(repository, 3)
    assert prune(repository, lease, KeepLast(2)).collected.removed == ()
    assert names.data_name(first) in files(tmp_path)
    assert Repository(repository.storage).read(second).files[1].name == names.data_name(first)
    done = prune(repository, lease, KeepLast(1))
    assert set(done.collected.removed) == {names.data_name(first), names.data_name(second)}
    assert files(tmp_path) == _names(third)


def test_foreign_files_stay(repository: Repository, lease: Lease, tmp_path: Path) -> None:
    """A file whose name is not one of ours is never deleted, wherever it lies."""
    save(repository, 1)
    foreign = ["notes.txt", "data/model.safetensors", "data/sub/x", "snapshots/mine.json", "data/.tmp-x", "sub/.tmp-y"]
    for name in foreign:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    snapshot = save(repository, 2)
    prune(repository, lease, KeepLast(1))
    assert files(tmp_path) == _names(snapshot) | set(foreign)


def test_a_damaged_manifest_keeps_its_own_data_and_what_it_may_share(
    repository: Repository, lease: Lease, tmp_path: Path
) -> None:
    """What an unreadable manifest refers to is unknown: nothing as old or older is collected, and this is said."""
    first = save(repository, 1)
    middle = save(repository, 2, shared=[names.data_name(first)])
    last = save(repository, 3)
    newer = _orphan(repository, 9)
    repository.forget([first])
    path = tmp_path / names.manifest_name(middle)
    path.write_bytes(path.read_bytes()[:-20])
    done = collect(Repository(repository.storage), lease)
    assert done.removed == (newer,)
    assert done.withheld_bytes == len(data_file())
    assert [bad.id for bad in done.damaged] == [middle]
    assert {names.data_name(one) for one in (first, middle, last)} <= files(tmp_path)
    repository.forget([middle])
    freed = collect(Repository(repository.storage), lease)
    assert set(freed.removed) == {names.data_name(first), names.data_name(middle)}
    assert freed.damaged == ()


def test_a_damaged_newest_manifest_blocks_all_older_garbage(repository: Repository, lease: Lease) -> None:
    """If the newest manifest is unreadable, nothing older can be proven unneeded."""
    save(repository, 1)
    _orphan(repository, 1)
    newest = save(repository, 2)
    Path(repository.storage.path(names.manifest_name(newest))).write_bytes(b"\0" * 500)  # type: ignore[attr-defined]
    done = collect(Repository(repository.storage), lease)
    assert done.removed == ()
    assert done.withheld_bytes == len(data_file())


def test_the_newest_whole_snapshot_survives_damage_to_newer_ones(
    repository: Repository, lease: Lease, tmp_path: Path
) -> None:
    """A policy that would keep only snapshots that turn out damaged does not cost the last good one."""
    ids = [save(repository, step) for step in range(4)]
    for snapshot, damage in ((ids[3], "manifest"), (ids[2], "data")):
        if damage == "manifest":
            path = tmp_path / names.manifest_name(snapshot)
            path.write_bytes(path.read_bytes().replace(b'"note"', b'"nope"'))
        else:
            path = tmp_path / names.data_name(snapshot)
            path.write_bytes(path.read_bytes()[:-1])
    done = prune(Repository(repository.storage), lease, KeepLast(1))
    assert set(done.plan.keep) == {ids[1], ids[3]}
    assert done.plan.keep[ids[1]] == "newest whole snapshot"
    assert done.plan.remove == (ids[0], ids[2])


def test_nothing_is_forgotten_while_nothing_is_whole(repository: Repository, lease: Lease, tmp_path: Path) -> None:
    """With every snapshot damaged there is no ground to choose on."""
    for snapshot in [save(repository, step) for step in range(3)]:
        (tmp_path / names.data_name(snapshot)).unlink()
    done = prune(Repository(repository.storage), lease, KeepLast(1))
    assert done.plan.remove == ()
    assert len(done.plan.keep) == 3


def test_a_snapshot_known_to_be_whole_is_not_read_again(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has just committed it: checking it again would cost time at every snapshot."""
    snapshot = save(repository)
    monkeypatch.setattr(Repository, "read", lambda self, snapshot: pytest.fail("read"))
    assert set(plan_prune(repository, KeepLast(1), verified=[snapshot]).keep) == {snapshot}


def test_pins_and_the_best_stay_with_their_reasons(repository: Repository, lease: Lease) -> None:
    """Protected snapshots are kept whatever the policy says."""
    ids = [save(repository, step, {"loss": loss}) for step, loss in enumerate((0.1, 0.5, 0.4, 0.9))]
    done = prune(repository, lease, KeepBest("loss"), protected={ids[1]: "pinned"})
    assert (
        done.plan.keep
        == {
            ids[0]: "best 1 of 1 by loss (min): 0.1",
            ids[1]: "pinned",
            ids[3]: "newest",
        }
        or done.plan.keep[ids[3]] == "newest whole snapshot"
    )
    assert done.plan.remove == (ids[2],)


def test_a_snapshot_being_written_while_others_go_keeps_its_data(repository: Repository, lease: Lease) -> None:
    """Also one that is committed, and not being written any more, after manifests were listed."""
    save(repository, 1), save(repository, 2)
    coming = info(9)
    under_way = {coming.id}
    put(repository.storage, names.data_name(coming.id), data_file())

    class Committing(Repository):
        def forget(self, ids: Iterable[str]) -> None:
            super().forget(ids)
            if under_way:
                under_way.clear()
                repository.commit(manifest(coming, repository.run_id))

    done = prune(Committing(repository.storage), lease, KeepLast(1), in_flight=under_way, tidy=False)
    assert (len(done.collected.removed), under_way) == (1, set())
    assert names.data_name(coming.id) in {item.name for item in repository.storage.list(names.DATA)}


def test_a_lost_lease_stops_every_deletion(repository: Repository, tmp_path: Path) -> None:
    """Without proof that no other process writes, nothing is removed."""
    ids = [save(repository, step) for step in range(3)]
    _orphan(repository, 9)
    taken = acquire(repository.storage)
    (tmp_path / "lease.json").unlink()
    before = files(tmp_path)
    for use in (lambda: prune(repository, taken, KeepLast(1)), lambda: collect(repository, taken)):
        with pytest.raises(LeaseHeldError):
            use()
    assert files(tmp_path) == before
    assert [one.id for one in repository.list()] == ids
    taken.release()


def test_a_collection_that_fails_midway_is_continued_by_the_next(
    repository: Repository, lease: Lease, tmp_path: Path
) -> None:
    """An I/O error while deleting leaves a sound store; the next collection finishes the job."""
    ids = [save(repository, step) for step in range(4)]

    class Failing(LocalStorage):
        deletions = 0

        def delete(self, *names: str) -> None:
            for name in names:
                self.deletions += 1
                if self.deletions == 5:
                    raise StorageError("bad disk")
                super().delete(name)

    with pytest.raises(StorageError):
        prune(Repository(Failing(tmp_path)), lease, KeepLast(1))
    assert [one.id for one in Repository(repository.storage).list()] == ids[3:]
    prune(repository, lease, KeepLast(1))
    assert files(tmp_path) == _names(ids[3])


def test_a_snapshot_committed_while_garbage_is_sought_keeps_its_data(
    repository: Repository, lease: Lease, tmp_path: Path
) -> None:
    """Data is listed before manifests, so that a commit in between is seen."""
    repository.create_if_absent()
    about = info(1)

    class Racing(LocalStorage):
        def list(self, prefix: str):  # type: ignore[no-untyped-def]
            items = list(super().list(prefix))
            if prefix == names.DATA and not (tmp_path / names.manifest_name(about.id)).exists():
                put(repository.storage, names.data_name(about.id), data_file())
                items = list(super().list(prefix))
                repository.commit(manifest(about, repository.run_id))
            return iter(items)

    assert Repository(Racing(tmp_path)).unreferenced().unreferenced == ()
    about = info(2)
    assert prune(Repository(Racing(tmp_path)), lease, KeepLast(1), tidy=False).plan.keep.keys() == {about.id}
    assert files(tmp_path) == _names(about.id)


def test_what_an_interrupted_copy_has_left_beside_a_snapshot_is_removed(tmp_path: Path) -> None:
    """Data of a snapshot's own name that its manifest does not need; the snapshot, and what is being written, stay."""
    repository = Repository(LocalStorage(tmp_path))
    snapshot = save(repository)
    left = names.data_name(snapshot, part=7)
    for fresh in (False, True):  # with and without a manifest that was read before
        repository.storage.put(left, [memoryview(b"encoded otherwise")])
        place = Repository(repository.storage) if fresh else repository
        with acquire(place.storage) as lease:
            assert collect(place, lease, in_flight=[snapshot]).removed == ()
            assert collect(place, lease).removed == (left,)
        assert [info.id for info in Repository(place.storage).list()] == [snapshot]
        assert Repository(place.storage).read(snapshot).files[0].name in files(tmp_path)
    repository.storage.put(left, [memoryview(b"encoded otherwise")])
    (tmp_path / names.manifest_name(snapshot)).write_bytes(b"damaged")
    with acquire(repository.storage) as lease:
        kept = collect(Repository(repository.storage), lease)
    assert (kept.removed, left in files(tmp_path)) == ((), True)
