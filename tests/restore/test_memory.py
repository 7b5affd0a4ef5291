"""Restoring from the memory of another process: a place like any other, only nearer."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import commands
from ckpt_engine.errors import CorruptError, StorageError, StorageMissingError
from ckpt_engine.restore import load as restore
from ckpt_engine.restore import memory as memory_module
from ckpt_engine.restore.memory import MemoryStorage
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.tools import live_run
from ckpt_engine.writer import control, unix_sockets
from ckpt_engine.writer.pulse import Heartbeat
from tests.snapshot.passage import same

N = 3_000_000


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"model": {"big": torch.randn(N, generator=generator), "small": torch.randn(7, generator=generator)}}


def write(root: Path, *steps: int) -> Repository:
    with Checkpointer(str(root), keep={"last": 9}) as ckpt:
        for step in steps:
            ckpt.save(state(step), step=step).wait(60)
    return Repository(LocalStorage(root))


class Memory:
    """The newest snapshot of a folder, as a dead trainer's writer would offer it."""

    def __init__(self, disk: Repository, beat: Heartbeat | None = None) -> None:
        newest = disk.list()[-1].id
        (file,) = disk.read(newest).files
        self.file, self.nbytes = file.name, file.nbytes
        self.fd = os.memfd_create("memory")
        os.ftruncate(self.fd, -(-file.nbytes // 4096) * 4096)
        os.pwrite(self.fd, disk.storage.get(file.name), 0)
        self.texts = {name: disk.storage.get(name) for name in (names.RECORD, names.manifest_name(newest))}
        self.storage = MemoryStorage(self.texts, {file.name: (self.fd, file.nbytes)}, beat)
        self.place = Repository(self.storage)
        self.pieces = disk.read(newest).entries["model/big"].pieces

    def flip(self) -> None:
        """Change a bit of the big tensor."""
        where = self.pieces[0].offset + 5000
        os.pwrite(self.fd, bytes([os.pread(self.fd, 1, where)[0] ^ 4]), where)

    def close(self) -> None:
        self.storage.close()
        os.close(self.fd)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Two snapshots."""
    return write(tmp_path_factory.mktemp("memory") / "run", 1, 2)


@pytest.fixture
def memory(disk: Repository) -> Iterator[Memory]:
    made = Memory(disk, Heartbeat(4, 0.0))
    yield made
    made.close()


def load(*places: Repository, **options: Any) -> restore.Loaded:
    found = restore.load(places, **options)
    assert found is not None
    assert same(found.state, state(found.info.step))
    return found


def zeros() -> dict[str, Any]:
    return {"model": {"big": torch.zeros(N), "small": torch.zeros(7)}}


def test_memory_is_the_nearest_place(disk: Repository, memory: Memory) -> None:
    """It serves, nothing has to be said about it, and what was lost is known."""
    found = load(memory.place, disk)
    assert (found.info.step, found.place, found.from_memory, found.lost_steps) == (2, "memory", True, 2)
    assert (found.notes, found.repairs, found.rejected, found.away) == ((), (), (), ())
    assert load(disk).lost_steps is None


def test_live_tensors_are_filled_straight_from_it(disk: Repository, memory: Memory) -> None:
    """Loading fills the live tensors in place."""
    live = zeros()
    into = load(memory.place, disk, into=live)
    assert into.state["model"]["big"] is live["model"]["big"]
    assert same(live, state(2))


@pytest.mark.parametrize("into", [False, True])
def test_damage_is_mended_from_the_disk(disk: Repository, memory: Memory, into: bool) -> None:
    """Without touching what is in memory, of which others may have the same view."""
    memory.flip()
    before = os.pread(memory.fd, memory.nbytes, 0)
    found = load(memory.place, disk, into=zeros() if into else None)
    assert [(r.entry, r.bad, r.good) for r in found.repairs] == [("model/big", "memory", disk.storage.url)]
    assert os.pread(memory.fd, memory.nbytes, 0) == before


@pytest.mark.parametrize("into", [False, True])
def test_damage_that_no_tier_can_mend_costs_the_snapshot(tmp_path: Path, memory: Memory, into: bool) -> None:
    """The next older one is taken; the disk knows the run, and has only that."""
    disk = write(tmp_path / "run", 1)
    record = memory.texts[names.RECORD]
    (tmp_path / "run" / names.RECORD).write_bytes(record)
    memory.flip()
    found = load(memory.place, Repository(disk.storage), into=zeros() if into else None)
    assert found.info.step == 1
    assert [r.code for r in found.rejected] == ["CKPT401"]


def test_a_run_that_the_tiers_do_not_know_is_left_out(tmp_path: Path, memory: Memory) -> None:
    """The folder was made again: it counts, and the memory of the old run does not."""
    other = write(tmp_path / "other", 1)
    found = load(memory.place, other)
    assert (found.info.step, found.place, found.from_memory) == (1, other.storage.url, False)


def test_a_tier_that_does_not_answer_does_not_cost_the_memory(memory: Memory, tmp_path: Path) -> None:
    """Neither a tier that is down nor an empty further one proves that the run is unknown: the memory serves."""

    class Down(LocalStorage):
        def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
            raise StorageError("down")

        def list(self, prefix: str) -> Any:
            raise StorageError("down")

    down = Repository(Down(tmp_path / "down"))
    assert load(memory.place, down).from_memory
    assert load(memory.place, down, Repository(LocalStorage(tmp_path / "empty"))).from_memory


def test_a_new_further_tier_does_not_cost_the_memory(disk: Repository, memory: Memory, tmp_path: Path) -> None:
    """One that knows the run is enough."""
    assert load(memory.place, Repository(LocalStorage(tmp_path / "empty")), disk).from_memory


def test_a_folder_that_was_removed_starts_again(tmp_path: Path, memory: Memory) -> None:
    """The memory of the run that was in it does not count, and is no place that fails to answer either."""
    assert restore.load([memory.place, Repository(LocalStorage(tmp_path / "gone"))]) is None


def test_ranges_are_those_of_the_file(memory: Memory) -> None:
    """As any storage has it: short at the end where that is allowed, and nothing beyond."""
    storage: Storage = memory.storage
    data = os.pread(memory.fd, memory.nbytes, 0)
    assert storage.get(memory.file) == data
    assert storage.get(memory.file, 10, 20) == data[10:30]
    assert storage.get(memory.file, memory.nbytes - 5, 20) == data[-5:]
    assert storage.get(memory.file, memory.nbytes + 5, 20) == b""
    record = memory.texts[names.RECORD]
    assert storage.get(names.RECORD, 2, 3) == record[2:5]
    out = memoryview(bytearray(9))
    storage.get_into(memory.file, 4096, out)
    assert bytes(out) == data[4096:4105]
    storage.get_into(names.RECORD, 1, out)
    assert bytes(out) == record[1:10]
    storage.get_into(memory.file, 3, memoryview(bytearray()))
    for name, start in ((memory.file, memory.nbytes - 8), (names.RECORD, len(record) - 8)):
        with pytest.raises(CorruptError, match="ends before"):
            storage.get_into(name, start, out)
    with pytest.raises(StorageMissingError):
        storage.get("data/other")
    assert {item.name: item.nbytes for item in storage.list("")} == {
        **{name: len(text) for name, text in memory.texts.items()},
        memory.file: memory.nbytes,
    }
    assert [item.name for item in storage.list(names.DATA)] == [memory.file]


def test_the_memory_cannot_be_written(memory: Memory) -> None:
    """No write, removal or sweep of the memory of another process changes anything."""
    for change in (lambda: memory.storage.put("x", []), lambda: memory.storage.delete("x")):
        with pytest.raises(StorageError, match="not written by this process"):
            change()
    assert memory.storage.sweep() == 0
    assert memory.storage.capabilities.free_bytes() is None


def test_what_was_released_is_an_error_and_no_crash(disk: Repository, memory: Memory) -> None:
    """Views that somebody still has stay readable."""
    view = memory.storage.view(memory.file, 0, 4096)
    expected = bytes(view)
    memory.storage.close()
    memory.storage.close()
    assert bytes(view) == expected
    with pytest.raises(StorageError, match="does not have"):
        memory.storage.get(memory.file)
    open_files = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert [str(one).startswith("/memfd:memory") for one in open_files].count(True) == 1  # that of this test
    assert load(memory.place, disk).place == disk.storage.url


def test_memory_that_is_too_short_is_refused(memory: Memory) -> None:
    """Reading beyond its end would kill the process."""
    fd = os.memfd_create("short")
    os.ftruncate(fd, memory.nbytes - 1)
    with pytest.raises(CorruptError, match="bytes instead of"):
        MemoryStorage({}, {memory.file: (fd, memory.nbytes)})
    os.close(fd)


def test_a_load_maps_no_page_of_large_tensors(disk: Repository, memory: Memory) -> None:
    """They are read from the file: entering pages into the tables of a process, and taking them out, takes time."""
    load(memory.place, disk, into=zeros())
    maps = Path("/proc/self/smaps").read_text().split("memfd:memory")[1]
    resident = next(int(line.split()[1]) for line in maps.splitlines() if line.startswith("Rss:"))
    assert resident * 1024 < memory.nbytes // 2


@pytest.fixture(params=["mute", "full"])
def stuck(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose name somebody has who takes no requests, or not even connections."""
    monkeypatch.setattr(control, "CONNECT_SECONDS", 0.01)
    place = tempfile.mkdtemp(dir="/tmp")  # names of sockets are short
    monkeypatch.setattr(unix_sockets, "_PLACES", (place,))
    with Checkpointer(str(tmp_path / "run")) as ckpt:
        ckpt.save({"x": 1}, step=1).wait(60)
    monkeypatch.setattr(unix_sockets, "_BACKLOG", 0)
    name = unix_sockets.name_of(str(tmp_path / "run"))
    listener = unix_sockets.SocketListener(name, 60.0)
    clients = []
    while request.param == "full" and len(clients) < 2:
        clients.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        with contextlib.suppress(BlockingIOError):
            clients[-1].connect(f"{unix_sockets.folders()[0]}/{name}")
    yield tmp_path / "run"
    listener.close()
    for one in clients:
        one.close()
    shutil.rmtree(place)


def test_a_load_does_not_wait_for_a_writer_that_takes_no_requests(
    stuck: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked once, for as long as saying its name may take, and that it is left out is said once."""
    given: list[float] = []
    asks = control.ask

    def ask(url: str, wanted: Any, timeout: float, rank: int = 0) -> Any:
        given.append(timeout)
        return asks(url, wanted, timeout, rank)

    assert memory_module.KNOCK_SECONDS <= 5.0
    monkeypatch.setattr(memory_module, "KNOCK_SECONDS", 0.05)
    monkeypatch.setattr(control, "ask", ask)
    ckpt = Checkpointer(tiers=["memory", str(stuck)])
    assert ckpt.load() == {"x": 1}
    assert ckpt.engine.choose() is not None
    assert given == [0.05]
    (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "is not waited for" in line
    ckpt.close()


def test_status_does_not_wait_for_a_writer_that_takes_no_requests(stuck: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on the disk is shown, and that the writer does not answer."""
    assert live_run.LIVE_SECONDS <= 5.0
    monkeypatch.setattr(live_run, "LIVE_SECONDS", 0.05)
    done = CliRunner().invoke(commands, ["status", str(stuck), "--json"])
    shown = json.loads(done.output)
    assert "did not answer" in shown["live"]["error"]
    assert shown["tiers"][0]["snapshots"] == 1
