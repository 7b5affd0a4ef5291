"""Huge pages are asked for only where they are free."""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
from pathlib import Path

import pytest

from ckpt_engine.copy import fresh_pages, host_memory
from ckpt_engine.copy.fresh_pages import DEAR_SECONDS, STEP_BYTES, FreshPages, advise, free_huge_bytes, populate
from ckpt_engine.copy.host_memory import HUGE_BYTES
from ckpt_engine.snapshot import arena
from tests.support import interpreters

SAMPLE = """Node 0, zone      DMA      1      1      1      1      1      1      1      0      1      1      3
Node 0, zone   Normal   1816    951    500    301    179    102     60     31     16      7      2
"""


def test_only_blocks_of_a_huge_page_or_more_count(tmp_path: Path) -> None:
    """Orders 9 and 10 of all zones are added up, in bytes."""
    path = tmp_path / "buddyinfo"
    path.write_text(SAMPLE)
    assert free_huge_bytes(path) == ((1 + 7) * 512 + (3 + 2) * 1024) * mmap.PAGESIZE


def test_an_unreadable_file_means_none(tmp_path: Path) -> None:
    """Where the kernel does not tell, small pages are used."""
    assert free_huge_bytes(tmp_path / "missing") == 0


def test_populating_keeps_what_was_there(tmp_path: Path) -> None:
    """Memory that was touched before keeps its content; ranges need not be aligned."""
    memory = mmap.mmap(-1, 1 << 20)
    memory[5000] = 7
    populate(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 4500, 100_000)
    assert memory[5000] == 7 and memory[4500] == 0


@pytest.mark.parametrize(("free", "asked"), [(64, 8), (8, 4), (1, 0)])
def test_as_much_is_asked_for_as_half_of_the_free_ones(free: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state for which there are not enough has huge pages in its first part: reads into them are twice as fast."""

    class Memory(mmap.mmap):
        asked = 0

        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            assert (option, start) == (mmap.MADV_HUGEPAGE, 0)
            self.asked = length

    memory = Memory(-1, 8 * HUGE_BYTES)
    monkeypatch.setattr(fresh_pages, "free_huge_bytes", lambda: free * HUGE_BYTES)
    advise(memory)
    assert memory.asked == asked * HUGE_BYTES


@pytest.mark.parametrize(("code", "asked"), [(errno.EAGAIN, 3), (errno.EINVAL, 1)])
def test_a_slot_goes_on_to_ask_for_huge_pages_after_a_part_has_none_for_now(
    code: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a slot has huge pages is no matter of luck; a kernel that knows of none is asked once."""
    real, collapsed = host_memory.LIBC, []

    class Libc:
        mmap, munmap = real.mmap, real.munmap

        def madvise(self, address: int, nbytes: int, advice: int) -> int:
            if advice != host_memory._COLLAPSE:
                return real.madvise(address, nbytes, advice)
            collapsed.append(address)
            ctypes.set_errno(code)
            return -1 if len(collapsed) == 1 else 0

    monkeypatch.setattr(host_memory, "LIBC", Libc())
    monkeypatch.setattr(arena, "_HUGE_FROM_BYTES", 1)
    slot = arena.SharedSlot(0, 3 * arena._PREFAULT_BYTES)
    assert slot.prefault() and not slot.is_cold
    slot.close()
    assert len(collapsed) == asked


@pytest.mark.parametrize(("factor", "unasked"), [(0.5, []), (2.0, [1, 2])])
def test_dear_huge_pages_are_asked_for_once(factor: float, unasked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a hypervisor gives memory back slowly, what follows the first step has small pages; all is present."""
    real, clock, refused = fresh_pages.LIBC, 0.0, []
    memory = mmap.mmap(-1, 3 * STEP_BYTES + HUGE_BYTES)
    base = -(-ctypes.addressof(ctypes.c_char.from_buffer(memory)) // HUGE_BYTES) * HUGE_BYTES

    class Libc:
        def madvise(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t, advice: int) -> int:
            nonlocal clock
            clock += factor * DEAR_SECONDS
            if advice == mmap.MADV_NOHUGEPAGE:
                refused.append(((address.value or 0) - base, nbytes.value))
            return int(real.madvise(address, nbytes, advice))

    monkeypatch.setattr(fresh_pages, "LIBC", Libc())
    monkeypatch.setattr(fresh_pages.time, "thread_time", lambda: clock)
    FreshPages().populate(base, 3 * STEP_BYTES)
    assert refused == [(step * STEP_BYTES, STEP_BYTES) for step in unasked]
    assert present(base, 3 * STEP_BYTES)


def present(start: int, nbytes: int) -> bool:
    """Whether no page of it is missing."""
    found = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), found) == 0
    return all(one & 1 for one in found)


def test_a_small_part_of_memory_stays_as_its_neighbours_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else many small tensors would be as many mappings, of which a process may have 65,530."""
    asked: list[int] = []

    class Libc:
        def madvise(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t, advice: int) -> int:
            asked.append(advice)
            return 0

    monkeypatch.setattr(fresh_pages, "LIBC", Libc())
    monkeypatch.setattr(fresh_pages, "DEAR_SECONDS", -1.0)
    pages = FreshPages()
    pages.populate(0, HUGE_BYTES)  # too short to say what memory costs
    pages.populate(STEP_BYTES, STEP_BYTES)
    pages.populate(2 * STEP_BYTES, HUGE_BYTES - 1)
    assert asked == 3 * [host_memory.POPULATE_WRITE]


WITHOUT_HUGE_PAGES = """
import ctypes, platform, struct, subprocess, sys, torch
from ckpt_engine import Checkpointer
from ckpt_engine.writer import launch

launch.subprocess = subprocess  # a real writer: a fork of a server of interpreters would have huge pages

call, machine = {"x86_64": (28, 0xC000003E), "aarch64": (233, 0xC00000B7)}[platform.machine()]
rules = [  # architecture, call and advice; only all three are refused, with EINVAL
    (0x20, 0, 0, 4), (0x15, 0, 5, machine), (0x20, 0, 0, 0), (0x15, 0, 3, call), (0x20, 0, 0, 32), (0x15, 0, 1, 14),
    (0x06, 0, 0, 0x50016), (0x06, 0, 0, 0x7FFF0000),
]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(program)))
assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert ctypes.CDLL(None).prctl(22, 2, filters, 0, 0) == 0  # filter system calls
import mmap
try:
    mmap.mmap(-1, 1 << 22).madvise(mmap.MADV_HUGEPAGE)
    sys.exit("this process has huge pages")
except OSError:
    pass
state = {"skewed": torch.arange(5, dtype=torch.uint8), "large": torch.arange(3 << 20)}
with Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save(state, step=1).wait()
with Checkpointer(sys.argv[1]) as ckpt:
    assert torch.equal(ckpt.load()["large"], state["large"])
with open(sys.argv[2], "wb") as file:
    file.write(bytes(3 << 20))
from ckpt_engine.store.storage.disk import read_into
assert read_into(sys.argv[2], 100, memoryview(bytearray(2 << 20))) == 2 << 20
"""


def test_a_kernel_without_huge_pages_saves_and_loads(tmp_path: Path) -> None:
    """Where the kernel is built without transparent huge pages it refuses the advice, and small ones do."""
    command = [sys.executable, "-c", WITHOUT_HUGE_PAGES, str(tmp_path / "run"), str(tmp_path / "file")]
    ended = interpreters.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
