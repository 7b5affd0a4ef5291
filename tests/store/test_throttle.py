"""The bandwidth limit: what passes in any stretch of time, counted in bytes on a clock of its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.throttle import BURST_SECONDS, Throttle, paced

RATE = 1000.0


class Time:
    """A clock that only moves when somebody waits on it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 5)), min_size=1, max_size=60))
def test_no_stretch_of_time_takes_more_than_the_rate(sends: list[tuple[int, float]]) -> None:
    """Whatever is sent, in whatever bursts: at most `rate * (t + burst)` bytes and a slice start in `t` seconds."""
    time = Time()
    throttle = Throttle(RATE, time)
    sent: list[tuple[float, int]] = []
    for nbytes, idle in sends:
        time.now += idle
        time.pause(throttle(nbytes))
        sent.append((time.now, nbytes))
    for i, (began, _) in enumerate(sent):
        total = 0
        for at, nbytes in sent[i:]:
            assert total <= RATE * (at - began + BURST_SECONDS) + sent[i][1] + 1e-6
            total += nbytes


def test_the_rate_is_used_fully() -> None:
    """A limit is no brake beyond itself: one sender that never idles sends at the rate."""
    time = Time()
    throttle = Throttle(RATE, time)
    for _ in range(1000):
        time.pause(throttle(100))
    assert 1000 * 100 / RATE - 1 <= time.now - 100.0 <= 1000 * 100 / RATE


def test_parallel_senders_share_the_rate() -> None:
    """Threads that send at once are told to wait for each other."""
    time = Time()
    throttle = Throttle(RATE, time)
    waits: list[float] = []
    threads = [threading.Thread(target=lambda: waits.append(throttle(1000))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(waits) == pytest.approx([float(i) for i in range(8)])


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_no_rate_is_refused(rate: float) -> None:
    """Nothing would ever be sent."""
    with pytest.raises(ValueError, match="above 0"):
        Throttle(rate)


def test_a_local_disk_is_written_in_slices_at_the_pace(tmp_path: Path) -> None:
    """The pace is asked for every byte exactly once, in slices that keep the limit even, and the object is the same."""
    asked: list[int] = []

    def pace(nbytes: int) -> float:
        asked.append(nbytes)
        return nbytes / 1e6

    waited: list[float] = []
    storage = paced(LocalStorage(tmp_path), pace, waited.append)
    data = bytes(range(256)) * (9 << 12)
    storage.put("a/b", [memoryview(data[:5000]), memoryview(data[5000:])])
    assert LocalStorage(tmp_path).get("a/b") == data
    assert sum(asked) == len(data)
    assert max(asked) <= 4 << 20
    assert waited == [nbytes / 1e6 for nbytes in asked]


def test_a_pace_that_raises_leaves_nothing(tmp_path: Path) -> None:
    """Stopping in the middle of an object is an error like any other: nothing is visible, nothing is left."""

    def pace(nbytes: int) -> float:
        if nbytes < 4 << 20:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        paced(LocalStorage(tmp_path), pace).put("a/b", [memoryview(bytes(9 << 20))])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class Remote:
    """A storage that has no pace of its own, and one that has."""

    def __init__(self, inner: LocalStorage) -> None:
        self.url = "remote://x"
        self.put, self.get, self.get_into = inner.put, inner.get, inner.get_into
        self.list, self.delete, self.sweep, self.free_bytes = inner.list, inner.delete, inner.sweep, inner.free_bytes


class PacedRemote(Remote):
    pace = None


def test_other_storages_are_asked_or_told(tmp_path: Path) -> None:
    """A storage with a pace of its own is given it; any other is paced object by object."""
    asked: list[int] = []

    def pace(nbytes: int) -> float:
        asked.append(nbytes)
        return 0.0

    own = PacedRemote(LocalStorage(tmp_path))
    assert paced(own, pace) is own
    assert own.pace is pace
    other = paced(Remote(LocalStorage(tmp_path)), pace)
    other.put("x", [memoryview(b"12345"), memoryview(b"678")])
    assert asked == [8]
    assert other.get("x") == b"12345678"
    assert [item.name for item in other.list("")] == ["x"]
