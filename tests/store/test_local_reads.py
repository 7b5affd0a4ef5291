"""Reads go around the page cache where the data is cold and to it where it is warm."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from ckpt_engine.store.storage import disk
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.testing import aligned
from tests.store.samples import opened_below

BIG = aligned(bytes(range(256)) * (3 << 12) + b"tail")


class _ReadLog:
    """Notes every read and how it was made: of the page cache only, around it, or through it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        self.asked = 0
        self._real = os.preadv
        monkeypatch.setattr(disk.os, "preadv", self._preadv)

    def _preadv(self, fd: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        self.asked += bool(flags)
        got = self._real(fd, buffers, at, flags)
        self.calls.append(("cached" if flags else "direct" if direct else "buffered", got))
        return got


def _evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@pytest.fixture
def evictable(tmp_path: Path) -> None:
    """Skips where the page cache cannot be emptied or asked, as in memory file systems."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(4096))
    _evict(probe)
    fd = os.open(probe, os.O_RDONLY)
    try:
        if disk.is_resident(fd, 0):
            pytest.skip("this file system keeps everything in memory")
    finally:
        os.close(fd)
        probe.unlink()


@pytest.mark.usefixtures("evictable")
def test_cold_data_is_read_around_the_page_cache_in_large_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole pages in large slices, then the tail; and no descriptor is left open."""
    monkeypatch.setattr(disk, "SLICE_BYTES", 1 << 20)
    storage = LocalStorage(tmp_path)
    storage.put("data/x", [BIG])
    _evict(tmp_path / "data" / "x")
    out = aligned(bytes(BIG.nbytes))
    log = _ReadLog(monkeypatch)
    storage.get_into("data/x", 0, out)
    assert opened_below(tmp_path) == []
    assert bytes(out) == BIG
    assert log.calls == [("direct", 1 << 20)] * 3 + [("direct", 4)]


@pytest.mark.usefixtures("evictable")
def test_warm_data_is_copied_from_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory has is not read from the disk again."""
    storage = LocalStorage(tmp_path)
    storage.put("data/x", [BIG])
    _evict(tmp_path / "data" / "x")
    storage.get("data/x")
    log = _ReadLog(monkeypatch)
    out = aligned(bytes(BIG.nbytes))
    storage.get_into("data/x", 0, out)
    assert bytes(out) == BIG
    assert "direct" not in {kind for kind, _ in log.calls}


@pytest.mark.usefixtures("evictable")
@pytest.mark.parametrize(("start", "skew"), [(0, 64), (4096, 64), (5000, 5000 % 4096), (5000, 64), (1, 0)])
def test_cold_data_goes_around_the_page_cache_wherever_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, skew: int
) -> None:
    """Live tensors begin anywhere: the cache is left as it is, and at each end a page at most is read besides, with the
    rest where that can be read to its place.
    """
    monkeypatch.setattr(disk, "BOUNCE_BYTES", 1 << 20)
    monkeypatch.setattr(disk, "_rooms", threading.local())
    storage = LocalStorage(tmp_path)
    storage.put("data/x", [BIG])
    _evict(tmp_path / "data" / "x")
    out = aligned(bytes(BIG.nbytes + 4096))[skew:][: BIG.nbytes - start - 100]
    log = _ReadLog(monkeypatch)
    storage.get_into("data/x", start, out)
    assert bytes(out) == BIG[start:][: out.nbytes]
    assert {kind for kind, _ in log.calls} == {"direct"}
    assert out.nbytes <= sum(got for _, got in log.calls) <= out.nbytes + 2 * 4096
    assert log.asked == 0
    assert len(log.calls) == (1 if (start - skew) % 4096 == 0 else 3)
