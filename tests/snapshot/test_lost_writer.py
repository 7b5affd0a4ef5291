"""A writer that is killed costs no snapshot: the arena still has what it was writing, and the next one writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import WriterError
from ckpt_engine.observe.events import Notice, SnapshotFailed, WriterLost
from tests.snapshot.test_newest import Arena
from tests.support.writers import no_writing

WAIT_SECONDS = 60.0


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(step)), "step": step}


def steps(folder: Path) -> list[int]:
    with Checkpointer(folder) as ckpt:
        found = ckpt.load()
        assert found is not None and torch.equal(found["w"], state(found["step"])["w"])
        return [one.step for one in ckpt.snapshots()]


@pytest.mark.parametrize("memory", [False, True], ids=["disk", "memory tier"])
def test_the_next_writer_writes_what_the_lost_one_had(tmp_path: Path, memory: bool) -> None:
    """In the order of the snapshots, and without another `save`."""
    tiers = ["memory", str(tmp_path)] if memory else [str(tmp_path)]
    with Checkpointer({"tiers": tiers, "writer": "process", "slots": 4, "keep": {"last": 9}}) as ckpt:
        with no_writing(ckpt) as writer:
            handles = [ckpt.save(state(step), step=step) for step in (1, 2)]
            writer.kill()
        assert [bool(handle.wait(WAIT_SECONDS)) for handle in handles] == [True, True]
        third = ckpt.save(state(3), step=3)
        assert third.wait(WAIT_SECONDS)
        assert handles[0].wait() < handles[1].wait() < third.wait()
    assert steps(tmp_path) == [1, 2, 3]


def test_the_last_snapshot_of_a_run_outlives_its_writer(tmp_path: Path) -> None:
    """`close` starts another writer for it."""
    with Checkpointer({"tiers": str(tmp_path), "writer": "process"}) as ckpt, no_writing(ckpt) as writer:
        ckpt.save(state(1), step=1)
        writer.kill()
    assert steps(tmp_path) == [1]


def test_a_snapshot_that_two_writers_are_lost_with_fails() -> None:
    """It may be what they die of. The next one is written as usual."""
    arena = Arena()
    handle = arena.save(durable=True)
    for _ in range(2):
        assert not handle.done()
        arena.writer.die()
        arena.pipeline.poll()
        arena.arrive()
    assert isinstance(handle.error, WriterError)
    told = [type(one) for one in arena.events if isinstance(one, WriterLost | Notice | SnapshotFailed)]
    assert told == [WriterLost, Notice, WriterLost, SnapshotFailed]
    after = arena.save(durable=True)
    arena.arrive()
    arena.writer.finish()
    assert after.wait(WAIT_SECONDS) and len(arena.writers) == 3
    arena.pipeline.close(WAIT_SECONDS)


def test_a_snapshot_that_is_complete_after_its_writer_died_goes_to_the_next_one() -> None:
    """It was being copied when the writer died, and the copier learns of that first."""
    arena = Arena()
    arena.save()
    arena.writer.alive, arena.writer.died = False, True
    handle = arena.save(durable=True)
    assert not handle.done(), "the writer's last messages are still to come"
    arena.writer.die()
    arena.pipeline.poll()
    arena.arrive()
    assert len(arena.writers) == 2
    arena.writer.finish()
    assert handle.wait(WAIT_SECONDS)
    arena.pipeline.close(WAIT_SECONDS)
