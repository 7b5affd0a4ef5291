"""The lease without a kernel that keeps it: one at a time writes, the dead expire, the ousted notice."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import LeaseHeldError, StorageError, StorageExistsError
from ckpt_engine.store.lease import acquire, read_holder
from ckpt_engine.store.lease_holder import ProcessIdentity
from ckpt_engine.store.lock_scope import locks_are_shared
from ckpt_engine.store.object_lease import TTL_SECONDS, LeaseSlot, ObjectLease, Record, Timing, take
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.storage.objects_s3 import S3Storage
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire
from tests.store.samples import save

ME = {"pid": 1, "host": "a", "started": 0.0, "command": "train.py"}
PATIENCE_SECONDS = 60.0
ELSEWHERE = ProcessIdentity("another boot", "ns", 1, 1)


class Cell:
    """A slot in memory. `conditional` False: a store that ignores conditions."""

    url = "cell://"

    def __init__(self, *, conditional: bool = True) -> None:
        self.data: bytes | None = None
        self.version = 0
        self.conditional = conditional
        self.broken = False

    def read(self) -> tuple[bytes, str] | None:
        if self.broken:
            raise StorageError("away")
        return None if self.data is None else (self.data, str(self.version))

    def write(self, data: bytes, version: str | None) -> None:
        there = self.read()
        if self.conditional and (there[1] if there else None) != version:
            raise StorageExistsError("changed")
        self.data = data
        self.version += 1


class Clock:
    """Time that passes in `pause` only, which calls `meanwhile`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: Callable[[], object] = lambda: None

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()

    def timing(self) -> Timing:
        return Timing(ttl_seconds=30.0, clock=lambda: self.now, pause=self.pause)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def no_threads_stay() -> Iterator[None]:
    """Every lease of a test has ended."""
    yield
    for thread in threading.enumerate():
        if thread.name == "ckpt-lease":
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()


def written_elsewhere(cell: Cell, beat: int = 0) -> None:
    """The lease of a process on another machine."""
    cell.data = Record("theirs", beat, 30.0, ELSEWHERE).encode(ME)
    cell.version += 1


def test_a_free_lease_is_taken_and_given_back(clock: Clock) -> None:
    """Absent and given back are both free."""
    cell = Cell()
    for _ in range(2):
        with take(cell, ME, 0, clock.timing()) as lease:
            lease.check()
            assert cell.data is not None
            assert json.loads(cell.data)["command"] == "train.py"
        assert cell.data == b"{}\n"
        with pytest.raises(LeaseHeldError, match="given back"):
            lease.check()
    assert clock.now < 5


def test_a_holder_that_beats_is_not_ousted(clock: Clock) -> None:
    """Refused as soon as a beat is seen, after `wait_seconds`."""
    cell, beats = Cell(), itertools.count(1)
    written_elsewhere(cell)
    clock.meanwhile = lambda: written_elsewhere(cell, next(beats)) if clock.now % 7 == 0 else None
    with pytest.raises(LeaseHeldError):
        take(cell, ME, 0, clock.timing())
    assert clock.now == 7
    with pytest.raises(LeaseHeldError):
        take(cell, ME, 100, clock.timing())
    assert clock.now == 107


def test_a_holder_that_stopped_expires_by_the_observers_clock(clock: Clock) -> None:
    """After its own ttl without a change, whatever the wall clocks say."""
    cell = Cell()
    written_elsewhere(cell)
    with take(cell, ME, 0, clock.timing()) as lease:
        assert 30 <= clock.now < 35
        lease.check()


@pytest.mark.parametrize("junk", [b"not json", b'{"lease": 1}', b'{"lease": {"token": "x"}}'])
def test_an_unreadable_lease_is_waited_for_too(clock: Clock, junk: bytes) -> None:
    """It may be of a later version."""
    cell = Cell()
    cell.data = junk
    take(cell, ME, 0, clock.timing()).release()
    assert clock.now >= TTL_SECONDS


def test_a_dead_process_of_this_machine_does_not_have_to_expire(clock: Clock) -> None:
    """The same boot and process namespace show that the process is dead: the lease is taken at once."""
    here = ProcessIdentity.current()
    assert here is not None
    assert not here.is_dead()
    cell = Cell()
    for dead in (replace(here, pid=2**22 + 1), replace(here, ticks=here.ticks + 1)):
        cell.data = Record("theirs", 3, 30.0, dead).encode(ME)
        take(cell, ME, 0, clock.timing()).release()
    assert clock.now < 5
    assert not replace(here, boot="other", ticks=0).is_dead()


@pytest.mark.parametrize("conditional", [True, False])
def test_of_two_takers_at_once_one_gets_it(clock: Clock, conditional: bool) -> None:
    """Where the store ignores conditions the last one to write wins, and the other one reads that."""
    cell = Cell(conditional=conditional)
    written_elsewhere(cell)
    seen = cell.read()
    other = Record("faster", 0, 30.0, ELSEWHERE)

    def faster() -> None:
        if clock.now == 31:
            cell.data = other.encode(ME)
            cell.version += 1

    clock.meanwhile = faster
    with pytest.raises(LeaseHeldError):
        take(cell, ME, 0, clock.timing())
    assert seen is not None
    assert cell.data == other.encode(ME)


def test_a_write_between_our_look_and_our_write_wins(clock: Clock) -> None:
    """A conditional write does not overwrite what another process wrote after our look."""
    cell = Cell()
    read = cell.read

    def late() -> tuple[bytes, str] | None:
        found = read()
        cell.read = read  # type: ignore[method-assign]
        written_elsewhere(cell)
        return found

    cell.read = late  # type: ignore[method-assign]
    with pytest.raises(LeaseHeldError):
        take(cell, ME, 0, clock.timing())
    assert Record.decode(cell.data or b"") == Record("theirs", 0, 30.0, ELSEWHERE)


def test_the_ousted_notice_before_they_delete(clock: Clock) -> None:
    """`check` asks the store each time, and stays with its answer; release leaves the other's lease alone."""
    cell = Cell()
    lease = take(cell, ME, 0, clock.timing())
    written_elsewhere(cell)
    theirs = cell.data
    with pytest.raises(LeaseHeldError, match="another process"):
        lease.check()
    with pytest.raises(LeaseHeldError, match="another process"):
        lease.renew()
    lease.release()
    assert cell.data == theirs


def test_a_store_that_is_away_does_not_prove_the_lease(clock: Clock) -> None:
    """`check` fails while the store does not answer, and works again when it does."""
    cell = Cell()
    with take(cell, ME, 0, clock.timing()) as lease:
        cell.broken = True
        with pytest.raises(StorageError, match="away"):
            lease.check()
        cell.broken = False
        lease.check()


def test_checks_renew_when_that_is_due(clock: Clock) -> None:
    """A thread that was stopped for long is made up for."""
    cell = Cell()
    with take(cell, ME, 0, clock.timing()) as lease:
        before = cell.version
        lease.check()
        assert cell.version == before
        clock.now += 20
        lease.check()
        assert cell.version == before + 1


def test_the_thread_beats() -> None:
    """The lease renews itself without any call until it is released."""
    cell = Cell()
    beaten = threading.Event()
    write = cell.write

    def watched(data: bytes, version: str | None) -> None:
        write(data, version)
        record = Record.decode(data)
        if record and record.beat >= 2:
            beaten.set()

    cell.write = watched  # type: ignore[method-assign]
    with take(cell, ME, 0, Timing(ttl_seconds=0.2, settle_seconds=0.0)):
        assert beaten.wait(PATIENCE_SECONDS)


# On real storages


@pytest.fixture(params=["s3", "memory", "folder"])
def slot(request: pytest.FixtureRequest, tmp_path: Path) -> LeaseSlot:
    """The slots of all kinds of storage."""
    if request.param == "s3":
        server, name = request.getfixturevalue("moto"), request.getfixturevalue("bucket")
        return LeaseSlot(S3Storage(f"s3://{name}/run", server.options()))
    if request.param == "memory":
        return LeaseSlot(open_storage(f"memory://{tmp_path.name}/{os.urandom(4).hex()}"))
    return LeaseSlot(LocalStorage(tmp_path / "run"))


class Settled:
    """A slot, and pauses in which every write is over that was under way when they began: what settling relies on."""

    def __init__(self, slot: LeaseSlot) -> None:
        self.url = slot.url
        self._slot = slot
        self._under_way: dict[int, int] = {}
        self._count = itertools.count()
        self._turns: dict[int, int] = {}
        self._changed = threading.Condition()

    def read(self) -> tuple[bytes, str] | None:
        with self._changed:
            self._under_way[threading.get_ident()] = next(self._count)
        return self._slot.read()

    def write(self, data: bytes, version: str | None) -> None:
        try:
            self._slot.write(data, version)
        finally:
            self._over()

    def begin(self) -> None:
        """This thread is a taker from now on."""
        with self._changed:
            self._turns[threading.get_ident()] = 0

    def end(self) -> None:
        """It is none any more."""
        with self._changed:
            del self._turns[threading.get_ident()]
            self._changed.notify_all()

    def let_others_try(self) -> None:
        """Return when every other taker has looked again, or is done."""
        self._over()
        with self._changed:
            wanted = {taker: turns + 2 for taker, turns in self._turns.items() if taker != threading.get_ident()}
            tried = lambda: all(self._turns.get(one, least) >= least for one, least in wanted.items())  # noqa: E731
            assert self._changed.wait_for(tried, PATIENCE_SECONDS)

    def pause(self, seconds: float) -> None:
        with self._changed:
            self._turns[threading.get_ident()] += 1
        self._over()
        time.sleep(0.01)  # others get their turn
        with self._changed:
            before = set(self._under_way.values())
            over = lambda: before.isdisjoint(self._under_way.values())  # noqa: E731
            assert self._changed.wait_for(over, PATIENCE_SECONDS)

    def _over(self) -> None:
        with self._changed:
            self._under_way.pop(threading.get_ident(), None)
            self._changed.notify_all()


def test_many_takers_on_a_real_storage_get_it_one_after_another(slot: LeaseSlot) -> None:
    """Threads stand for machines; two never have the lease at once."""
    settled = Settled(slot)
    timing = Timing(ttl_seconds=60.0, pause=settled.pause)
    holding: list[int] = []
    most: list[int] = []
    failed: list[BaseException] = []

    def work(number: int) -> None:
        settled.begin()
        try:
            with take(settled, ME, 60, timing) as lease:
                holding.append(number)
                settled.let_others_try()
                most.append(len(holding))
                lease.check()
                holding.remove(number)
        except BaseException as err:  # noqa: BLE001 - handed to the test's thread
            failed.append(err)
        finally:
            settled.end()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not failed, failed
    assert most == [1, 1, 1]


_HOLD = """
import json, sys
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.storage import open_storage
acquire(open_storage(sys.argv[1], json.loads(sys.argv[2])))
print("acquired", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(moto: S3Server, bucket: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lease of the bucket's run."""
    command = [sys.executable, "-c", _HOLD, f"s3://{bucket}/run", json.dumps(moto.options())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "acquired\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_a_process_holds_a_bucket_until_it_is_killed(
    moto: S3Server, bucket: str, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused naming the first; after `kill -9` it gets it at once, on the same machine."""
    storage = S3Storage(f"s3://{bucket}/run", moto.options())
    holder = read_holder(storage)
    assert holder is not None
    assert holder.pid == other.pid
    with pytest.raises(LeaseHeldError, match=f"process {other.pid} on ") as caught:
        acquire(storage)
    assert "hunter2" not in str(caught.value)
    snapshot = save(Repository(storage))
    assert [info.id for info in Repository(storage).list()] == [snapshot]
    other.send_signal(signal.SIGKILL)
    other.wait(30)
    with acquire(storage) as lease:
        lease.check()
        mine = read_holder(storage)
        assert mine is not None
        assert mine.pid == os.getpid()
    assert read_holder(storage) is None


def test_a_lease_survives_a_bad_network(moto: S3Server, bucket: str, wire: Wire) -> None:
    """A renewal whose answer was lost is ours, not somebody else's."""
    options = moto.options(wire.url)
    slot = LeaseSlot(S3Storage(f"s3://{bucket}/run", options))
    with take(slot, ME, 0, Timing(settle_seconds=0.0)) as lease:
        for fault in ("lost", "503", "refuse", "midbody", "lost"):
            wire.rule(fault, "PUT", times=1)
            lease.renew()
            lease.check()
        wire.rule("corrupt", "GET", times=3)
        lease.check()


def test_a_folder_whose_locks_others_do_not_see_gets_a_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sshfs, CIFS and the like a lock would keep out only processes of this machine."""
    monkeypatch.setattr("ckpt_engine.store.lock_scope.locks_are_shared", lambda _: False)
    storage = LocalStorage(tmp_path)
    with acquire(storage, pause=lambda _: None) as lease:
        assert isinstance(lease, ObjectLease)
        lease.check()
        holder = read_holder(storage)
        assert holder is not None and holder.pid == os.getpid()
    assert read_holder(storage) is None


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/data/run", True),
        ("/data/remote/run", False),
        ("/data/remotely/run", True),
        ("/nfs/run", True),
        ("/nfs/local locks/run", False),
        ("/mnt/windows", False),
    ],
)
def test_mounts_tell_whose_locks_are_shared(path: str, shared: bool) -> None:
    """The innermost mount decides, by type and options."""
    mounts = """\
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 8:2 / /data rw - xfs /dev/sdb rw
3 2 0:5 / /data/remote rw,nosuid - fuse.sshfs host:/x rw
4 1 0:6 / /nfs rw - nfs4 host:/y rw,vers=4.2,local_lock=none
5 4 0:7 / /nfs/local\\040locks rw - nfs host:/z rw,vers=3,local_lock=all
6 1 0:8 / /mnt/windows rw - cifs //host/w rw
"""
    assert locks_are_shared(path, mounts) is shared


def test_records_survive_the_trip() -> None:
    """A record comes back from its bytes, and other bytes are no record."""
    record = Record("token", 7, 30.0, ProcessIdentity.current())
    assert Record.decode(record.encode(ME)) == record
    bad: list[Any] = [b"", b"[]", b"{}", b"1", b'{"lease": {"token": 1, "beat": "x", "ttl_seconds": 1}}']
    assert [Record.decode(data) for data in bad] == [None] * len(bad)
