"""Taking samples: interleaving, processor time, memory, cold files, skipped snapshots."""

from __future__ import annotations

import argparse
import mmap
import random
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.__main__ import _names
from benchmarks.bars.budget import interval
from benchmarks.disk import SharedBuffer, buffered_read, buffered_write, cached_share, warm
from benchmarks.engine import save_timed, wait_ready
from benchmarks.measure import CpuMeter, PeakMemory, interleave
from benchmarks.workloads import gpt2_state, many_tensors_state, state_bytes, tensors
from ckpt_engine import Checkpointer
from tests.support.writers import no_writing


def test_interleaving_rotates_the_order() -> None:
    """Every candidate takes part in every round, and none always follows the same one."""
    order: list[str] = []

    def candidate(name: str) -> float:
        order.append(name)
        return float(len(order))

    names = ("a", "b", "c")
    taken = interleave({n: lambda n=n: candidate(n) for n in names}, 3, at_most={"c": 1})
    assert order == ["a", "b", "c", "b", "a", "a", "b"]
    assert taken == {"a": [1.0, 5.0, 6.0], "b": [2.0, 4.0, 7.0], "c": [3.0]}


@pytest.mark.cells(1)
@pytest.mark.parametrize("overhead", [0.0, 0.01, 0.05])
def test_an_interval_has_the_overhead_in_it_as_often_as_it_says(overhead: float) -> None:
    """In drift and noise that both kinds of stretches share, 95 % of the intervals have the truth in them."""
    chance, inside = random.Random(1), 0
    for _ in range(60):
        drift = [1.0 + 0.3 * chance.random() for _ in range(100)]
        on, off = ([one * chance.gauss(1.0 + more, 0.02) for one in drift] for more in (overhead, 0.0))
        middle, low, high = interval(on, off)
        assert low < middle < high < low + 0.02
        inside += low <= overhead <= high
    assert 52 <= inside <= 60


def test_cpu_meter_counts_this_process_and_others() -> None:
    """Work shows in the meter; another process adds what it has used so far."""
    meter = CpuMeter()
    before = meter.read()
    while meter.read() - before < 0.02:
        sum(range(10_000))
    other = psutil.Process(1).cpu_times()
    assert CpuMeter([psutil.Process(1)]).read() >= meter.read() - 0.5 + other.user


def test_peak_memory_sees_what_was_freed_again() -> None:
    """Memory that is given back before the end still counts."""
    peak = PeakMemory()
    # Twice as much: what was free before, and is used for the bytes that are written, does not count.
    buffer = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.write(b"x" * (64 << 20))
    buffer.close()
    assert peak.extra_bytes() >= 32 << 20


def test_cached_share_tells_warm_files(tmp_path: Path) -> None:
    """A file that was just read is in the page cache, whole."""
    path = tmp_path / "file"
    shared = SharedBuffer(1 << 20)
    with memoryview(shared.memory) as data:
        buffered_write(path, data)
        warm(path)
        assert cached_share(path) == 1.0
        buffered_read(path, data)


def test_skipped_snapshot_is_no_fast_one(tmp_path: Path) -> None:
    """With all slots in use `save` returns at once; that must not pass for a measurement."""
    state = {"model": {"w": torch.zeros(1 << 20)}}
    with Checkpointer(tmp_path, slots=1) as checkpointer:
        with no_writing(checkpointer):
            save_timed(checkpointer, state, 1, lazy=lambda _: True)
            with pytest.raises(RuntimeError, match="was skipped"):
                save_timed(checkpointer, state, 2, lazy=lambda _: True)
        wait_ready(checkpointer, lambda: None)


def test_workloads_have_the_stated_sizes() -> None:
    """GPT-2 with Adam has 592 tensors; the many-tensors state has exactly as many as asked for."""
    assert len(list(tensors(gpt2_state(4_000_000)))) == 592
    state = many_tensors_state(400, 400_000)
    assert len(list(tensors(state))) == 400
    assert state_bytes(state) == pytest.approx(400_000, rel=0.02)


def test_unknown_bar_names_the_known_ones() -> None:
    """A misspelt bar is refused before anything is measured."""
    assert _names("stall, persist") == ["stall", "persist"]
    with pytest.raises(argparse.ArgumentTypeError, match="many-tensors"):
        _names("stal")
