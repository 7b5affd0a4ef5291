"""A storage far away, of which the ranks of a node request each byte once."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ckpt_engine.copy.write_snapshot import ParallelMap
from ckpt_engine.errors import CkptError
from ckpt_engine.observe.events import LOG
from ckpt_engine.restore.shared_blocks import (
    BLOCK_BYTES,
    BlockClaim,
    SharedBlocks,
    room_bytes,
)
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.storage.base import Capabilities, Storage, WrapperStorage
from ckpt_engine.store.storage.retries import GrowingPauses
from ckpt_engine.undo import on_failure

WAIT_SECONDS = 30.0
"""How long a block that a neighbour fetches is waited for; from then on this rank reads alone."""
LOOKS = GrowingPauses(0.001, 0.05)
"""Between two looks for it."""
AHEAD_THREADS = 8
"""Requests under way for this rank's share, besides those for what it needs at once."""
END_SECONDS = 60.0
"""How long requests ahead may still take when everything needed is there."""


class NodeBlock(NamedTuple):
    """A block of a data file that is needed.

    Args:
        number: among those of a snapshot, the same on all ranks.
        name: of the file.
        start: its first byte there.
        nbytes: its bytes.
    """

    number: int
    name: str
    start: int
    nbytes: int


def blocks_of(manifest: Manifest, files: Container[str] | None = None) -> list[NodeBlock]:
    """The blocks of a snapshot's data files that are needed, in the order of their numbers.

    Args:
        files: of no other data files; None: of all.
    """
    found: set[tuple[str, int, int]] = set()
    for _, piece in stored_pieces(manifest):
        file = manifest.files[piece.file]
        if files is None or file.name in files:
            end = piece.offset + max(piece.nbytes, 1)
            starts = range(piece.offset // BLOCK_BYTES * BLOCK_BYTES, end, BLOCK_BYTES)
            found |= {(file.name, start, min(BLOCK_BYTES, file.nbytes - start)) for start in starts}
    return [NodeBlock(number, *one) for number, one in enumerate(sorted(found))]


class NodeStorage(WrapperStorage):
    """A storage as `Storage`, whose `get_into` asks the neighbours first. Thread safe.

    Nothing that was put into shared memory is believed: a reader verifies the pieces as ever, and what does not
    fit is read once more from `inner`.

    Args:
        inner: where the bytes come from.
        fd: of the file that the node's ranks share.
        index, count: this is the `index`-th of `count` ranks on the node.
    """

    def __init__(self, inner: Storage, fd: int, index: int, count: int) -> None:
        super().__init__(inner)
        self._fd = fd
        self._index = index
        self._count = count
        self._snapshot = ""
        self._blocks: Mapping[tuple[str, int], NodeBlock] = {}
        self._region: SharedBlocks | None = None
        self._ahead: ParallelMap[NodeBlock, None] | None = None
        self._alone = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, announce=self.announce, unshared=self.inner)

    def announce(self, manifest: Manifest, files: Container[str] | None = None) -> None:
        """This snapshot is read next (`files` of it; None: all): begin with this rank's share of it."""
        if self._snapshot == manifest.info.id:
            return
        self.stop()
        self._snapshot = manifest.info.id
        self._blocks, self._region = {}, None
        blocks = blocks_of(manifest, files)
        if not blocks or sum(block.nbytes for block in blocks) > room_bytes(self._fd):
            return  # the room is not there: everybody reads for himself
        # Ranks that need other files number their blocks otherwise.
        named = [] if files is None else sorted({block.name for block in blocks})
        region = self._region = SharedBlocks(self._fd, "/".join([manifest.info.id, *named]))
        self._blocks, self._alone = {(block.name, block.start): block for block in blocks}, False
        self._ahead = ParallelMap(partial(self._read_ahead, region), self._order(blocks), AHEAD_THREADS, "ckpt-node")

    def stop(self) -> bool:
        """End reading ahead; whether nothing uses the shared file any more."""
        return self._ahead is None or self._ahead.abandon(END_SECONDS)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        blocks, region = self._blocks, self._region
        if region is None:
            self.inner.get_into(name, start, out)
            return
        at, stop = start, start + len(out)
        while at < stop:
            first = at // BLOCK_BYTES * BLOCK_BYTES
            end = min(stop, first + BLOCK_BYTES)
            part = out[at - start : end - start]
            block = blocks.get((name, first))
            if block is None or end > first + block.nbytes:
                self.inner.get_into(name, at, part)
            else:
                self._take(region, block, at - first, part)
            at = end

    def _take(self, region: SharedBlocks, block: NodeBlock, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of a block: from shared memory, or by fetching it for all."""
        pause, deadline = LOOKS.first_seconds, time.monotonic() + WAIT_SECONDS
        while True:
            found = region.claim(block.number)
            if found is BlockClaim.PRESENT:
                region.read(block.number, start, out)
                return
            if found is BlockClaim.MINE:
                out[:] = self._fetch(region, block)[start : start + len(out)]
                return
            if found is BlockClaim.TAKEN and (self._alone or time.monotonic() > deadline):
                self._give_up_waiting()
                self.inner.get_into(block.name, block.start + start, out)
                return
            region.wait(pause)
            pause = LOOKS.after(pause)

    def _fetch(self, region: SharedBlocks, block: NodeBlock) -> memoryview:
        """Read a block that was claimed, and share it."""
        data = memoryview(bytearray(block.nbytes))
        with on_failure(partial(region.give_up, block.number)):
            self.inner.get_into(block.name, block.start, data)
        try:
            region.put(block.number, data)
        except OSError as err:
            self._give_up_waiting(f"shared memory takes no more ({err.strerror})")
        return data

    def _read_ahead(self, region: SharedBlocks, block: NodeBlock) -> None:
        if not self._alone and region.claim(block.number) is BlockClaim.MINE:
            with suppress(CkptError):  # the reader that needs the block gets the error
                self._fetch(region, block)

    def _order(self, blocks: Sequence[NodeBlock]) -> Sequence[NodeBlock]:
        """This rank's share first, then what the others may not get to."""
        first = len(blocks) * self._index // self._count
        return [*blocks[first:], *blocks[:first]]

    def _give_up_waiting(self, why: str = "a neighbour does not deliver what it has begun to read") -> None:
        if not self._alone:
            self._alone = True
            LOG.warning("%s: this rank reads the rest from %s alone", why, self.url)
