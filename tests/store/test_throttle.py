"""The bandwidth limit: what passes in any stretch of time, counted in bytes on a clock of its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.store.storage.base import BURST_SECONDS, SLICE_BYTES, Capabilities, Throttle, WrapperStorage, metered
from ckpt_engine.store.storage.disk import Meter
from ckpt_engine.store.storage.local import LocalStorage

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
    """Threads that send at once get waits that follow each other."""
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


class Counting(Meter):
    """Writes down what it is asked and how long it waits."""

    slice_bytes = SLICE_BYTES

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.waited: list[float] = []

    def wait(self, nbytes: int) -> float:
        self.asked.append(nbytes)
        return nbytes / 1e6

    def pause(self, seconds: float) -> None:
        self.waited.append(seconds)


def test_a_local_disk_is_written_in_slices(tmp_path: Path) -> None:
    """The meter is asked for every byte exactly once, in slices that keep a limit even, and the object is the same."""
    meter = Counting()
    storage = metered(LocalStorage(tmp_path), lambda _: meter)
    data = bytes(range(256)) * (9 << 12)
    storage.put("a/b", [memoryview(data[:5000]), memoryview(data[5000:])])
    assert LocalStorage(tmp_path).get("a/b") == data
    assert sum(meter.asked) == len(data)
    assert max(meter.asked) <= SLICE_BYTES
    assert meter.waited == [nbytes / 1e6 for nbytes in meter.asked]


def test_a_meter_that_raises_leaves_nothing(tmp_path: Path) -> None:
    """Stopping in the middle of an object is an error like any other: nothing is visible, nothing is left."""

    class Stopping(Counting):
        def wait(self, nbytes: int) -> float:
            if nbytes < SLICE_BYTES:
                raise KeyboardInterrupt
            return 0.0

    with pytest.raises(KeyboardInterrupt):
        metered(LocalStorage(tmp_path), lambda _: Stopping()).put("a/b", [memoryview(bytes(9 << 20))])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class Plain(WrapperStorage):
    """A storage of which nothing is known."""

    capabilities = Capabilities()  # type: ignore[assignment]


def test_a_storage_that_has_no_slices_is_metered_object_by_object(tmp_path: Path) -> None:
    """All that is sent is asked for, before the object."""
    meter = Counting()
    storage = metered(Plain(LocalStorage(tmp_path)), lambda _: meter)
    storage.put("x", [memoryview(b"12345"), memoryview(b"678")])
    assert meter.asked == [8]
    assert storage.get("x") == b"12345678"
    assert [item.name for item in storage.list("")] == ["x"]
