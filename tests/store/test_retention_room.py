"""Room on a real disk: measured after every write, a run never occupies more than its quota."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.copy import make_room as rooms
from ckpt_engine.copy.make_room import make_room, measure, prune, shortage
from ckpt_engine.errors import StorageError, StorageFullError
from ckpt_engine.store import manifest_codec, names, pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import Lease
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import SLACK_BYTES
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.store.storage.local import LocalStorage
from tests.store.measured import MeasuredDisk
from tests.store.samples import data_file, files, info, manifest, save

SIZE = 300_000


class _Storage(LocalStorage):
    """A disk that says how much is free."""

    free: int = 1 << 40

    def free_bytes(self) -> int:
        return self.free


class _Run:
    def __init__(self, root: Path, keep: dict[str, Any]) -> None:
        self.root = root
        self.disk = MeasuredDisk(root)
        self.storage = _Storage(root, disk=self.disk)
        self.repository = Repository(self.storage)
        self.policy = policy_from(keep)
        self.lease: Lease
        self.whole: tuple[str, ...] = ()

    def start(self) -> None:
        self.lease = acquire(self.storage)
        self.repository.create_if_absent()
        self.whole = ()

    def used_bytes(self) -> int:
        """The bytes of all files below the root."""
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def save(self, step: int, nbytes: int = SIZE) -> str:
        """What the writer does: room, data, manifest, retention."""
        about = info(self.repository.next_seq(), step, {"loss": 1.0 / step})
        text = b"%08d" % step * (nbytes // 8)
        made = manifest(about, self.repository.run_id, text=text)
        nbytes = len(data_file(text)) + len(manifest_codec.encode(made))
        rooms.make_room(self.repository, self.lease, self.policy, nbytes, incoming=about, verified=self.whole)
        self.storage.put(names.data_name(about.id), [memoryview(data_file(text))])
        self.repository.commit(made)
        self.whole = (about.id,)
        prune(self.repository, self.lease, self.policy, verified=(about.id,))
        return about.id


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    runs: list[_Run] = []

    def started(**keep: Any) -> _Run:
        run = _Run(tmp_path / "run", keep)
        run.start()
        runs.append(run)
        return run

    yield started
    for run in runs:
        run.lease.release()


@pytest.mark.parametrize("last", [1, 2, 3, 9])
def test_the_quota_holds_at_every_instant(start: Any, last: int) -> None:
    """Whatever is written, temporary files included, the folder never holds more than the quota."""
    quota = 3 * SIZE + 200_000
    run = start(last=last, quota=quota)
    ids = [run.save(step) for step in range(1, 9)]
    assert run.disk.most_bytes <= quota
    assert [one.id for one in run.repository.list()] == ids[-min(last, 3) :]


_acts = st.one_of(
    st.tuples(st.just("save"), st.sampled_from([SIZE // 10, SIZE // 2, SIZE, 2 * SIZE])),
    st.tuples(st.just("torn"), st.sampled_from([SIZE // 2, SIZE])),
    st.tuples(st.sampled_from(["pin", "unpin"]), st.integers(0, 3)),
    st.tuples(st.just("left over"), st.sampled_from([1000, SIZE // 2, SIZE])),
    st.tuples(st.just("restart"), st.just(0)),
)


@pytest.mark.long
@given(st.lists(_acts, min_size=4, max_size=14), st.integers(1, 9), st.integers(2, 4))
def test_whatever_happens_the_quota_holds_at_every_instant(acts: list[tuple[str, int]], last: int, sizes: int) -> None:
    """Saves of any size, writes that fail, pins, what a killed writer left, and restarts: measured at each write."""
    quota = sizes * SIZE + 100_000
    with TemporaryDirectory() as folder:
        run = _Run(Path(folder), {"last": last, "quota": quota})
        run.start()
        for step, (act, number) in enumerate(acts, 1):
            ids = [one.id for one in run.repository.list()]
            if act == "save":
                with suppress(StorageFullError):
                    run.save(step, number)
                    assert run.repository.list()[-1].step == step
            elif act == "torn":
                run.disk.broken = True
                with suppress(StorageError):
                    run.save(step, number)
                run.disk.broken = False
            elif act == "left over" and run.used_bytes() + number <= quota:
                (run.root / "data").mkdir(exist_ok=True)
                run.storage.put(names.data_name(names.snapshot_id(90 + step, step)), [memoryview(bytes(number))])
            elif act == "restart":
                run.lease.release()
                run.repository = Repository(run.storage)
                run.start()
            elif act in ("pin", "unpin") and ids:
                {"pin": pins.pin, "unpin": pins.unpin}[act](run.repository, ids[number % len(ids)])
            assert run.used_bytes() <= quota
        run.lease.release()
        assert run.disk.most_bytes <= quota


def test_without_making_room_the_quota_would_be_exceeded(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement of these tests sees what it must see."""
    quota = 3 * SIZE + 200_000
    run = start(last=9, quota=quota)
    monkeypatch.setattr(rooms, "make_room", lambda *_, **__: None)
    for step in range(1, 6):
        run.save(step)
    assert run.disk.most_bytes > quota


def test_a_snapshot_that_cannot_fit_is_refused_before_a_byte_is_written(start: Any) -> None:
    """The newest stays, the error says by how much and what to do, and smaller ones go on."""
    run = start(last=3, quota=2 * SIZE)
    first = run.save(1)
    before = files(run.root)
    with pytest.raises(StorageFullError, match=r"quota 600 kB.*ckpt prune"):
        run.save(2, 2 * SIZE)
    assert files(run.root) == before
    second = run.save(3, SIZE // 2)
    assert [one.id for one in run.repository.list()] == [first, second]
    assert run.disk.most_bytes <= 2 * SIZE


def test_pinned_snapshots_count_and_stay(start: Any) -> None:
    """With one pinned, room for the next comes from the others."""
    run = start(last=9, quota=3 * SIZE + 200_000)
    ids = [run.save(step) for step in (1, 2, 3)]
    pins.pin(run.repository, ids[0])
    ids.append(run.save(4))
    assert [one.id for one in run.repository.list()] == [ids[0], ids[2], ids[3]]
    pins.pin(run.repository, ids[2])
    with pytest.raises(StorageFullError):
        run.save(5)
    assert run.disk.most_bytes <= 3 * SIZE + 200_000


def test_garbage_goes_before_a_write_is_refused(start: Any) -> None:
    """What a killed writer left behind does not cost a snapshot."""
    run = start(last=9, quota=3 * SIZE)
    run.save(1)
    orphan = names.data_name(names.snapshot_id(9, 9))
    run.storage.put(orphan, [memoryview(bytes(SIZE + 200_000))])
    run.save(2)
    assert orphan not in files(run.root)


def test_a_full_disk_without_limits_costs_what_the_rules_drop_anyway(start: Any) -> None:
    """`last: 3` on a disk for two and a half: the oldest goes before the third is written."""
    run = start(last=3)
    ids = [run.save(step) for step in (1, 2, 3)]
    run.storage.free = SIZE // 2
    ids.append(run.save(4))
    assert [one.id for one in run.repository.list()] == ids[1:]


def test_the_free_space_floor_is_kept(start: Any) -> None:
    """Before a write the oldest snapshots go until enough space stays free; if that is impossible, it is refused."""
    run = start(last=9, min_free=SIZE)
    ids = [run.save(step) for step in (1, 2, 3)]
    run.storage.free = SIZE + SIZE // 2

    with pytest.raises(StorageFullError, match="min_free 300 kB"):
        run.save(4, 9 * SIZE)
    assert len(run.repository.list()) == 3
    decided = make_room(run.repository, run.lease, run.policy, SIZE)
    assert decided is not None
    assert decided.plan.remove == (ids[0],)


def test_the_first_snapshot_foretells_a_full_disk(start: Any) -> None:
    """The numbers and what would fit are said before anything is lost."""
    run = start(last=9)
    run.storage.free = 4 * SIZE + 100_000
    said = shortage(run.repository, run.policy, SIZE + 4000)
    assert said is not None
    assert "this run needs 2.7 MB (9 snapshots of 304 kB), 1.3 MB are free: last: 4 fits" in said


def test_usage_is_what_the_files_are(start: Any) -> None:
    """Shared data counts once; garbage, pins and damaged snapshots count; foreign files do not."""
    run = start()
    first = save(run.repository, 1)
    second = save(run.repository, 2, shared=[names.data_name(first)])
    pins.pin(run.repository, first)
    run.storage.put(names.data_name(names.snapshot_id(9, 9)), [memoryview(bytes(1000))])
    damaged = save(run.repository, 3)
    (run.root / names.manifest_name(damaged)).write_bytes(b"\0" * 50)
    (run.root / "data/notes.txt").write_text("mine")
    usage = measure(Repository(run.storage))
    whole = sum(path.stat().st_size for path in run.root.rglob("*") if path.is_file() and path.name != "notes.txt")
    assert usage.used_bytes == whole
    assert set(usage.files) == {first, second}
    only_second = usage.exclusive_bytes([second])
    assert only_second == len(data_file()) + len(manifest_codec.encode(run.repository.read(second)))
    assert usage.exclusive_bytes([first]) < len(data_file()) + SLACK_BYTES
    assert usage.exclusive_bytes([first, second]) > only_second + len(data_file())
