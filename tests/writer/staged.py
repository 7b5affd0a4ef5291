"""A trainer without torch: an arena slot, states that say their step in every byte, and checks of the outcome."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckpt_engine.copy.job import EntryLayout, JobDone, Layout, PersistJob, to_json
from ckpt_engine.observe.events import SnapshotFailed
from ckpt_engine.store.container import build_header, digest, parse_header
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.writer.client import Message, WriterClient
from ckpt_engine.writer.messages import Body, Kind

WAIT_SECONDS = 60.0
"""Longer than anything here takes; a test that reaches it has failed."""


class Stage:
    """One slot holding a float32 array of rows, an int64 scalar, and an empty array.

    Args:
        nbytes: size of the array of rows; a multiple of 1024.
    """

    def __init__(self, nbytes: int = 64 << 10, slot: int = 0) -> None:
        self.slot = slot
        shapes = (("model.weight", "float32", "F32", (nbytes // 1024, 256), nbytes),)
        rows = [*shapes, ("step", "int64", "I64", (), 8), ("model.none", "float32", "F32", (0, 3), 0)]
        header = build_header([(name, code, shape, size) for name, _, code, shape, size in rows], {"format": "pt"})
        offset, entries = len(header), []
        for name, dtype, code, shape, size in rows:
            entries.append(EntryLayout(name, dtype, shape, code, offset, size))
            offset += size
        self.layout = Layout(len(header), offset, tuple(entries))
        self.nbytes = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("test-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self._memory = mmap.mmap(self.fd, self.nbytes)
        self._memory[: len(header)] = header
        self.jobs = 0

    def share(self, client: WriterClient) -> None:
        """Send the client everything jobs refer to."""
        body, fds = self.message()
        client._send(body, fds)
        os.close(fds[0])

    def attach(self, client: WriterClient, nbytes: int | None = None) -> None:
        """Send the client this slot only, perhaps as if it had so many bytes."""
        client._send(arena([self.slot, nbytes or self.nbytes]), [self.fd])

    def message(self, slot: int | None = None) -> tuple[Body, list[int]]:
        """What `share` sends, perhaps under another number, and its descriptors."""
        trees = {
            "model": {"weight": {"$": "tensor", "entry": "model.weight"}, "none": NONE, "also": NONE},
            "loop": {"step": {"$": "tensor", "entry": "step"}, "epoch": {"$": "v", "i": 0}},
        }
        number, layout = self.slot if slot is None else slot, to_json(self.layout)
        said = arena([number, self.nbytes], layout=layout, keys=tuple(trees), trees=trees)
        return said, [os.dup(self.fd)]

    def fill(self, step: int) -> None:
        """Put the state of `step` into the slot."""
        weight, scalar, _ = self.layout.entries
        self._memory[weight.offset : weight.offset + weight.nbytes] = weight_bytes(step, weight.nbytes)
        self._memory[scalar.offset : scalar.offset + 8] = step.to_bytes(8, "little")

    def job(self, step: int, **changes: Any) -> PersistJob:
        """The job for `step`; the slot is filled."""
        self.fill(step)
        self.jobs += 1
        fields: dict[str, Any] = {
            "job": self.jobs,
            "slot": self.slot,
            "values": {"loop": [step // 10], "model": []},
            "step": step,
            "epoch": step // 10,
            "reason": "interval",
            "metrics": {"loss": 1.0 / (step + 1)},
            "created": time.time(),
            "instant_monotonic": time.monotonic(),
            "software": {"python": "3"},
        }
        return PersistJob(**{**fields, **changes})

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


def arena(slot: list[int] | None = None, **more: Any) -> Body:
    """A message about the arena."""
    return {"kind": Kind.ARENA, "slot": slot, "gone": (), "layout": None, "keys": (), "trees": {}, **more}


NONE = {"$": "tensor", "entry": "model.none"}


def weight_bytes(step: int, nbytes: int) -> bytes:
    """The rows of `step`: every 8 bytes say it."""
    return step.to_bytes(8, "little") * (nbytes // 8)


def outcome(client: WriterClient, job: int, heard: list[Message] | None = None) -> JobDone:
    """Wait for the outcome of `job`; everything polled on the way goes to `heard`."""
    kept = [] if heard is None else heard
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        client.wait(1.0)
        found = client.poll()
        kept += found
        for message in found:
            if isinstance(message, JobDone) and message.job == job:
                return message
    raise AssertionError(f"job {job} was never answered; heard {kept}")


def settle(client: WriterClient) -> None:
    """Wait until all that was submitted is done, and the retention after it: for one more job, which fails at once."""
    last = PersistJob(time.monotonic_ns(), -1, {}, 0, None, "last", {}, 0.0, 0.0)
    client.submit(last)
    deadline = time.monotonic() + WAIT_SECONDS
    while not any(isinstance(one, JobDone) and one.job == last.job for one in tuple(client.news)):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    for one in tuple(client.news):
        done = isinstance(one, JobDone) and one.job == last.job
        if done or (isinstance(one, SnapshotFailed) and str(last.job) in one.message):
            client.news.remove(one)


def check_all(root: Path) -> list[SnapshotInfo]:
    """Every snapshot of a run, verified: manifest, container, digests, and that its bytes are those of its step."""
    repository = Repository(open_storage(root))
    listing = repository.scan()
    assert listing.damaged == ()
    for info in listing.snapshots:
        check_one(repository, root, info)
    return list(listing.snapshots)


def check_one(repository: Repository, root: Path, info: SnapshotInfo) -> None:
    """Verify one snapshot."""
    manifest = repository.read(info.id)
    (file,) = manifest.files
    data = (root / file.name).read_bytes()
    assert len(data) == file.nbytes
    named = {entry.name: entry for entry in parse_header(data).entries}
    for name, entry in manifest.entries.items():
        stored = b""
        for piece in entry.pieces:
            found = data[piece.offset : piece.offset + piece.nbytes]
            assert digest(found) == piece.digest
            stored += found
        assert stored == data[named[name].start : named[name].end]
        if name == "model.weight":
            assert stored == weight_bytes(info.step, len(stored))
        elif name == "step":
            assert int.from_bytes(stored, "little") == info.step
    assert manifest.tree["loop"]["epoch"] == info.step // 10


def acknowledged(log: Iterable[str]) -> list[tuple[str, int]]:
    """Ids and steps from the log of a trainer that wrote one JSON line per acknowledged snapshot."""
    rows = [json.loads(line) for line in log if line.endswith("\n")]
    return [(row["id"], row["step"]) for row in rows]
