"""Blocks that the ranks of a node share: one fetches, a dead or slow neighbour harms no other, damage is found."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt_engine.restore import node_storage, shared_blocks
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.node_storage import NodeStorage, blocks_of
from ckpt_engine.restore.read import read_entries
from ckpt_engine.restore.shared_blocks import BLOCK_BYTES, BlockClaim, SharedBlocks, open_shared, remove_shared
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.storage.local import LocalStorage
from tests.support import interpreters

Open = Callable[[], int]
NAME = "data/00000001-s0000000001-0123abcd-r00000.safetensors"
NBYTES = 3 * BLOCK_BYTES + 1000


@pytest.fixture
def shared() -> Iterator[Open]:
    """Opens one and the same shared file, as each rank does for itself."""
    name = f"ckpt-test-{uuid.uuid4().hex}"
    opened: list[int] = []

    def open_it() -> int:
        opened.append(open_shared(name)[0])
        return opened[-1]

    yield open_it
    remove_shared(name)
    for fd in opened:
        os.close(fd)


class Counting(LocalStorage):
    """A remote storage, as it were: it counts the bytes that are asked of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.asked: list[tuple[int, int]] = []

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        self.asked.append((start, len(out)))
        super().get_into(name, start, out)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Counting, Manifest, torch.Tensor]:
    """A storage with one data file, its manifest, and the array in it."""
    storage = Counting(tmp_path)
    whole = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8)
    storage.put(NAME, [whole.numpy().data])
    pieces = tuple(
        Piece(0, at, min(BLOCK_BYTES, NBYTES - at), digest(whole[at : at + BLOCK_BYTES].numpy().data), 0)
        for at in range(0, NBYTES, BLOCK_BYTES)
    )
    pieces = tuple(Piece(0, one.offset, one.nbytes, one.digest, one.nbytes) for one in pieces)
    info = SnapshotInfo("00000001-s0000000001-0123abcd", 1, 1, None, "manual", 0.0, NBYTES)
    files, entries = (DataFile(NAME, NBYTES),), {"a": Entry("uint8", (NBYTES,), pieces, "U8")}
    return storage, Manifest(info, "run", {"size": 2}, {}, files, entries, {}), whole


def read(storage: NodeStorage, manifest: Manifest) -> torch.Tensor:
    return read_entries(Sources([storage]), manifest)["a"]


def test_a_claimed_block_is_anothers_until_it_is_given_up_or_there(shared: Open) -> None:
    """Ranks exclude each other, threads of one rank too; what was put is read by all."""
    mine, others = SharedBlocks(shared(), "s"), SharedBlocks(shared(), "s")
    assert mine.claim(5) is BlockClaim.MINE
    assert (mine.claim(5), others.claim(5), others.claim(6)) == (BlockClaim.COMING, BlockClaim.TAKEN, BlockClaim.MINE)
    mine.give_up(5)
    assert others.claim(5) is BlockClaim.MINE
    others.put(5, memoryview(b"x" * 100))
    assert mine.claim(5) is BlockClaim.PRESENT
    out = bytearray(3)
    mine.read(5, 97, memoryview(out))
    assert out == b"xxx"
    assert SharedBlocks(shared(), "another snapshot").claim(5) is BlockClaim.MINE


def test_each_byte_is_asked_for_once_by_ranks_that_read_at_the_same_time(
    shared: Open, stored: tuple[Counting, Manifest, torch.Tensor]
) -> None:
    """Four ranks at once: all get everything, and the storage was asked for each block once."""
    inner, manifest, whole = stored
    found: list[torch.Tensor] = []

    def rank(index: int) -> None:
        storage = NodeStorage(inner, shared(), index, 4)
        storage.announce(manifest)
        found.append(read(storage, manifest))
        assert storage.stop()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert all(torch.equal(one, whole) for one in found)
    assert sorted(inner.asked) == [(at, min(BLOCK_BYTES, NBYTES - at)) for at in range(0, NBYTES, BLOCK_BYTES)]


def test_each_rank_begins_with_its_own_share(stored: tuple[Counting, Manifest, torch.Tensor], shared: Open) -> None:
    """The second of two ranks begins in the middle, and goes on with what the first one has not got to."""
    inner, manifest, _ = stored
    storage = NodeStorage(inner, shared(), 1, 2)
    assert [block.number for block in storage._order(blocks_of(manifest))] == [2, 3, 0, 1]
    storage.announce(manifest)
    assert storage._ahead is not None
    storage._ahead.result()
    assert len(inner.asked) == 4


HOLD = """
import os, sys
from ckpt_engine.restore.shared_blocks import SharedBlocks as Region
region = Region(os.open(sys.argv[1], os.O_RDWR), sys.argv[2])
print(*(region.claim(n).name for n in range(4)), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["killed", "hangs"])
def test_a_neighbour_that_dies_or_hangs_delays_no_other(
    end: str,
    shared: Open,
    stored: tuple[Counting, Manifest, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its blocks are free at once if it is killed; if it only hangs they are read without it after a while."""
    inner, manifest, whole = stored
    fd = shared()
    name = str(Path(f"/proc/self/fd/{fd}").readlink())
    command = [sys.executable, "-c", HOLD, name, manifest.info.id]
    with interpreters.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline().split() == ["MINE"] * 4
        storage = NodeStorage(inner, fd, 0, 2)
        if end == "killed":
            neighbour.send_signal(signal.SIGKILL)
            neighbour.wait(30)
        else:
            monkeypatch.setattr(node_storage, "WAIT_SECONDS", 0.2)
        with caplog.at_level(logging.WARNING):
            storage.announce(manifest)
            assert torch.equal(read(storage, manifest), whole)
        assert storage.stop()
        assert ("does not deliver" in caplog.text) == (end == "hangs")
        neighbour.kill()
    assert sum(nbytes for _, nbytes in inner.asked) >= NBYTES


def test_a_block_that_a_neighbour_has_spoiled_is_read_from_the_storage(
    shared: Open, stored: tuple[Counting, Manifest, torch.Tensor]
) -> None:
    """What is in shared memory is verified like everything else, and the storage itself is asked again."""
    inner, manifest, whole = stored
    spoiler = SharedBlocks(shared(), manifest.info.id)
    assert spoiler.claim(1) is BlockClaim.MINE
    spoiler.put(1, memoryview(bytes(BLOCK_BYTES)))
    storage = NodeStorage(inner, shared(), 0, 2)
    storage.announce(manifest)
    assert torch.equal(read(storage, manifest), whole)
    assert storage.stop()


def test_without_room_in_shared_memory_everybody_reads_alone(
    shared: Open,
    stored: tuple[Counting, Manifest, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Too little room before: nothing is shared. Full in the middle: the rest is read alone, and that is said."""
    inner, manifest, whole = stored
    monkeypatch.setattr(node_storage, "room_bytes", lambda fd: NBYTES - 1)
    storage = NodeStorage(inner, shared(), 0, 2)
    storage.announce(manifest)
    assert torch.equal(read(storage, manifest), whole)
    assert os.fstat(shared()).st_blocks == 0
    monkeypatch.setattr(node_storage, "room_bytes", lambda fd: NBYTES)

    def full(fd: int, data: memoryview, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_blocks.os, "pwrite", full)
    storage = NodeStorage(inner, shared(), 0, 2)
    with caplog.at_level(logging.WARNING):
        storage.announce(manifest)
        assert torch.equal(read(storage, manifest), whole)
    assert storage.stop()
    assert "takes no more" in caplog.text
