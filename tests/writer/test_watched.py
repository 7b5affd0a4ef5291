"""Storages that say when they get on."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.store.storage.base import Capabilities, ObjectInfo, metered
from ckpt_engine.store.storage.disk import Disk, MeteredDisk
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.storage.watchdog import (
    SLOWEST_BYTES_PER_SECOND,
    AbandonedError,
    CallProgress,
    WatchedSource,
    WatchedStorage,
)
from ckpt_engine.writer.replicate import CopyThrottle
from tests.writer.staged import WAIT_SECONDS


class Counting(CallProgress):
    """Counts signs of life."""

    def __init__(self) -> None:
        self.moves: list[float] = []
        super().__init__()

    def moved(self, rest_seconds: float = 0.0) -> None:
        self.moves.append(rest_seconds)
        super().moved(rest_seconds)

    def during(self, request: Callable[[], Any], rest_seconds: float = 0.0) -> Any:
        self.moves.append(rest_seconds)
        try:
            return super().during(request, rest_seconds)
        finally:
            self.moves.append(0.0)


class Opaque:
    """A storage that shows nothing of what it does."""

    url = "x://y"
    capabilities = Capabilities()

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        """Nothing."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield ObjectInfo("a", 1)


def test_every_change_of_a_disk_is_watched_and_reaches_it() -> None:
    """No system call is left out: one that hangs would not be noticed, one that is not passed on would be lost."""
    own = {name for name, _ in inspect.getmembers(Disk, inspect.isfunction) if not name.startswith("_")}
    assert own <= set(vars(MeteredDisk))


def test_big_writes_report_progress_slice_by_slice(tmp_path: Path) -> None:
    """A disk that takes a slice now and then is slow; it does not hang."""
    progress = Counting()
    storage = WatchedStorage(LocalStorage(tmp_path), progress)
    data = memoryview(os.urandom(40 << 20))
    storage.put("a", [data])
    assert len(progress.moves) > 2 * 3
    assert (tmp_path / "a").read_bytes() == data


def test_what_is_in_the_page_cache_is_synced_on_the_way(tmp_path: Path) -> None:
    """One sync of many gigabytes at the end would look like a hang."""
    synced = []

    class Cached(Disk):
        def bypass_cache(self, fd: int, *, on: bool) -> None:
            raise OSError(22, "cannot")

        def sync(self, fd: int) -> None:
            synced.append(os.fstat(fd).st_size)
            super().sync(fd)

    storage = WatchedStorage(LocalStorage(tmp_path, disk=Cached()), CallProgress())
    storage.put("a", [memoryview(bytes(150 << 20))])
    assert synced == [64 << 20, 128 << 20, 150 << 20]


def test_an_opaque_storage_has_time_for_what_it_is_given() -> None:
    """Its progress cannot be seen, so a put may take as long as on a slow network."""
    progress = Counting()
    storage = WatchedStorage(Opaque(), progress)  # type: ignore[arg-type]
    storage.put("a", [memoryview(bytes(3 * SLOWEST_BYTES_PER_SECOND))])
    assert max(progress.moves) == 3.0
    progress.moves.clear()
    assert [item.name for item in storage.list("")] == ["a"]
    assert progress.moves


def test_a_limited_opaque_storage_has_the_same_time_after_its_turn() -> None:
    """The wait for the bandwidth comes on top: a big object is sent long after it has passed the gate."""
    progress = Counting()
    storage = WatchedStorage(metered(Opaque(), lambda _: CopyThrottle(None)), progress)  # type: ignore[arg-type]
    storage.put("a", [memoryview(bytes(3 * SLOWEST_BYTES_PER_SECOND))])
    assert progress.moves[-2:] == [3.0, 0.0]  # its turn, and its end


def test_a_put_that_was_left_behind_reads_no_more_of_its_memory(tmp_path: Path) -> None:
    """Once its caller has given up, the next slice is not written, and the unfinished file is removed."""
    progress = CallProgress()

    class Leaving(Disk):
        writes = 0

        def write(self, fd: int, data: memoryview, offset: int) -> int:
            Leaving.writes += 1
            progress.abandoned = True
            return super().write(fd, data, offset)

    storage = WatchedStorage(LocalStorage(tmp_path, disk=Leaving()), progress)
    with pytest.raises(AbandonedError):
        storage.put("a", [memoryview(bytes(40 << 20))])
    assert Leaving.writes == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AbandonedError):
        storage.put("b", [memoryview(b"1")])


class Hanging(LocalStorage):
    """Reads hang until `end` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached, self.end = threading.Event(), threading.Event()

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        self.reached.set()
        assert self.end.wait(WAIT_SECONDS)
        return super().get(name, start, nbytes)


def test_who_hangs_in_a_source_is_left_there_and_does_not_go_on(tmp_path: Path) -> None:
    """The source is of no use until the read has ended, which ends its reader too; then it is one again."""
    (tmp_path / "a").write_bytes(b"1")
    storage = Hanging(tmp_path)
    source = WatchedSource(storage, CallProgress())
    assert not source.leave()
    ended: list[type[BaseException]] = []

    def read() -> None:
        try:
            source.storage.get("a")
        except BaseException as err:  # noqa: BLE001 - looked at by the test
            ended.append(type(err))

    thread = threading.Thread(target=read)
    thread.start()
    assert storage.reached.wait(WAIT_SECONDS)
    assert source.usable()
    assert source.leave()
    assert not source.usable()
    assert not source.leave()  # it hangs in what was left before, not here
    storage.end.set()
    thread.join(WAIT_SECONDS)
    assert ended == [AbandonedError]
    assert source.usable()
    assert source.storage.get("a") == b"1"
