"""A short life of a run on a recorded disk, and what must hold after a power loss at any point of it."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import collect, plan_prune, prune
from ckpt_engine.errors import StorageFullError
from ckpt_engine.store import names, pins
from ckpt_engine.store.container import digest
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import Lease
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepAll, KeepLast
from ckpt_engine.store.storage import disk
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.attempts import read_attempts
from tests.crash.powerloss import RecordingDisk

FOREIGN = {"data/notes.txt": b"mine", "snapshots/list.json": b"{}", "data/.tmp-mine": b"?", "plan.yaml": b"a: 1"}
PAYLOAD_BYTES = 3 * 4096 + 100


def payload(step: int) -> memoryview:
    """The data file of the snapshot at `step`, in memory that starts at a page."""
    block = mmap.mmap(-1, 4 * 4096)
    block.write((b"step %08d " % step) * 1000)
    return memoryview(block)[:PAYLOAD_BYTES]


class QuietDisk(Disk):
    """A disk whose syncs cost nothing: for checking states, which nothing will crash again."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: str) -> None:
        pass


class FailingDisk(RecordingDisk):
    """A recorded disk that says once, when asked to, that it is full."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.full = False

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if self.full and offset > 0:
            raise OSError(errno.ENOSPC, "full")
        return super().write(fd, data, offset)


@contextmanager
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several writes per file, around the page cache, though the files are small."""
    with monkeypatch.context() as patch:
        patch.setattr(disk, "DIRECT_MIN_BYTES", 4096)
        patch.setattr(disk, "SLICE_BYTES", 8192)
        yield


@dataclass
class Run:
    """A writer of one run. Subclasses break one rule each, to show that the checks notice."""

    storage: LocalStorage
    mark: Callable[[str], None]
    disk: Disk

    def __post_init__(self) -> None:
        self.repository = Repository(self.storage)

    def save(self, step: int, also: tuple[str, int] | None = None) -> str:
        """A durable snapshot; `also` is (data file, step) of another snapshot that this one shares."""
        snapshot = names.snapshot_id(self.repository.next_seq(), step)
        files = [(names.data_name(snapshot), step), *([also] if also else [])]
        entries = {
            str(source): Entry(
                "uint8",
                (PAYLOAD_BYTES,),
                (Piece(i, 0, PAYLOAD_BYTES, digest(payload(source)), PAYLOAD_BYTES),),
                "U8",
            )
            for i, (_, source) in enumerate(files)
        }
        info = SnapshotInfo(snapshot, names.parse_id(snapshot).seq, step, None, "manual", 1.0, PAYLOAD_BYTES)
        named = tuple(DataFile(name, PAYLOAD_BYTES) for name, _ in files)
        self.write(Manifest(info, self.repository.run_id, {"size": 1}, {}, named, entries, {}), payload(step))
        self.mark(f"saved {snapshot}")
        return snapshot

    def write(self, manifest: Manifest, data: memoryview) -> None:
        self.storage.put(manifest.files[0].name, [data])
        self.repository.commit(manifest)

    def keep_last(self, count: int, lease: Lease) -> None:
        for snapshot in plan_prune(self.repository, KeepLast(count)).remove:
            self.mark(f"forgetting {snapshot}")
        self.prune(count, lease)

    def pin(self, snapshot: str, note: str = "") -> None:
        pins.pin(self.repository, snapshot, note, created=1.0)
        self.mark(f"pinned {snapshot}")

    def unpin(self, snapshot: str) -> None:
        self.mark(f"unpinning {snapshot}")
        pins.unpin(self.repository, snapshot)

    def prune(self, count: int, lease: Lease) -> None:
        prune(self.repository, lease, KeepLast(count))


def live(run: Run, add_foreign: Callable[[], None]) -> None:
    """The life: five snapshots, one shared data file, pins, a full disk, retention, foreign files."""
    with acquire(run.storage) as lease:
        run.repository.create_if_absent()
        pinned = run.save(10)
        run.pin(pinned)
        add_foreign()
        run.keep_last(2, lease)
        shared = run.save(20)
        run.keep_last(2, lease)
        run.save(30, also=(names.data_name(shared), 20))
        run.keep_last(2, lease)
        if isinstance(run.disk, FailingDisk):
            run.disk.full = True
            with pytest.raises(StorageFullError):
                run.save(35)
            run.disk.full = False
        run.save(40)
        run.pin(pinned, "again")
        run.keep_last(2, lease)
        run.unpin(pinned)
        run.save(50)
        run.keep_last(2, lease)


def recover(run: Run) -> None:
    """What a restarted run does first."""
    with acquire(run.storage) as lease:
        run.repository.create_if_absent()
        run.keep_last(2, lease)
        run.save(70)
        run.keep_last(2, lease)


def check(root: Path, labels: list[str], check_whole: Callable[[Repository, set[str]], None] | None = None) -> None:
    """Fails unless the state in `root` is sound and can be cleaned.

    Args:
        labels: what the writer knew.
        check_whole: fails unless these snapshots are what was saved; by default, those of `Run`.

    Sound: every listed snapshot is whole, nothing acknowledged or pinned is missing. Clean: after one more snapshot and
    a collection there is nothing but what the snapshots need and what is foreign. A pin whose removal was never synced
    may bring its snapshot back, if all of it is still there.
    """
    storage = LocalStorage(root, disk=QuietDisk())
    repository = Repository(storage)
    foreign = _foreign(root)
    listing = repository.scan()
    assert not listing.damaged, f"damaged manifests: {listing.damaged}"
    listed = {info.id for info in listing.snapshots}
    (check_whole or _check_whole)(repository, listed)
    saved = {label.removeprefix("saved ") for label in labels if label.startswith("saved ")}
    forgotten = {label.removeprefix("forgetting ") for label in labels if label.startswith("forgetting ")}
    assert saved - forgotten <= listed, f"acknowledged and lost: {saved - forgotten - listed}"
    pinned = {label.removeprefix("pinned ") for label in labels if label.startswith("pinned ")}
    pinned -= {label.removeprefix("unpinning ") for label in labels if label.startswith("unpinning ")}
    pin_files = {names.pin_name(snapshot) for snapshot in pins.pinned_ids(storage)}
    assert pinned <= listed, f"pinned and lost: {pinned - listed}"
    assert pinned <= pins.pinned_ids(storage), "a pin is lost"

    run = Run(storage, lambda label: None, QuietDisk())
    with acquire(storage) as lease:
        repository.create_if_absent()
        extra = run.save(99)
        prune(repository, lease, KeepAll())
        assert prune(repository, lease, KeepAll()).collected.freed_bytes == 0, "collected twice"
    back = {info.id for info in repository.list()} - listed - {extra}
    assert back <= pins.pinned_ids(storage), f"came back without a pin: {back - pins.pinned_ids(storage)}"
    (check_whole or _check_whole)(repository, back)
    listed |= back
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    manifests = [repository.read(snapshot) for snapshot in (*listed, extra)]
    needed = {names.RECORD, names.LEASE} | {names.manifest_name(manifest.info.id) for manifest in manifests}
    needed |= {file.name for manifest in manifests for file in manifest.files}
    needed |= pin_files
    needed |= {names.ATTEMPTS} & left
    read_attempts(storage)  # as it was before or after, never torn
    assert left == needed | set(foreign), f"garbage {left - needed - set(foreign)}, missing {needed - left}"
    assert _foreign(root) == foreign, "a foreign file was changed"
    with acquire(storage) as lease:
        assert collect(repository, lease).removed == ()
        prune(repository, lease, KeepLast(1))
    kept = {info.id for info in repository.list()}
    assert kept == (pins.pinned_ids(storage) & listed) | {extra}, "retention did not keep the newest and what is pinned"
    _check_whole(repository, kept - {extra})


def _check_whole(repository: Repository, snapshots: set[str]) -> None:
    for snapshot in snapshots:
        manifest = repository.read(snapshot)
        assert manifest.entries, "a snapshot without data"
        for name, entry in manifest.entries.items():
            data = bytearray(entry.shape[0])
            at = 0
            for piece in entry.pieces:
                view = memoryview(data)[at : at + piece.nbytes]
                repository.storage.get_into(manifest.files[piece.file].name, piece.offset, view)
                assert digest(view) == piece.digest, f"{snapshot}: damaged data of {name}"
                at += piece.nbytes
            assert data == payload(int(name)), f"{snapshot}: wrong data of {name}"


def _foreign(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in FOREIGN if (root / name).exists()}
