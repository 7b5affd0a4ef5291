"""A trainer to be killed: `python -m tests.writer.trainer ROOT LOG PLAN`.

It logs one JSON line per thing that a test must know, each with a single write, so that a kill tears at most the last.

Plans:
    storm: snapshots without end; a lost writer is replaced.
    storm-tiers FAR: as storm, with a further tier.
    die-after N: submits N jobs on N slots and kills itself, without waiting for anything.
    die-holding: submits one job and kills itself, with a forked child that keeps every descriptor open.
    die-behind-a-gate FILE N SECONDS: as die-after, with storage that hangs until FILE exists, and `drain_seconds`.
    leave KIND: saves twice by a `process` or a `thread`, and ends without closing anything.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from ckpt_engine import Checkpointer
from ckpt_engine.copy.job import JobDone, TierConfig, WriterConfig
from ckpt_engine.errors import WriterError
from ckpt_engine.writer import launch
from ckpt_engine.writer.client import WriterClient
from ckpt_engine.writer.launch import completed
from tests.writer.staged import Stage

STORM_KEEP = 5


class Log:
    """Appends lines that survive the death of this process."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, **row: Any) -> None:
        os.write(self._fd, json.dumps(row).encode() + b"\n")


def start(root: str, log: Log, **changes: Any) -> launch.ProcessWriter:
    config = completed(WriterConfig(**{"url": root, "lease_wait_seconds": 60.0, "drain_seconds": 30.0, **changes}))
    client = launch.ProcessWriter.start(config)
    log.write(writer=client.pid)
    return client


def storm(root: str, log: Log, *tiers: TierConfig) -> None:
    """Two slots, a snapshot whenever one is free, until killed."""
    changes: dict[str, Any] = {"keep": {"last": STORM_KEEP}, "tiers": tiers}
    client = start(root, log, **changes)
    stages = [Stage(1 << 20, slot) for slot in (0, 1)]
    for stage in stages:
        stage.share(client)
    free, busy, step, job = list(stages), {}, 0, 0
    while True:
        while free:
            stage = free.pop()
            step, stage.jobs, job = step + 1, job, job + 1
            busy[job] = (stage, step)
            try:
                client.submit(stage.job(step))
            except WriterError:  # it has just been killed
                break
        client.wait(60.0)
        for message in client.poll():
            if isinstance(message, JobDone):
                stage, at = busy.pop(message.job)
                free.append(stage)
                if message.ok:
                    log.write(id=message.snapshot_id, step=at)
        if not client.alive:
            client.close(60.0)
            free, busy = list(stages), {}
            client = start(root, log, **changes)
            for stage in stages:
                stage.share(client)


def die_after(root: str, log: Log, jobs: int, **changes: Any) -> None:
    """Submit `jobs` jobs at once and be gone."""
    submit(start(root, log, **changes), jobs)
    os.kill(os.getpid(), signal.SIGKILL)


def submit(client: WriterClient, jobs: int) -> None:
    """Submit `jobs` jobs at once."""
    for number in range(jobs):
        stage = Stage(8 << 20, slot=number)
        stage.share(client)
        stage.jobs = number
        client.submit(stage.job(number + 1))


def fork_holder(log: Log) -> None:
    """A child like a loader worker: it inherits every descriptor and outlives us."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    log.write(holder=child)


def main(root: str, path: str, plan: str, *rest: str) -> None:
    log = Log(path)
    if plan == "storm":
        storm(root, log)
    elif plan == "storm-tiers":
        storm(root, log, TierConfig(rest[0], keep={"last": 2}))
    elif plan == "die-after":
        die_after(root, log, int(rest[0]))
    elif plan == "die-holding":
        client = start(root, log)
        fork_holder(log)
        stage = Stage(8 << 20)
        stage.share(client)
        client.submit(stage.job(1))
        os.kill(os.getpid(), signal.SIGKILL)
    elif plan == "die-behind-a-gate":
        launch.ENTRY = Path(__file__).with_name("gated_writer.py")
        os.environ["TEST_GATE"] = rest[0]
        die_after(root, log, int(rest[1]), drain_seconds=float(rest[2]))
    elif plan == "leave":
        checkpointer = Checkpointer(root, writer=rest[0], keep={"last": 9})
        for step in (1, 2):
            assert checkpointer.save({"w": torch.full((1 << 20,), float(step))}, step=step).skipped is None
    else:
        raise SystemExit(f"no such plan: {plan}")


if __name__ == "__main__":
    main(*sys.argv[1:])
