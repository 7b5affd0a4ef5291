"""The writer keeps the rows of its trainer at any place: whole, in order, bounded, and none of them twice."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_engine.copy.host_memory import shared_memory
from ckpt_engine.observe.events import Event
from ckpt_engine.store import names, rows
from ckpt_engine.store.rows import PUT_ROWS, ROW_BYTES, ROWS, Ring, Row
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.writer import row_file
from ckpt_engine.writer.row_file import RowFile

NAME = names.rows_name(1_700_000_000_000, "0" * 8, 0)
PATIENCE_SECONDS = 20.0


class Trainer:
    """Records rows that a writer keeps."""

    def __init__(self) -> None:
        self.fd, memory = shared_memory("rows", ROWS * ROW_BYTES)
        self.ring, self.count = Ring(memory), 0

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.count += 1
            self.ring.put(Row(self.count, self.count, self.count, 0, 0, 0, 0, 0, 0, 0.0, bytes(32)))

    def kept_at(self, storage: Storage, said: list[Event] | None = None) -> RowFile:
        kept = RowFile(storage, (said if said is not None else list[Event]()).append)
        kept.attach({"name": NAME, "about": {"version": 1}}, os.dup(self.fd))
        return kept


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    one = Trainer()
    yield one
    os.close(one.fd)


def numbers(storage: Storage) -> list[int]:
    life = rows.read_life(storage, NAME)
    return [] if life is None else [row.number for row in life.rows]


def wait_until(holds: Callable[[], bool]) -> None:
    pause, looks = threading.Event(), int(PATIENCE_SECONDS / 0.01)
    assert any(holds() or pause.wait(0.01) for _ in range(looks))


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_file, "APPEND_SECONDS", 0.01)


@pytest.mark.parametrize("url", ["{}", "memory://rows{}"])
def test_what_was_recorded_is_there_when_the_trainer_is_gone(url: str, tmp_path: Path, trainer: Trainer) -> None:
    """In a folder soon, at other places with a commit; the rest at the end."""
    storage = open_storage(url.format(tmp_path))
    kept = trainer.kept_at(storage)
    trainer.steps(3)
    kept.committed.set()
    wait_until(lambda: numbers(storage) == [1, 2, 3])
    trainer.steps(2)
    kept.end()
    assert numbers(storage) == [1, 2, 3, 4, 5]


def test_an_object_has_the_newest_rows_only(tmp_path: Path, trainer: Trainer) -> None:
    """It is put as a whole each time."""
    storage = open_storage(f"memory://most{tmp_path}")
    trainer.steps(PUT_ROWS + 100)
    trainer.kept_at(storage).end()
    assert numbers(storage) == list(range(101, PUT_ROWS + 101))


def test_a_file_is_bounded(tmp_path: Path, trainer: Trainer) -> None:
    """Once it has twice as many rows as are in memory, the older half goes."""
    storage = open_storage(str(tmp_path))
    kept = trainer.kept_at(storage)
    for _ in range(3):
        trainer.steps(ROWS - 1)
        wait_until(lambda: numbers(storage)[-1:] == [trainer.count])
    kept.end()
    found = numbers(storage)
    assert found == list(range(trainer.count - len(found) + 1, trainer.count + 1))
    assert ROWS <= len(found) <= 2 * ROWS
    assert (tmp_path / NAME).stat().st_size <= names.ROWS_BYTES


def test_the_next_writer_repeats_no_row_and_mends_a_torn_one(tmp_path: Path, trainer: Trainer) -> None:
    """The first one was lost in the middle of a row."""
    storage = open_storage(str(tmp_path))
    trainer.steps(4)
    trainer.kept_at(storage).end()
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"half a row")
    trainer.steps(2)
    trainer.kept_at(storage).end()
    assert numbers(storage) == [1, 2, 3, 4, 5, 6]


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path: Path, trainer: Trainer) -> None:
    """The commit reports it; the rows are written once the folder exists again."""
    said: list[Event] = []
    root = tmp_path / "run"
    root.mkdir()
    storage = open_storage(str(root))
    kept = trainer.kept_at(storage, said)
    trainer.steps(1)
    wait_until(lambda: numbers(storage) == [1])
    shutil.rmtree(root)
    trainer.steps(1)
    kept.end()
    assert not root.exists()
    root.mkdir()
    trainer.kept_at(storage, said).end()
    assert numbers(storage) == [1, 2]
    assert said == []


def test_the_files_of_the_newest_processes_stay(tmp_path: Path, trainer: Trainer) -> None:
    """Of this rank; those of other ranks are theirs."""
    storage = open_storage(str(tmp_path))
    (tmp_path / names.ROWS).mkdir()
    older = [names.rows_name(1_600_000_000_000 + n, "1" * 8, rank) for n in range(6) for rank in (0, 1)]
    for name in older:
        (tmp_path / name).write_bytes(rows.header({"version": 1}))
    trainer.steps(1)
    trainer.kept_at(storage).end()
    assert rows.files_of(storage, 0) == [*older[::2][-rows.KEPT_FILES :], NAME]
    assert rows.files_of(storage, 1) == older[1::2]
