"""Real small file systems: full, read-only, with and without direct I/O. Needs root and loop devices."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_engine.cli.main import main
from ckpt_engine.copy.make_room import prune
from ckpt_engine.errors import StorageFullError, StorageReadOnlyError
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepLast
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.testing import StorageContract, aligned, listed
from tests.parity.places import PARTS, train
from tests.store.samples import files, info, manifest, save

pytestmark = pytest.mark.slow

_SIZES = {"tmpfs": "48M", "ext4": "48M", "xfs": "320M", "btrfs": "128M"}


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _mount(kind: str, folder: Path) -> None:
    folder.mkdir()
    if kind == "tmpfs":
        _run("mount", "-t", "tmpfs", "-o", f"size={_SIZES[kind]}", "tmpfs", str(folder))
        return
    if not shutil.which(f"mkfs.{kind}"):
        pytest.skip(f"mkfs.{kind} is not installed")
    image = folder.with_suffix(".img")
    _run("truncate", "-s", _SIZES[kind], str(image))
    _run(f"mkfs.{kind}", "-q", *(["-F", "-m", "0"] if kind == "ext4" else ["-f"]), str(image))
    _run("mount", "-o", "loop", "-t", kind, str(image), str(folder))


@pytest.fixture(params=sorted(_SIZES))
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder = tmp_path / "disk"
    try:
        _mount(request.param, folder)
    except subprocess.CalledProcessError as err:
        pytest.skip(f"cannot mount {request.param}: {err.stderr.decode().strip()}")
    yield folder
    _run("umount", str(folder))


class TestLocalStorageOnRealDisks(StorageContract):
    """The whole contract on each file system."""

    @pytest.fixture
    def storage(self, disk: Path) -> LocalStorage:
        return LocalStorage(disk / "run")


def _fill(disk: Path, keep_bytes: int) -> None:
    with (disk / "filler").open("wb") as filler:
        stat = os.statvfs(disk)
        for _ in range(max(0, stat.f_bavail * stat.f_frsize - keep_bytes) >> 20):
            filler.write(bytes(1 << 20))
        os.fsync(filler.fileno())


def test_a_disk_that_fills_up_loses_nothing_and_recovers(disk: Path) -> None:
    """The new snapshot fails with nothing visible, the older one stays; after space is freed the next one works."""
    root = disk / "run"
    repository = Repository(LocalStorage(root))
    first = save(repository, 1)
    with acquire(repository.storage) as lease:
        _fill(disk, 6 << 20)
        before = files(root)
        big = aligned(os.urandom(1 << 20) * 24)
        with pytest.raises(StorageFullError, match="free space"):
            repository.storage.put(names.data_name(names.snapshot_id(2, 2)), [big])
        assert files(root) == before
        assert Repository(repository.storage).read(first).info.step == 1
        (disk / "filler").unlink()
        os.sync()
        second = save(repository, 2)
        assert prune(repository, lease, KeepLast(1)).plan.remove == (first,)
        assert [one.id for one in Repository(repository.storage).list()] == [second]


def test_a_disk_without_a_single_free_block_can_still_be_pruned(disk: Path) -> None:
    """The lease is taken, a commit fails cleanly, and forgetting makes room."""
    root = disk / "run"
    repository = Repository(LocalStorage(root))
    ids = [save(repository, step) for step in range(8)]
    acquire(repository.storage).release()
    for size in (1 << 20, 1 << 16, 4096, 512, 1):
        with pytest.raises(OSError, match="No space"), (disk / f"filler{size}").open("wb", buffering=0) as filler:
            while filler.write(bytes(size)) == size:
                os.fsync(filler.fileno())
            raise OSError("No space for all of it")
    with acquire(repository.storage) as lease:
        with suppress(StorageFullError):
            repository.commit(manifest(info(99, 99), repository.run_id, text=b"x" * 100))
        done = prune(repository, lease, KeepLast(1))
        assert ids[0] in done.plan.remove
    assert len(Repository(repository.storage).list()) == 1


def test_a_disk_that_turns_read_only_says_so(disk: Path) -> None:
    """Writing and taking the lease fail with what to do; reading goes on."""
    repository = Repository(LocalStorage(disk / "run"))
    snapshot = save(repository)
    _run("mount", "-o", "remount,ro", str(disk))
    try:
        for use in (lambda: save(repository), lambda: acquire(repository.storage)):
            with pytest.raises(StorageReadOnlyError, match="read-write"):
                use()
        assert Repository(repository.storage).read(snapshot).info.id == snapshot
        fresh = LocalStorage(disk / "other")
        with pytest.raises(StorageReadOnlyError):
            acquire(fresh)
    finally:
        _run("mount", "-o", "remount,rw", str(disk))


def test_commands_on_a_disk_that_is_read_only(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run of a repair says what it would mend from parity; what cannot be written is named."""
    train([{"url": str(disk / "run"), "parity": PARTS}], steps=1)
    (data,) = (disk / "run/data").glob("*.safetensors")
    with data.open("r+b") as file:
        file.seek(100_000)
        file.write(b"damaged")
    _run("mount", "-o", "remount,ro", str(disk))
    try:
        for verb in ("repair", "scrub"):
            assert _ckpt(verb, disk / "run", "--dry-run") == 1
            assert f"data/{data.name}  can be mended from" in capsys.readouterr().out
        assert _ckpt("export", disk / "run", disk / "out.safetensors") == 2
        assert "Read-only file system" in capsys.readouterr().err
    finally:
        _run("mount", "-o", "remount,rw", str(disk))


def _ckpt(*arguments: object) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    return int(ended.value.code or 0)


def test_the_root_of_a_fresh_disk_can_be_a_run(disk: Path) -> None:
    """`lost+found` and the like do not make it foreign."""
    repository = Repository(LocalStorage(disk))
    snapshot = save(repository)
    assert [one.id for one in repository.list()] == [snapshot]
    assert len(listed(repository.storage)) == 3
