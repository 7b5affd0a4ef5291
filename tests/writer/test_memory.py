"""Snapshots that live in the writer's memory only: nothing complete is lost when the trainer is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.restore import memory
from ckpt_engine.restore.load import load
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import control
from tests.support import interpreters
from tests.support.files import open_files
from tests.writer.staged import WAIT_SECONDS, check_all, weight_bytes
from tests.writer.test_process import REPOSITORY, gone
from tests.writer.test_storm import rows


def run_trainer(root: Path, *plan: str, status: int = -signal.SIGKILL, **environment: str) -> dict[str, Any]:
    """Run a trainer to its end; what it logged, with the last value of each name."""
    with trainer(root, *plan, **environment) as process:
        assert process.wait(WAIT_SECONDS) == status, root.with_suffix(".err").read_text()
    return logged(root)


@contextmanager
def trainer(root: Path, *plan: str, **environment: str) -> Iterator[interpreters.Popen]:
    """A running trainer, which is killed at the end."""
    with root.with_suffix(".err").open("w") as stderr:
        process = interpreters.Popen(
            [sys.executable, "-m", "tests.writer.memory_trainer", str(root), str(root.with_suffix(".log")), *plan],
            cwd=REPOSITORY,
            stdout=stderr,
            stderr=stderr,
            env={**os.environ, **environment},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)


def logged(root: Path) -> dict[str, Any]:
    return {name: value for row in rows(root.with_suffix(".log")) for name, value in row.items()}


class MemoryPlace:
    """A snapshot in memory, as a restarted trainer reads it."""

    def __init__(self, root: str, storage: memory.MemoryStorage) -> None:
        self._root = root
        self._storage = storage
        self.repository = Repository(storage)

    def release(self, *, bye: bool = True) -> None:
        """Give up the memory; `bye`: as the next writer does it, which takes the name."""
        self._storage.close()
        if bye:
            control.ask(self._root, {"what": control.Question.BYE}, WAIT_SECONDS)


def attach(root: str, timeout: float) -> MemoryPlace | None:
    storage = memory.attach(root, timeout)
    return None if storage is None else MemoryPlace(root, storage)


def attached(root: Path) -> MemoryPlace:
    place = attach(str(root), WAIT_SECONDS)
    assert place is not None
    return place


def step_in_memory(place: MemoryPlace) -> int:
    """The step that is restored from memory alone, every byte of it checked."""
    found = load([place.repository])
    assert found is not None
    assert found.from_memory
    step = found.info.step
    check_state(found.state, step)
    return step


def check_state(state: Any, step: int) -> None:
    weight = state["model"]["weight"]
    assert weight.numpy().tobytes() == weight_bytes(step, weight.numel() * 4)
    assert int(state["loop"]["step"]) == step


def steps(root: Path) -> list[int]:
    return [info.step for info in check_all(root)]


def test_a_hold_that_was_flushed_just_before_the_kill_is_not_lost(tmp_path: Path) -> None:
    """It is served from memory, and on the disk before the writer ends."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-holding", "1")
    place = attached(root)
    assert step_in_memory(place) == 1
    place.release()
    assert gone(log["writer"])
    assert steps(root) == [1]


@pytest.mark.parametrize("number", [signal.SIGSEGV, 0], ids=["crash", "exit"])
def test_it_does_not_matter_how_the_trainer_ends(tmp_path: Path, number: int) -> None:
    """By an error of its own, or because its script just ends without closing anything."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-of", str(int(number)), status=-number)
    place = attached(root)
    assert step_in_memory(place) == 1
    place.release()
    assert gone(log["writer"])
    assert steps(root) == [1]


def test_a_forked_child_does_not_hide_the_end_of_the_trainer(tmp_path: Path) -> None:
    """Like a loader worker that outlives it, with every descriptor open."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-forked")
    try:
        place = attached(root)
        assert step_in_memory(place) == 1
        place.release()
        assert gone(log["writer"])
    finally:
        os.kill(log["holder"], signal.SIGKILL)
    assert steps(root) == [1]


def test_of_many_holds_the_newest_is_kept(tmp_path: Path) -> None:
    """Older ones are superseded, and none of them costs a write; the memory of one slot is all that is kept."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-holding", "50")
    place = attached(root)
    assert step_in_memory(place) == 50
    slots = set()
    for fd, target in open_files(log["writer"]).items():
        with suppress(FileNotFoundError):  # that of the reply is closed a moment later
            if "memfd:test-arena" in target:
                slots.add(fd.stat().st_ino)
    assert len(slots) == 1
    place.release()
    assert gone(log["writer"])
    assert steps(root) == [50]


def test_the_snapshot_in_memory_is_the_one_on_the_disk(tmp_path: Path) -> None:
    """Same id, same manifest: together they are two copies of one snapshot, and one mends the other."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-mixed")
    place = attached(root)
    snapshot = place.repository.ids()[-1].id
    manifest = place.repository.read(snapshot)
    found = load([place.repository, Repository(LocalStorage(root))])
    assert found is not None
    assert (found.place, found.info.step, found.lost_steps) == ("memory", 2, 1)
    place.release()
    assert gone(log["writer"])
    assert steps(root) == [1, 2]
    assert Repository(LocalStorage(root)).read(snapshot) == manifest


def test_a_kill_during_a_persist_finishes_it_and_skips_what_is_older_than_the_newest(tmp_path: Path) -> None:
    """The snapshot at hand and the newest one become durable; meanwhile the newest is served at once."""
    root, gate = tmp_path / "run", tmp_path / "gate"
    log = run_trainer(root, "die-in-persist", str(gate))
    place = attached(root)
    assert step_in_memory(place) == 3
    assert steps(root) == []
    gate.touch()
    place.release()
    assert gone(log["writer"])
    assert steps(root) == [1, 3]


def test_what_is_held_survives_that_all_it_refers_to_is_forgotten(tmp_path: Path) -> None:
    """The writer keeps slot, layout and skeletons of what it holds."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-after-forget")
    place = attached(root)
    assert step_in_memory(place) == 1
    place.release()
    assert gone(log["writer"])
    assert steps(root) == [1]


def test_closing_makes_durable_what_was_only_held(tmp_path: Path) -> None:
    """Nothing is lost by closing, and nothing lingers."""
    root = tmp_path / "run"
    log = run_trainer(root, "close", status=0)
    assert gone(log["writer"])
    assert steps(root) == [1]
    assert attach(str(root), 5.0) is None
