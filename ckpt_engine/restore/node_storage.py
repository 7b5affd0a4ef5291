"""A storage far away, of which the ranks of a node request each byte once."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

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


class NodeBlocks:
    """The blocks of a snapshot's data files that are needed, numbered alike on all ranks.

    Args:
        manifest: of the snapshot.
        files: of no other data files; None: of all.
    """

    def __init__(self, manifest: Manifest, files: Container[str] | None = None) -> None:
        needed: set[tuple[int, int]] = set()
        for _, piece in stored_pieces(manifest):
            if files is not None and manifest.files[piece.file].name not in files:
                continue
            last = piece.offset + max(piece.nbytes, 1) - 1
            needed |= {(piece.file, n) for n in range(piece.offset // BLOCK_BYTES, last // BLOCK_BYTES + 1)}
        self._files = manifest.files
        self._places = sorted(needed)
        self._numbers = {(manifest.files[file].name, n): number for number, (file, n) in enumerate(self._places)}

    def __len__(self) -> int:
        return len(self._places)

    def number(self, name: str, n: int) -> int | None:
        """The number of the n-th block of a data file; None: it is not needed."""
        return self._numbers.get((name, n))

    def place(self, number: int) -> tuple[str, int, int]:
        """The data file of a block, its first byte there, and its bytes."""
        file, n = self._places[number]
        start = n * BLOCK_BYTES
        return self._files[file].name, start, min(BLOCK_BYTES, self._files[file].nbytes - start)

    @property
    def names(self) -> tuple[str, ...]:
        """The data files they are of."""
        return tuple(self._files[file].name for file in sorted({file for file, _ in self._places}))

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.place(number)[2] for number in range(len(self)))


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
        self._blocks: NodeBlocks | None = None
        self._region: SharedBlocks | None = None
        self._ahead: ParallelMap[int, None] | None = None
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
        blocks = NodeBlocks(manifest, files)
        self._blocks = self._region = None
        if len(blocks) == 0 or blocks.nbytes > room_bytes(self._fd):
            return  # the room is not there: everybody reads for himself
        # Ranks that need other files number their blocks otherwise.
        region = manifest.info.id if files is None else f"{manifest.info.id}/{'/'.join(blocks.names)}"
        self._region, self._blocks, self._alone = SharedBlocks(self._fd, region), blocks, False
        read = partial(self._read_ahead, blocks, self._region)
        self._ahead = ParallelMap(read, self._order(len(blocks)), AHEAD_THREADS, "ckpt-node")

    def stop(self) -> bool:
        """End reading ahead; whether nothing uses the shared file any more."""
        return self._ahead is None or self._ahead.abandon(END_SECONDS)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        blocks, region = self._blocks, self._region
        if blocks is None or region is None:
            self.inner.get_into(name, start, out)
            return
        at, stop = start, start + len(out)
        while at < stop:
            n = at // BLOCK_BYTES
            end = min(stop, (n + 1) * BLOCK_BYTES)
            part = out[at - start : end - start]
            number = blocks.number(name, n)
            if number is None or at + len(part) > sum(blocks.place(number)[1:]):
                self.inner.get_into(name, at, part)
            else:
                self._take(blocks, region, number, at - n * BLOCK_BYTES, part)
            at = end

    def _take(self, blocks: NodeBlocks, region: SharedBlocks, number: int, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of a block: from shared memory, or by fetching it for all."""
        pause, deadline = LOOKS.first_seconds, time.monotonic() + WAIT_SECONDS
        while True:
            found = region.claim(number)
            if found is BlockClaim.PRESENT:
                region.read(number, start, out)
                return
            if found is BlockClaim.MINE:
                out[:] = self._fetch(blocks, region, number)[start : start + len(out)]
                return
            if found is BlockClaim.TAKEN and (self._alone or time.monotonic() > deadline):
                self._give_up_waiting()
                name, first, _ = blocks.place(number)
                self.inner.get_into(name, first + start, out)
                return
            region.wait(pause)
            pause = LOOKS.after(pause)

    def _fetch(self, blocks: NodeBlocks, region: SharedBlocks, number: int) -> memoryview:
        """Read a block that was claimed, and share it."""
        name, start, nbytes = blocks.place(number)
        data = memoryview(bytearray(nbytes))
        with on_failure(partial(region.give_up, number)):
            self.inner.get_into(name, start, data)
        try:
            region.put(number, data)
        except OSError as err:
            self._give_up_waiting(f"shared memory takes no more ({err.strerror})")
        return data

    def _read_ahead(self, blocks: NodeBlocks, region: SharedBlocks, number: int) -> None:
        if not self._alone and region.claim(number) is BlockClaim.MINE:
            with suppress(CkptError):  # the reader that needs the block gets the error
                self._fetch(blocks, region, number)

    def _order(self, count: int) -> Sequence[int]:
        """This rank's share first, then what the others may not get to."""
        first = count * self._index // self._count
        return [*range(first, count), *range(first)]

    def _give_up_waiting(self, why: str = "a neighbour does not deliver what it has begun to read") -> None:
        if not self._alone:
            self._alone = True
            LOG.warning("%s: this rank reads the rest from %s alone", why, self.url)
