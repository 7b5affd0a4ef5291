"""Reads go around the page cache where the data is cold and to it where it is warm."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from pathlib import Path

import pytest

from ckpt_engine.store.storage import disk, page_cache
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


def _memory(advice: int) -> memoryview:
    """Room for two huge pages and more, from a boundary of one on, and touched."""
    room = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(advice)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % (2 << 20)
    found = memoryview(room)[start:][: 6 << 20]
    found[::4096] = bytes(len(found) // 4096)
    return found


@pytest.fixture
def huge() -> memoryview:
    """Memory in huge pages; skips where there are none, or the kernel cannot tell."""
    found = _memory(mmap.MADV_HUGEPAGE)
    small = _memory(mmap.MADV_NOHUGEPAGE)
    if page_cache.is_in_huge_page(_address(small)) or not all(
        page_cache.is_in_huge_page(_address(found[at:])) for at in (0, 4 << 20)
    ):
        pytest.skip("no huge pages, or a kernel before 6.7")
    return found


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.fixture
def evictable(tmp_path: Path) -> None:
    """Skips where the page cache cannot be emptied or asked, as in memory file systems."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(4096))
    _evict(probe)
    fd = os.open(probe, os.O_RDONLY)
    try:
        if page_cache.is_resident(fd, 0):
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
@pytest.mark.parametrize("start", [0, 5000])
def test_memory_in_small_pages_is_filled_by_way_of_a_huge_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, huge: memoryview, start: int
) -> None:
    """A disk fills huge pages twice as fast, so memory that has them is read to at once."""
    storage = LocalStorage(tmp_path)
    storage.put("data/x", [BIG])
    calls = {}
    for name, memory in (("huge", huge), ("small", _memory(mmap.MADV_NOHUGEPAGE))):
        _evict(tmp_path / "data" / "x")
        out = memory[start % 4096 :][: BIG.nbytes - start]
        with monkeypatch.context() as patch:
            log = _ReadLog(patch)
            storage.get_into("data/x", start, out)
        assert bytes(out) == BIG[start:]
        calls[name] = log.calls
    assert {kind for kind, _ in (*calls["huge"], *calls["small"])} == {"direct"}
    assert (len(calls["huge"]), len(calls["small"])) == (1, 2)


@pytest.mark.usefixtures("evictable")
def test_where_the_kernel_does_not_tell_pages_memory_is_read_to_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a kernel before 6.7, or in a container without /proc."""
    monkeypatch.setattr(page_cache, "_PAGEMAP", tmp_path / "none")
    storage = LocalStorage(tmp_path)
    storage.put("data/x", [BIG])
    _evict(tmp_path / "data" / "x")
    log = _ReadLog(monkeypatch)
    storage.get_into("data/x", 0, out := _memory(mmap.MADV_NOHUGEPAGE)[: BIG.nbytes])
    assert bytes(out) == BIG
    assert [kind for kind, _ in log.calls] == ["direct"]


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
    monkeypatch.setattr(disk, "is_in_huge_page", lambda _: True)
    out = aligned(bytes(BIG.nbytes + 4096))[skew:][: BIG.nbytes - start - 100]
    log = _ReadLog(monkeypatch)
    storage.get_into("data/x", start, out)
    assert bytes(out) == BIG[start:][: out.nbytes]
    assert {kind for kind, _ in log.calls} == {"direct"}
    assert out.nbytes <= sum(got for _, got in log.calls) <= out.nbytes + 2 * 4096
    assert log.asked == 0
    assert len(log.calls) == (1 if (start - skew) % 4096 == 0 else 3)
