"""A trainer that takes snapshots into memory, to be killed: `python -m tests.writer.memory_trainer ROOT LOG PLAN`.

It logs one JSON line per thing that a test must know, each with a single write, so that a kill tears at most the last.

Plans:
    die-holding N: holds the steps 1 to N, waits until the last is with the kernel, and kills itself.
    die-of SIGNAL: as die-holding 1, of another signal; 0: it just ends.
    die-forked: as die-holding 1, with a forked child that keeps every descriptor open.
    die-mixed: makes step 1 durable, keeps step 2 in memory, and kills itself.
    die-in-persist GATE: submits step 1, whose storage hangs until GATE exists, and step 2; keeps step 3 in memory.
    die-after-forget: keeps step 1 in memory, lets the writer forget all that it refers to, and kills itself.
    die-away NEAR: keeps step 1 in memory; the nearest tier, NEAR, cannot be written; ROOT is a further one.
    die-blocked: keeps step 1 in memory; the only tier of the run cannot be written any more.
    die-empty: takes nothing at all.
    close: keeps step 1 in memory, closes the writer, and ends.
    storm: keeps each step in memory, without end, and submits every tenth; logs each one before its memory is touched.
    wait: keeps step 1 in memory, and waits to be killed; logs what it is asked for from outside.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from ckpt_engine.copy.job import JobDone, TierConfig, WriterConfig
from ckpt_engine.observe.events import Requested, SnapshotReplicated
from ckpt_engine.writer import launch
from ckpt_engine.writer.client import WriterClient
from ckpt_engine.writer.launch import completed
from ckpt_engine.writer.pulse import HeartbeatPage
from tests.writer import staged
from tests.writer.staged import WAIT_SECONDS, Stage
from tests.writer.trainer import Log, fork_holder

SLOT_BYTES = 1 << 20
DURABLE_EVERY = 10


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def settle(client: WriterClient) -> None:
    """Wait until the kernel has everything."""
    for _ in range(int(WAIT_SECONDS * 100)):
        if client.flushed:
            return
        client.wait(0.01)
    raise SystemExit("never flushed")


class Arena:
    """Three slots; it fills neither the slot of the newest snapshot in memory nor one that is being persisted."""

    def __init__(self, client: WriterClient, nbytes: int = SLOT_BYTES) -> None:
        self.client = client
        self.stages = [Stage(nbytes, slot) for slot in range(3)]
        self.held: Stage | None = None
        self.busy: dict[int, Stage] = {}
        self.jobs = 0
        for stage in self.stages:
            stage.share(client)

    def free(self) -> Stage | None:
        settle(self.client)
        taken = [self.held, *self.busy.values()]
        return next((stage for stage in self.stages if stage not in taken), None)

    def take(self, step: int, *, durable: bool = False) -> None:
        stage = self.free()
        while stage is None:
            self.poll(1.0)
            stage = self.free()
        stage.jobs, self.jobs = self.jobs, self.jobs + 1
        job = stage.job(step)
        if durable:
            self.busy[job.job] = stage
            self.client.submit(job)
        else:
            self.client.hold(job)
        self.held = stage

    def poll(self, timeout: float) -> list[Any]:
        self.client.wait(timeout)
        heard = self.client.poll()
        for message in heard:
            if isinstance(message, JobDone):
                self.busy.pop(message.job)
        return heard


def start(root: str, log: Log, **changes: Any) -> launch.ProcessWriter:
    fields: dict[str, Any] = {"url": root, "lease_wait_seconds": 60.0, "drain_seconds": 60.0, "memory": True}
    fields["linger_seconds"] = float(os.environ.get("TEST_LINGER", "60"))
    client = launch.ProcessWriter.start(completed(WriterConfig(**{**fields, **changes})))
    log.write(writer=client.pid)
    return client


def storm(root: str, log: Log) -> None:
    """Until killed."""
    client = start(root, log, keep={"last": 2})
    pulse = HeartbeatPage()
    client.attach_pulse(pulse.fd)
    arena = Arena(client)
    step = int(os.environ.get("TEST_STEP", "0"))
    while True:
        step += 1
        pulse.beat(step)
        arena.take(step, durable=step % DURABLE_EVERY == 0)
        settle(client)
        log.write(kept=step)
        arena.poll(0.0)


def wait(root: str, log: Log) -> None:
    """Until killed."""
    client = start(root, log)
    arena = Arena(client)
    arena.take(1)
    settle(client)
    log.write(kept=1)
    while True:
        for message in arena.poll(60.0):
            if isinstance(message, Requested):
                log.write(what=message.what, who=message.who)


def main(root: str, path: str, plan: str, *rest: str) -> None:
    log = Log(path)
    if plan == "storm":
        storm(root, log)
    elif plan == "wait":
        wait(root, log)
    elif plan == "die-holding":
        arena = Arena(start(root, log))
        for step in range(1, int(rest[0]) + 1):
            arena.take(step)
        settle(arena.client)
        die()
    elif plan in ("die-of", "die-forked"):
        client = start(root, log)
        if plan == "die-forked":
            fork_holder(log)
        Arena(client).take(1)
        settle(client)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), int(rest[0]) if rest else signal.SIGKILL)
    elif plan == "die-mixed":
        client = start(root, log)
        pulse = HeartbeatPage()
        client.attach_pulse(pulse.fd)
        arena = Arena(client)
        pulse.beat(1)
        arena.take(1, durable=True)
        while arena.busy:
            arena.poll(1.0)
        pulse.beat(2)
        arena.take(2)
        pulse.beat(3)
        settle(client)
        die()
    elif plan == "die-in-persist":
        launch.ENTRY = Path(__file__).with_name("gated_writer.py")
        os.environ["TEST_GATE"] = rest[0]
        arena = Arena(start(root, log))
        arena.take(1, durable=True)
        while not Path(rest[0]).with_suffix(".reached").exists():
            arena.poll(0.01)
        arena.take(2, durable=True)
        arena.take(3)
        settle(arena.client)
        die()
    elif plan == "die-after-forget":
        client = start(root, log)
        arena = Arena(client)
        arena.take(1)
        client._send(staged.arena(gone=(0, 1, 2)))
        settle(client)
        die()
    elif plan == "die-away":
        client = start(rest[0], log, tiers=(TierConfig(root),))
        arena = Arena(client)
        arena.take(1, durable=True)
        heard: list[Any] = []  # the event of the copy may arrive together with the outcome
        while arena.busy or not any(isinstance(message, SnapshotReplicated) for message in heard):
            heard += arena.poll(1.0)
        shutil.rmtree(Path(rest[0]) / "data")
        (Path(rest[0]) / "data").write_text("in the way")
        arena.take(2)
        settle(client)
        die()
    elif plan == "die-blocked":
        client = start(root, log)
        (Path(root) / "data").write_text("in the way")
        Arena(client).take(1)
        settle(client)
        die()
    elif plan == "die-empty":
        start(root, log)
        die()
    elif plan == "close":
        client = start(root, log)
        Arena(client).take(1)
        if not client.close(WAIT_SECONDS):
            raise SystemExit("not closed")
    else:
        raise SystemExit(f"no such plan: {plan}")


if __name__ == "__main__":
    main(*sys.argv[1:])
