"""The alarm for weights that do not change: digests of two manifests are compared, nothing else."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.errors import StorageMissingError
from ckpt_engine.observe.events import Event, SnapshotCommitted, StaleSnapshot
from ckpt_engine.preempt import divergence
from ckpt_engine.preempt.divergence import Content, StaleWatch, unchanged
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.runs import Case, EverySnapshotIsDurable, Model, fit
from tests.support.trainers import wait_for_the_arena

PATIENCE_SECONDS = 60.0


def manifest(step: int, **digests: str) -> Manifest:
    """A snapshot with one entry per keyword."""
    info = SnapshotInfo(f"s{step}", step, step, None, "interval", 0.0, 8)
    entries = {name: Entry("float32", (2,), (Piece(0, 0, 8, digest, 8),), "F32") for name, digest in digests.items()}
    return Manifest(info, "run", {"size": 1}, {}, (DataFile("a", 8),), entries, {})


def same(before: Manifest, after: Manifest, trainable: list[str]) -> bool:
    return unchanged(Content.of(before, trainable), Content.of(after, trainable))


def test_weights_that_are_the_same_are_reported() -> None:
    """Changed counters, buffers or random streams do not matter."""
    before, after = manifest(1, w="a", b="b", rng="x"), manifest(2, w="a", b="b", rng="y")
    assert same(before, after, ["w", "b"])
    assert not same(before, manifest(2, w="a", b="c"), ["w", "b"])


def test_nothing_is_reported_where_nothing_is_known() -> None:
    """No trainable entry in common, no step in between, bytes that are encoded, other pieces."""
    before, after = manifest(1, w="a"), manifest(2, w="a")
    assert not same(before, after, [])
    assert not same(before, after, ["v"])
    assert not same(before, manifest(1, w="a"), ["w"])
    piece = after.entries["w"].pieces[0]
    for pieces in ((dataclasses.replace(piece, codec="zstd"),), (piece, piece)):
        entry = dataclasses.replace(after.entries["w"], pieces=pieces)
        encoded = dataclasses.replace(after, entries={"w": entry})
        assert not same(before, encoded, ["w"])
        assert not same(encoded, dataclasses.replace(encoded, info=manifest(3).info), ["w"]) or len(pieces) == 2


def committed(snapshot: str) -> SnapshotCommitted:
    return SnapshotCommitted(snapshot, 1, "/run", 8, 8, 1.0, 1.0, 0.0, 0.0)


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def looked(watch: StaleWatch) -> None:
    assert watch._thread is not None
    watch._thread.join(PATIENCE_SECONDS)
    assert not watch._thread.is_alive()


def test_snapshots_are_compared_without_waiting_for_storage() -> None:
    """The first two that can be read one after the other, then now and then; what was found is handed out once."""
    gate = threading.Event()
    asked: list[str] = []

    def read(snapshot: str) -> Manifest:
        asked.append(snapshot)
        assert gate.wait(PATIENCE_SECONDS)
        return manifest(int(snapshot[1:]), w="a")

    watch = StaleWatch(["w"], read)
    watch.emit(committed("s1"))
    until(lambda: asked)
    watch.emit(committed("s2"))
    assert watch.take() is None
    gate.set()
    looked(watch)
    watch.emit(committed("s3"))
    looked(watch)
    assert watch.take() == StaleSnapshot(3, 1, 1)
    watch.emit(committed("s4"))
    assert watch.take() is None and asked == ["s1", "s3"]


def test_each_manifest_is_read_while_its_snapshot_is_the_newest() -> None:
    """Whatever retention does to a snapshot once the next one is there: it is not asked for again."""
    there: set[str] = set()

    def read(snapshot: str) -> Manifest:
        if snapshot not in there:
            raise StorageMissingError("gone")
        return manifest(int(snapshot[1:]), w="a")

    watch = StaleWatch(["w"], read)
    for snapshot in ("s1", "s2", "s3"):
        watch.emit(committed(snapshot))  # the first one is gone before it is looked at
        looked(watch)
        there.clear()
        there.add(f"s{int(snapshot[1:]) + 1}")
    assert watch.take() == StaleSnapshot(3, 2, 1)


def test_no_thread_outlives_a_run() -> None:
    """A look that goes on is waited for, and none begins behind it."""
    begun = threading.Event()

    def read(snapshot: str) -> Manifest:
        begun.set()
        return manifest(int(snapshot[1:]), w="a")

    watch = StaleWatch(["w"], read)
    watch.emit(committed("s1"))
    assert begun.wait(PATIENCE_SECONDS)
    watch.close()
    watch.emit(committed("s2"))
    assert "ckpt-stale" not in {thread.name for thread in threading.enumerate()}


class Stuck(Model):
    """Trains with a learning rate of nothing."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


KEEPS = ({"last": 9}, {"last": 1}, {"last": 9, "components": {"state_dict": {"last": 1}}})


@pytest.mark.parametrize(
    ("model", "warned", "keep"), [*((Stuck, True, keep) for keep in KEEPS), (Model, False, KEEPS[1])]
)
def test_a_run_whose_optimizer_does_nothing_is_warned(
    model: type[Model], warned: bool, keep: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch norm's buffers and the counters change all the same. A run that trains hears nothing."""
    monkeypatch.setattr(divergence, "EVERY_SECONDS", math.inf)  # else a slow run hears it again
    ckpt = AdaptiveCheckpoint(str(tmp_path), every_n_steps=2, keep=keep, writer="thread")
    events: list[Event] = []

    class Listen(EverySnapshotIsDurable):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            run = ckpt._run
            assert run is not None
            run.stopping._sinks.add(self)

        def emit(self, event: Event) -> None:
            events.append(event)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            assert ckpt._run is not None
            wait_for_the_arena(ckpt._run.engine)
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

        def on_train_batch_end(self, *args: Any) -> None:
            run = ckpt._run
            assert run is not None and run.stopping._stale is not None
            if (thread := run.stopping._stale._thread) is not None:
                thread.join(PATIENCE_SECONDS)

    fit(Case(model=model), [ckpt, Listen(ckpt)])
    found = [event for event in events if isinstance(event, StaleSnapshot)]
    assert [one.tensors for one in found] == ([6] if warned else [])
    assert all(one.step > one.since_step for one in found)
