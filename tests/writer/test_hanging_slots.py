"""A slot of the arena that a hanging call reads: the trainer does not get it back, and does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.observe.events import Event, SnapshotSkipped
from ckpt_engine.store.storage.disk import Disk
from tests.writer.passing import it_hangs, let_time_pass_where_calls_hang, until_it_is_back
from tests.writer.staged import WAIT_SECONDS


class Frozen(Disk):
    """One kind of call below a folder hangs while it is frozen.

    Args:
        call: `write` or `sync`.
    """

    def __init__(self, folder: Path, call: str) -> None:
        self._folder = str(folder)
        self._real = getattr(Disk, call)
        self.thawed = threading.Event()
        self.thawed.set()

    def call(self, fd: int, *rest: Any) -> Any:
        if not self.thawed.is_set() and Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(self._folder):
            it_hangs()
            assert self.thawed.wait(WAIT_SECONDS)
        return self._real(self, fd, *rest)


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture(params=["write", "sync"])
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Frozen]:
    """The disk of the nearest tier; a call that hangs there is given up at once instead of after half a minute."""
    let_time_pass_where_calls_hang(monkeypatch)
    made = Frozen(tmp_path / "near", request.param)
    monkeypatch.setattr(Disk, request.param, lambda _, *rest: made.call(*rest))
    yield made
    made.thawed.set()


def start(root: Path, slots: int) -> tuple[Checkpointer, Sink]:
    tiers: Sequence[dict[str, str]] = [{"url": str(root / "near")}, {"url": str(root / "far")}]
    ckpt = Checkpointer({"tiers": tiers, "writer": "thread", "slots": slots, "keep": {"last": 9}})
    sink = Sink()
    ckpt.engine.events = sink
    return ckpt, sink


def state(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1 << 20,), step, dtype=torch.int32)}


@pytest.mark.parametrize("slots", [1, 2])
def test_a_slot_is_not_filled_again_while_a_call_may_read_it(tmp_path: Path, frozen: Frozen, slots: int) -> None:
    """With one slot snapshots are skipped meanwhile, with two they go on in the other one; nothing is torn."""
    ckpt, sink = start(tmp_path, slots)
    ckpt.save(state(1), step=1).wait(WAIT_SECONDS)
    frozen.thawed.clear()
    ckpt.save(state(2), step=2).wait(WAIT_SECONDS)
    third = ckpt.save(state(3), step=3)
    if slots == 1:
        assert not ckpt.engine.ready()
        assert third.skipped is not None
        assert SnapshotSkipped(3, "busy") in sink.events
    else:
        third.wait(WAIT_SECONDS)
    frozen.thawed.set()
    for _ in range(int(WAIT_SECONDS * 20)):
        ckpt.engine.poll()
        if not ckpt.engine._pipeline.in_flight._held:
            break
        threading.Event().wait(0.05)
    assert not ckpt.engine._pipeline.in_flight._held
    until_it_is_back(f"file://{tmp_path / 'near'}")
    ckpt.save(state(4), step=4).wait(WAIT_SECONDS)
    ckpt.close(WAIT_SECONDS)
    kept = [1, 2, 4] if slots == 1 else [1, 2, 3, 4]
    found = Checkpointer({"tiers": [{"url": str(tmp_path / "near")}, {"url": str(tmp_path / "far")}]})
    assert sorted({info.step for info in found.snapshots()}) == kept
    for step in kept:
        assert torch.equal(found.load(step)["weight"], state(step)["weight"])
    assert sorted(info.step for info in Checkpointer(str(tmp_path / "near")).snapshots()) == [1, 4]


def test_a_slot_that_hangs_is_given_up_with_its_writer(tmp_path: Path, frozen: Frozen) -> None:
    """A lost writer never says that the slot is free: another slot takes its place, and the run goes on."""
    others = threading.enumerate()
    ckpt, _ = start(tmp_path, 1)
    ckpt.save(state(1), step=1).wait(WAIT_SECONDS)
    frozen.thawed.clear()
    ckpt.save(state(2), step=2).wait(WAIT_SECONDS)
    assert not ckpt.engine.ready()
    assert ckpt.engine._pipeline._writer is not None
    client = ckpt.engine._pipeline._writer.client
    ckpt.engine._pipeline._lose_writer()
    assert ckpt.engine.ready()
    frozen.thawed.set()
    assert client.close(WAIT_SECONDS)
    ckpt.close(WAIT_SECONDS)
    for thread in threading.enumerate():
        if thread.name.startswith("ckpt-") and thread not in others:
            thread.join(WAIT_SECONDS)
