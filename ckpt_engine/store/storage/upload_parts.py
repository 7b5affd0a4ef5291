"""Cuts an upload into parts without copying: pure arithmetic over memory that stays where it is.

The limits are those of S3, which its relatives share: at most 10,000 parts, each of 5 MiB (but the last) to 5 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_engine.errors import (
    StorageError,
)

MAX_PARTS = 10_000
MIN_PART_BYTES = 5 << 20
MAX_PART_BYTES = 5 << 30
_ROUND_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class UploadPart:
    """Bytes `start` to `start + nbytes` of an object; `number` counts from 1."""

    number: int
    start: int
    nbytes: int


def plan_parts(nbytes: int, part_bytes: int) -> tuple[UploadPart, ...]:
    """The parts of an object, all of one size but the last (some stores insist on that).

    The same object always gets the same parts, so that an interrupted upload can be continued.

    Args:
        part_bytes: the wanted size; taken bigger, in whole MiB, where 10,000 parts would not do.

    Raises:
        StorageError: no object can be that big.
    """
    size = max(part_bytes, MIN_PART_BYTES)
    if nbytes > size * MAX_PARTS:
        size = -(-nbytes // MAX_PARTS)
        size = -(-size // _ROUND_BYTES) * _ROUND_BYTES
    if size > MAX_PART_BYTES:
        raise StorageError(f"an object of {nbytes} bytes is more than an object store takes ({MAX_PARTS} x 5 GiB)")
    return tuple(
        UploadPart(number, start, min(size, nbytes - start))
        for number, start in enumerate(range(0, max(nbytes, 1), size), 1)
    )


class MemoryBlocks:
    """Blocks of memory read as if they were one; nothing is copied."""

    def __init__(self, blocks: Sequence[memoryview]) -> None:
        self._blocks = [memoryview(block).cast("B") for block in blocks if block.nbytes]
        self.nbytes = sum(len(block) for block in self._blocks)

    @classmethod
    def of(cls, blocks: Sequence[memoryview]) -> MemoryBlocks:
        """The same bytes; a subclass makes them when they are read."""
        return blocks if isinstance(blocks, MemoryBlocks) else cls(blocks)

    def close(self) -> None:
        """Let go of the memory, also if there are references to this."""
        for block in self._blocks:
            block.release()
        self._blocks = []

    def views(self, start: int, nbytes: int, most: int) -> Iterator[memoryview]:
        """The bytes from `start` on as views of at most `most` bytes each; release each after use."""
        at = 0
        end = start + nbytes
        for block in self._blocks:
            here, stop = max(start, at) - at, min(end, at + len(block)) - at
            while here < stop:
                upto = min(here + most, stop)
                yield block[here:upto]
                here = upto
            at += len(block)
            if at >= end:
                return
