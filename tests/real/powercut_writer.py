"""What a power cut interrupts: `python -m tests.real.powercut_writer ROOT PROMISES [careless]`.

Snapshots without end, through the writer process, with retention and pins. Whatever it has promised is one synced line
of PROMISES, a file that the cut does not reach: `saved ID`, `pinned ID`, and before it takes a pin away `unpinning ID`.
A careless one syncs nothing but its promises: it shows that the cut is one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ckpt_engine.copy.job import JobDone, WriterConfig
from ckpt_engine.store import pins
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import launch
from ckpt_engine.writer.launch import completed
from tests.store.samples import save
from tests.writer.staged import Stage

KEEP = 5
PIN_EVERY = 4
NBYTES = 1 << 20


class Promises:
    """Lines that are on the host's disk before `write` returns."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())
        os.fsync(self._fd)


def careful(root: str, promises: Promises) -> None:
    """As a trainer does it: two slots, a snapshot whenever one is free."""
    client = launch.ProcessWriter.start(
        completed(WriterConfig(root, lease_wait_seconds=60.0, drain_seconds=30.0, keep={"last": KEEP}))
    )
    repository = Repository(open_storage(root))
    stages = [Stage(NBYTES, slot) for slot in (0, 1)]
    for stage in stages:
        stage.share(client)
    free, busy, job = list(stages), {}, 0
    pinned = list(pins.pinned_ids(repository.storage))
    while client.alive:
        while free:
            stage = free.pop()
            stage.jobs, job = job, job + 1
            busy[job] = stage
            client.submit(stage.job(job))
        client.wait(60.0)
        for message in client.poll():
            if not isinstance(message, JobDone):
                continue
            free.append(busy.pop(message.job))
            if message.snapshot_id is None:
                raise SystemExit(f"a snapshot failed: {message}")
            promises.write(f"saved {message.snapshot_id}")
            if message.job % PIN_EVERY == 0:
                pins.pin(repository, message.snapshot_id, "kept")
                promises.write(f"pinned {message.snapshot_id}")
                for old in pinned:
                    promises.write(f"unpinning {old}")
                    pins.unpin(repository, old)
                pinned = [message.snapshot_id]
    raise SystemExit("the writer died")


class _NoSync(Disk):
    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: str) -> None:
        pass


def careless(root: str, promises: Promises) -> None:
    """The same order of writes, and no sync."""
    repository = Repository(LocalStorage(Path(root), disk=_NoSync()))
    step = 0
    while True:
        step += 1
        promises.write(f"saved {save(repository, step)}")


if __name__ == "__main__":
    {2: careful, 3: careless}[len(sys.argv) - 1](sys.argv[1], Promises(sys.argv[2]))
