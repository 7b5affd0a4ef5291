"""Local storage keeps the storage contract, and any failing system call leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_engine.errors import (
    NotAFolderError,
    StorageError,
    StorageFullError,
    StorageMissingError,
    StorageReadOnlyError,
)
from ckpt_engine.store.storage import disk as blockio
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.testing import StorageContract, aligned, listed, put
from tests.store.samples import files

BIG = aligned(bytes(range(256)) * (3 << 12) + b"tail")


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(tmp_path / "not" / "yet there")


class TestLocalStorageWithoutDirectIo(StorageContract):
    """The same on a file system that takes neither direct I/O nor cache probes, as tmpfs of older kernels."""

    @pytest.fixture
    def storage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
        real_open, real_preadv = os.open, os.preadv

        def refuse_direct(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O here", path)
            return real_open(path, flags, mode)

        def refuse_probe(fd: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
            if flags:
                raise OSError(errno.EOPNOTSUPP, "no flags here")
            return real_preadv(fd, buffers, at)

        monkeypatch.setattr(blockio.os, "open", refuse_direct)
        monkeypatch.setattr(blockio.os, "preadv", refuse_probe)
        return LocalStorage(tmp_path / "root", disk=_NoDirectDisk())


class _NoDirectDisk(Disk):
    def bypass_cache(self, fd: int, *, on: bool) -> None:
        raise OSError(errno.EINVAL, "no direct I/O here")


class TestLocalStorageWithoutLinks(StorageContract):
    """The same on a file system without hard links."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(tmp_path / "root", disk=_NoLinksDisk())

    def test_of_several_exclusive_puts_at_once_one_wins_whole(self, storage: Storage) -> None:
        """The test of the contract is left out."""
        pytest.skip("without links the lease and unique names have to do")


class _NoLinksDisk(Disk):
    def link(self, path: str, new_path: str) -> None:
        raise OSError(errno.EPERM, "no links here")


class _CountingDisk(Disk):
    """Fails the n-th call with `error`, and remembers what was called."""

    def __init__(self, fail_at: int = -1, error: int = errno.EIO) -> None:
        self.calls: list[str] = []
        self.fail_at = fail_at
        self.error = error

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if len(self.calls) - 1 == self.fail_at:
            raise OSError(self.error, os.strerror(self.error))

    def create(self, path: str) -> int:
        self._called("create")
        return super().create(path)

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        self._called(f"bypass {on}")
        super().bypass_cache(fd, on=on)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._called(f"write {len(data)}")
        return super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._called("sync")
        super().sync(fd)

    def link(self, path: str, new_path: str) -> None:
        self._called("link")
        super().link(path, new_path)

    def rename(self, path: str, new_path: str) -> None:
        self._called("rename")
        super().rename(path, new_path)

    def remove(self, path: str) -> None:
        self._called("remove")
        super().remove(path)

    def make_folder(self, path: str) -> None:
        self._called("make_folder")
        super().make_folder(path)

    def sync_folder(self, path: str) -> None:
        self._called("sync_folder")
        super().sync_folder(path)


def test_a_big_aligned_block_is_written_in_few_direct_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages go around the page cache in large slices; only the tail goes through it."""
    monkeypatch.setattr(blockio, "SLICE_BYTES", 2 << 20)
    disk = _CountingDisk()
    LocalStorage(tmp_path, disk=disk).put("data/x", [BIG])
    written = disk.calls[disk.calls.index("create") :]
    assert written == [
        "create", "bypass True", f"write {2 << 20}", f"write {1 << 20}", "bypass False", "write 4",
        "sync", "link", "remove", "sync_folder",
    ]  # fmt: skip


def test_an_object_has_its_name_only_after_its_bytes_are_synced_and_then_the_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system calls of the real disk, in order: what a power cut leaves is all or nothing."""
    calls: list[tuple[str, object]] = []
    sync, link = os.fsync, os.link

    def fsync(fd: int) -> None:
        calls.append(("sync", os.fstat(fd).st_ino))
        sync(fd)

    def linked(source: str, name: str) -> None:
        calls.append(("link", Path(source).stat().st_ino))
        link(source, name)

    storage = LocalStorage(tmp_path)
    put(storage, "data/before", b"the folder exists")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", linked)
    put(storage, "data/x", b"some bytes")
    file, folder = (tmp_path / "data/x").stat().st_ino, (tmp_path / "data").stat().st_ino
    assert calls == [("sync", file), ("link", file), ("sync", folder)]


@pytest.mark.cells(3)
@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_a_put_that_fails_anywhere_leaves_nothing(tmp_path: Path, error: int, exclusive: bool) -> None:
    """Let each system call of a put fail in turn: a clear error, nothing visible, no temporary file."""
    kinds = {
        errno.ENOSPC: StorageFullError,
        errno.EDQUOT: StorageFullError,
        errno.EROFS: StorageReadOnlyError,
        errno.EACCES: StorageReadOnlyError,
        errno.EIO: StorageError,
    }
    probe = _CountingDisk()
    LocalStorage(tmp_path / "probe", disk=probe).put("data/x", [BIG], exclusive=exclusive)
    tried = 0
    for n, call in enumerate(probe.calls):
        if call == "remove" and exclusive:
            continue  # what cannot be removed stays, see below
        root = tmp_path / str(n)
        storage = LocalStorage(root, disk=_CountingDisk(n, error))
        with pytest.raises(kinds[error], match="data/x") as caught:
            storage.put("data/x", [BIG], exclusive=exclusive)
        assert isinstance(caught.value.__cause__, OSError)
        if (call, exclusive) == ("sync_folder", False) and files(root):
            assert storage.get("data/x") == BIG  # replacing cannot be undone: the new object is there, whole
            continue
        assert list(storage.list("")) == []
        assert not root.exists() or files(root) == set(), call
        storage.put("data/x", [BIG], exclusive=exclusive)
        assert storage.get("data/x") == BIG
        tried += 1
    assert tried > 8


def test_a_put_without_links_that_fails_at_the_end_leaves_nothing(tmp_path: Path) -> None:
    """A name that was given by a rename is taken back if it could not be made durable."""

    class Failing(_NoLinksDisk):
        def sync_folder(self, path: str) -> None:
            if (Path(path) / "x").exists():
                raise OSError(errno.EIO, "bad disk")

    with pytest.raises(StorageError):
        LocalStorage(tmp_path, disk=Failing()).put("data/x", [BIG])
    assert files(tmp_path) == set()


def test_a_temporary_file_that_cannot_be_removed_is_said_and_swept_later(tmp_path: Path) -> None:
    """If even the cleaning fails, the error says what is left, and the next sweep takes it."""

    class Stuck(_CountingDisk):
        def sync(self, fd: int) -> None:
            raise OSError(errno.EIO, "bad disk")

        def remove(self, path: str) -> None:
            raise OSError(errno.EIO, "bad disk")

    with pytest.raises(StorageError) as caught:
        LocalStorage(tmp_path, disk=Stuck()).put("data/x", [BIG])
    assert any("left behind" in note for note in caught.value.__cause__.__notes__)
    storage = LocalStorage(tmp_path)
    assert list(storage.list("")) == []
    assert storage.sweep() == BIG.nbytes
    assert files(tmp_path) == set()


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    """The kernel may take less than was given."""

    class Stingy(Disk):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            return super().write(fd, data[: max(1, len(data) // 3)], offset)

    storage = LocalStorage(tmp_path, disk=Stingy())
    storage.put("data/x", [BIG[: 1 << 20], memoryview(b"more than one write")])
    assert storage.get("data/x") == bytes(BIG[: 1 << 20]) + b"more than one write"


def test_more_than_the_disk_has_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A big write that cannot fit does not first fill the disk for everyone else."""
    real = os.statvfs(tmp_path)

    class Tiny:
        f_bavail = 2
        f_frsize = real.f_frsize

    monkeypatch.setattr("ckpt_engine.store.storage.local.os.statvfs", lambda path: Tiny)
    disk = _CountingDisk()
    with pytest.raises(StorageFullError, match=r"data/x.*[Nn]o space.*free space"):
        LocalStorage(tmp_path, disk=disk).put("data/x", [BIG])
    assert "create" not in disk.calls


def test_a_put_in_progress_is_not_swept(tmp_path: Path) -> None:
    """Sweeping from anywhere leaves the temporary file of a living put alone."""
    other = LocalStorage(tmp_path)

    class Sweeping(Disk):
        def sync(self, fd: int) -> None:
            assert other.sweep() == 0
            super().sync(fd)

    LocalStorage(tmp_path, disk=Sweeping()).put("data/x", [BIG])
    assert other.get("data/x") == BIG


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_put_succeeds_whenever_another_process_sweeps(tmp_path: Path, exclusive: bool) -> None:
    """Before and after each system call of a put: also between making the file and locking it, and once it is named."""
    swept = LocalStorage(tmp_path)
    calls = []

    class Sweeping(Disk):
        def create(self, path: str) -> int:
            fd = super().create(path)
            if not calls:
                calls.append("create")
                swept.sweep()
            return fd

        def sync(self, fd: int) -> None:
            self._around("sync", super().sync, fd)

        def link(self, path: str, new_path: str) -> None:
            self._around("link", super().link, path, new_path)

        def rename(self, path: str, new_path: str) -> None:
            self._around("rename", super().rename, path, new_path)

        def remove(self, path: str) -> None:
            self._around("remove", super().remove, path)

        @staticmethod
        def _around(name: str, call: Callable[..., None], *args: object) -> None:
            calls.append(name)
            swept.sweep()
            try:
                call(*args)
            finally:
                swept.sweep()

    LocalStorage(tmp_path, disk=Sweeping()).put("data/x", [BIG], exclusive=exclusive)
    assert calls == ["create", "sync", *(("link", "remove") if exclusive else ("rename",))]
    assert swept.get("data/x") == BIG
    assert files(tmp_path) == {"data/x"}


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_sweep_goes_on_when_a_put_ends_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exclusive: bool
) -> None:
    """The temporary file was there when the sweep opened it, and has become an object when it is locked."""
    storage = LocalStorage(tmp_path)
    temp = tmp_path / ".tmp-0123456789abcdef-x"
    temp.write_bytes(b"whole")
    lock = fcntl.flock

    def ends_first(fd: int, operation: int) -> None:
        if exclusive:
            (tmp_path / "x").hardlink_to(temp)
            temp.unlink()
        else:
            temp.rename(tmp_path / "x")
        lock(fd, operation)

    monkeypatch.setattr("ckpt_engine.store.storage.local.fcntl.flock", ends_first)
    assert storage.sweep() == 0
    assert storage.get("x") == b"whole"


def test_the_temporary_file_of_a_killed_process_is_swept(tmp_path: Path) -> None:
    """After `kill -9` in the middle of a put nothing is listed and the sweep frees the bytes."""
    script = """
import os, signal, sys
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage
class Dying(Disk):
    def sync(self, fd): os.kill(os.getpid(), signal.SIGKILL)
LocalStorage(sys.argv[1], disk=Dying()).put("data/x", [memoryview(b"x" * 5000)])
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -9
    storage = LocalStorage(tmp_path)
    assert listed(storage) == []
    assert len(files(tmp_path)) == 1
    assert storage.sweep() == 5000
    assert files(tmp_path) == set()


def test_foreign_hidden_files_are_never_swept(tmp_path: Path) -> None:
    """Only names of our own making are temporary files of ours."""
    for name in (".tmp-mine", ".tmp-0123456789abcdef", "x.tmp", ".tmp-0123456789abcdeg-x"):
        (tmp_path / name).write_text("keep")
    assert LocalStorage(tmp_path).sweep() == 0
    assert len(files(tmp_path)) == 4


def test_a_folder_made_by_a_process_that_died_is_synced_before_use(tmp_path: Path) -> None:
    """A folder that is there may not be durable yet: its first use syncs its name, once."""
    (tmp_path / "root" / "data").mkdir(parents=True)
    disk = _CountingDisk()
    storage = LocalStorage(tmp_path / "root", disk=disk)
    put(storage, "data/x", b"1")
    assert disk.calls.count("sync_folder") == 3  # the root's name, data's name, the object's name
    put(storage, "data/y", b"1")
    assert disk.calls.count("sync_folder") == 4


def test_a_parent_that_cannot_be_read_does_not_matter_to_an_existing_root(tmp_path: Path) -> None:
    """A user may own the run's folder and not even be allowed to list the folder above."""

    class Guarded(Disk):
        def sync_folder(self, path: str) -> None:
            if path == str(tmp_path):
                raise PermissionError(errno.EACCES, "not yours")
            super().sync_folder(path)

    (tmp_path / "root").mkdir()
    storage = LocalStorage(tmp_path / "root", disk=Guarded())
    put(storage, "data/x", b"1")
    assert storage.get("data/x") == b"1"


def test_a_root_that_vanished_comes_back_with_the_next_put(tmp_path: Path) -> None:
    """Somebody removed the folder while we ran."""
    storage = LocalStorage(tmp_path / "root")
    put(storage, "data/x", b"1")
    (tmp_path / "root" / "data" / "x").unlink()
    (tmp_path / "root" / "data").rmdir()
    put(storage, "data/y", b"2")
    assert [item.name for item in listed(storage)] == ["data/y"]


def test_a_path_that_is_a_file_is_said_to_be_one(tmp_path: Path) -> None:
    """The root, or a folder above it, is a file: every use says so, and it is left alone."""
    (tmp_path / "file").write_text("mine")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        storage = LocalStorage(root)
        for use in (
            lambda s=storage: put(s, "data/x", b"1"),
            lambda s=storage: listed(s),
            lambda s=storage: s.get("a"),
        ):
            with pytest.raises(NotAFolderError, match="file"):
                use()
    assert (tmp_path / "file").read_text() == "mine"


def test_lost_and_found_is_ignored(tmp_path: Path) -> None:
    """The root of a mounted disk counts as empty."""
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found" / "#123").write_text("x")
    assert listed(LocalStorage(tmp_path)) == []


def test_symbolic_links_are_not_followed_into_circles(tmp_path: Path) -> None:
    """A link to the folder above does not make the listing endless."""
    storage = LocalStorage(tmp_path)
    put(storage, "data/x", b"1")
    (tmp_path / "data" / "up").symlink_to(tmp_path)
    (tmp_path / "data" / "dangling").symlink_to(tmp_path / "nowhere")
    assert [item.name for item in listed(storage, "data/x")] == ["data/x"]
    assert "data/up/data/x" not in [item.name for item in listed(storage)]


def test_no_descriptor_leaks(tmp_path: Path) -> None:
    """Puts, failed puts, reads and failed reads close what they open."""

    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    storage = LocalStorage(tmp_path)
    storage.put("data/x", [BIG])
    before = opened()
    for n in range(3):
        storage.put(f"data/{n}", [BIG])
        storage.get(f"data/{n}", 5, 5)
        storage.get_into(f"data/{n}", 0, aligned(bytes(BIG.nbytes)))
        for bad in (lambda: storage.put("data/x", [BIG]), lambda: storage.get("none")):
            with pytest.raises(StorageError):
                bad()
        for fail_at in range(1, 8):
            with pytest.raises(StorageError):
                LocalStorage(tmp_path, disk=_CountingDisk(fail_at)).put(f"data/f{n}", [BIG])
        listed(storage)
    assert opened() == before


def test_a_missing_object_in_a_missing_root_is_missing(tmp_path: Path) -> None:
    """Reading where nothing was ever written is no other error."""
    with pytest.raises(StorageMissingError):
        LocalStorage(tmp_path / "a" / "b").get("ckpt.json")
