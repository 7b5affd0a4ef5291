"""The lease on two NFS mounts; run by `test_nfs.py` where `$NFS_A` and `$NFS_B` are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.errors import LeaseHeldError
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire, read_holder
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.store.samples import save

MOUNTS = [Path(os.environ[name]) for name in ("NFS_A", "NFS_B")]
WAIT_SECONDS = 120.0
HOLD = """
import sys
from pathlib import Path
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.storage.local import LocalStorage
lease = acquire(LocalStorage(Path(sys.argv[1])))
print("acquired", flush=True)
sys.stdin.read()
lease.check()
lease.release()
"""


@pytest.fixture
def both() -> list[LocalStorage]:
    """The same new folder, through each mount."""
    name = uuid.uuid4().hex
    return [LocalStorage(mount / name) for mount in MOUNTS]


@pytest.fixture
def holder(both: list[LocalStorage]) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lease through the first mount, until its input ends."""
    command = [sys.executable, "-c", HOLD, str(both[0].root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "acquired\n"
    yield process
    process.kill()
    process.wait(WAIT_SECONDS)
    process.stdin.close()
    process.stdout.close()


def test_a_holder_elsewhere_is_named(both: list[LocalStorage], holder: subprocess.Popen[str]) -> None:
    """The second one is refused through the same mount and through the other, and reading goes on."""
    save(Repository(both[0]))
    for storage in both:
        with pytest.raises(LeaseHeldError, match=f"process {holder.pid} on"):
            acquire(storage)
    assert len(Repository(both[1]).list()) == 1


def test_a_lease_given_back_is_free_elsewhere(both: list[LocalStorage], holder: subprocess.Popen[str]) -> None:
    """The holder's own check holds until then."""
    holder.communicate("", timeout=WAIT_SECONDS)
    assert holder.returncode == 0
    with acquire(both[1]) as lease:
        lease.check()
        with pytest.raises(LeaseHeldError):
            acquire(both[0])


def test_a_lease_dies_with_its_holder(both: list[LocalStorage], holder: subprocess.Popen[str]) -> None:
    """After `kill -9` of the holder a process that waits on the other mount gets the lease."""
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(WAIT_SECONDS)
    with acquire(both[1], wait_seconds=WAIT_SECONDS) as lease:
        lease.check()
        held_by = read_holder(both[0])
        assert held_by is not None
        assert held_by.pid == os.getpid()


def test_a_lease_that_is_removed_elsewhere_is_lost(both: list[LocalStorage]) -> None:
    """A folder that another machine clears has another owner."""
    lease = acquire(both[0])
    Path(both[1].root, names.LEASE).unlink()
    with pytest.raises(LeaseHeldError, match="removed or replaced"):
        for _ in range(60):  # a client remembers attributes for a while
            lease.check()
            time.sleep(1)
    lease.release()
