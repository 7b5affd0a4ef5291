"""One process at a time writes a run; a second one learns who it is; a dead process has no lease."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.errors import (
    ForeignError,
    LeaseHeldError,
    NotAFolderError,
    StorageMissingError,
    StorageReadOnlyError,
)
from ckpt_engine.store import lease as lease_module
from ckpt_engine.store.lease import acquire, read_holder
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.store.samples import files, opened_below, save

_HOLD = """
import sys
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.storage.local import LocalStorage
lease = acquire(LocalStorage(sys.argv[1]))
print("acquired", flush=True)
{after}
sys.stdin.read()
"""


class _Clock:
    """Time that passes only in `pause`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def _holder(root: Path, after: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD.format(after=after), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "acquired\n"
    return process


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease of `tmp_path`."""
    with _holder(tmp_path) as process:
        yield process
        process.kill()


def test_a_second_process_is_refused_naming_the_first(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    """The message has the holder's process number, host, start and command, and what to do."""
    with pytest.raises(LeaseHeldError) as caught:
        acquire(LocalStorage(tmp_path))
    text = str(caught.value)
    assert f"process {other.pid} on {os.uname().nodename} since 2" in text
    assert sys.executable in text
    assert "→" in text


@pytest.mark.parametrize("linked", ["the copy", "the copy of a copy", "the original"])
def test_the_refusal_names_hard_links_of_the_lease_file(tmp_path: Path, linked: str) -> None:
    """`cp -al` of a run that lives: its lock is on the copy's file, too. Without that file the copy is free."""
    run, copy, again = (LocalStorage(tmp_path / name) for name in ("run", "copy", "again"))
    writes, starts = {"the copy": (run, copy), "the copy of a copy": (run, again), "the original": (copy, run)}[linked]
    acquire(run).release()
    shutil.copytree(run.root, copy.root, copy_function=os.link)
    shutil.copytree(run.root, again.root, copy_function=os.link)
    with acquire(writes) as lease:
        with pytest.raises(LeaseHeldError, match="3 hard links") as caught:
            acquire(starts)
        assert f"`rm {starts.root}/lease.json`" in str(caught.value)
        Path(starts.root, "lease.json").unlink()
        acquire(starts).release()
        lease.check()


def test_a_lease_file_with_one_name_says_nothing_of_links(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    """There the holder writes this very folder."""
    with pytest.raises(LeaseHeldError) as caught:
        acquire(LocalStorage(tmp_path))
    assert f"process {other.pid}" in str(caught.value) and "link" not in str(caught.value)


def test_a_killed_holder_frees_the_lease_at_once(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    """No expiry to wait for: the kernel gives the lease back with the process."""
    other.send_signal(signal.SIGKILL)
    other.wait(30)
    with acquire(LocalStorage(tmp_path), wait_seconds=0):
        holder = read_holder(LocalStorage(tmp_path))
        assert holder is not None and holder.pid == os.getpid()


def test_a_forked_child_does_not_keep_the_lease_of_its_dead_parent(tmp_path: Path) -> None:
    """Loader workers are forked and may outlive a killed trainer: the lease must not live on in them."""
    after = """
import os, time
if os.fork() == 0:
    print(os.getpid(), flush=True)
    os.close(0)
    time.sleep(300)
"""
    with _holder(tmp_path, after) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            with pytest.raises(LeaseHeldError):
                acquire(LocalStorage(tmp_path))
            parent.kill()
            parent.wait(30)
            os.kill(child, 0)
            acquire(LocalStorage(tmp_path)).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_does_not_take_the_lease_away_either(tmp_path: Path) -> None:
    """The end of the child does not release its parent's lease."""
    after = """
import os
if os.fork() == 0:
    os._exit(0)
os.wait()
print("child gone", flush=True)
"""
    with _holder(tmp_path, after) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "child gone\n"
        with pytest.raises(LeaseHeldError):
            acquire(LocalStorage(tmp_path))
        parent.kill()


def test_a_started_program_does_not_inherit_the_lease(tmp_path: Path) -> None:
    """A child program that outlives its parent does not keep the lease."""
    after = """
import subprocess
child = subprocess.Popen(["sleep", "300"], close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
"""
    with _holder(tmp_path, after) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait(30)
            acquire(LocalStorage(tmp_path)).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_two_leases_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    """A program that opens the run twice is refused the second time."""
    with acquire(LocalStorage(tmp_path)), pytest.raises(LeaseHeldError, match=str(os.getpid())):
        acquire(LocalStorage(tmp_path))
    acquire(LocalStorage(tmp_path)).release()


def test_reading_the_run_does_not_lose_the_lease(tmp_path: Path) -> None:
    """Copying or reading the lease file in the holder's own process changes nothing."""
    storage = LocalStorage(tmp_path)
    with acquire(storage):
        assert read_holder(storage) == read_holder(storage)
        (tmp_path / "lease.json").read_bytes()
        with pytest.raises(LeaseHeldError):
            acquire(storage)


def test_waiting_for_the_lease_is_bounded(tmp_path: Path) -> None:
    """Exactly `wait_seconds`, then the error."""
    clock = _Clock()
    with acquire(LocalStorage(tmp_path)), pytest.raises(LeaseHeldError):
        acquire(LocalStorage(tmp_path), wait_seconds=0.75, clock=clock, pause=clock.pause)
    assert clock.now == pytest.approx(100.75)
    assert max(clock.pauses) <= lease_module.RETRY_SECONDS


def test_a_lease_given_back_while_waiting_is_taken(tmp_path: Path) -> None:
    """The waiter gets it at its next look."""
    clock = _Clock()
    first = acquire(LocalStorage(tmp_path))

    def pause(seconds: float) -> None:
        clock.pause(seconds)
        if clock.now > 100.3:
            first.release()

    second = acquire(LocalStorage(tmp_path), wait_seconds=60, clock=clock, pause=pause)
    assert clock.now < 101
    second.release()


def test_a_released_lease_names_no_process_and_proves_nothing(tmp_path: Path) -> None:
    """After release the file is empty, `check` fails, a second release is fine."""
    storage = LocalStorage(tmp_path)
    lease = acquire(storage, LeaseHolder(1, "host", 0.0, "train.py"))
    lease.check()
    assert read_holder(storage) == LeaseHolder(1, "host", 0.0, "train.py")
    lease.release()
    lease.release()
    assert read_holder(storage) is None
    with pytest.raises(LeaseHeldError):
        lease.check()


def test_a_lease_whose_file_was_removed_is_noticed(tmp_path: Path) -> None:
    """Somebody deleted the folder or the lease file: others could get a lease too, so ours proves nothing."""
    lease = acquire(LocalStorage(tmp_path))
    (tmp_path / "lease.json").unlink()
    with pytest.raises(LeaseHeldError, match="removed or replaced"):
        lease.check()
    with acquire(LocalStorage(tmp_path)), pytest.raises(LeaseHeldError, match="removed or replaced"):
        lease.check()
    lease.release()


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b'{"pid": 1', b"[]", b'{"pid": 1, "extra": 2}', b"\xff\xfe"])
def test_a_torn_lease_file_stops_no_writer(tmp_path: Path, content: bytes) -> None:
    """After a power loss the file may contain anything: it counts only while it is locked."""
    (tmp_path / "lease.json").write_bytes(content)
    assert read_holder(LocalStorage(tmp_path)) is None
    holder = LeaseHolder.current()
    with acquire(LocalStorage(tmp_path), holder):
        assert read_holder(LocalStorage(tmp_path)) == holder


def test_a_held_lease_with_an_unreadable_file_still_refuses(tmp_path: Path) -> None:
    """The lock decides; the name is a courtesy."""
    with acquire(LocalStorage(tmp_path)):
        (tmp_path / "lease.json").write_bytes(b"")
        with pytest.raises(LeaseHeldError, match="another process"):
            acquire(LocalStorage(tmp_path))


def test_readers_never_need_the_lease(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    """Listing and reading work while somebody writes."""
    repository = Repository(LocalStorage(tmp_path))
    snapshot = save(repository)
    assert [one.id for one in Repository(LocalStorage(tmp_path)).list()] == [snapshot]


def test_a_foreign_folder_gets_no_lease_file(tmp_path: Path) -> None:
    """A folder with other files is refused untouched, naming one of them."""
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ForeignError, match=r"thesis\.tex.*/ckpt"):
        acquire(LocalStorage(tmp_path))
    assert files(tmp_path) == {"thesis.tex"}


def test_a_path_that_is_a_file_gets_no_lease(tmp_path: Path) -> None:
    """The error names the path."""
    (tmp_path / "run").write_text("x")
    with pytest.raises(NotAFolderError, match="run"):
        acquire(LocalStorage(tmp_path / "run"))


def test_a_folder_that_cannot_be_made_says_what_to_do() -> None:
    """The kernel says "no such file" there, which is no help."""
    with pytest.raises(StorageMissingError, match="cannot make the folder /proc/nope") as caught:
        acquire(LocalStorage(Path("/proc/nope")))
    assert "choose a folder" in (caught.value.hint or "")


def test_a_read_only_folder_gets_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before any training is wasted."""
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system", path)
        return real(path, flags, mode)

    monkeypatch.setattr(lease_module.os, "open", refuse)
    with pytest.raises(StorageReadOnlyError, match=r"Read-only.*→"):
        acquire(LocalStorage(tmp_path))


def test_a_full_disk_does_not_keep_a_writer_from_pruning_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is taken even if there is no room to say who took it."""

    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lease_module.os, "pwrite", full)
    with acquire(LocalStorage(tmp_path)) as lease:
        lease.check()
        with pytest.raises(LeaseHeldError, match="another process"):
            acquire(LocalStorage(tmp_path))


def test_a_shorter_holder_replaces_a_longer_one(tmp_path: Path) -> None:
    """The file never shrinks, and still says only what is true."""
    storage = LocalStorage(tmp_path)
    acquire(storage, LeaseHolder(1, "h", 0.0, "long " * 1000)).release()
    with acquire(storage, LeaseHolder(2, "h", 0.0, "short")):
        assert read_holder(storage) == LeaseHolder(2, "h", 0.0, "short")


def test_no_descriptor_leaks(tmp_path: Path) -> None:
    """Refused attempts and releases close their files."""

    for _ in range(3):
        with acquire(LocalStorage(tmp_path)), pytest.raises(LeaseHeldError):
            acquire(LocalStorage(tmp_path))
        assert opened_below(tmp_path) == []
