"""The parity of a data file: its bytes again from the rest, where up to so many parts of it are lost.

A Reed-Solomon code of the library pyeclib (docs/format.md, "Parity"). A data file is cut into ranges of equal size, and
a stripe is one block of each range. Digests say which blocks of a stripe are damaged: these count as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Self

import xxhash

from ckpt_engine.errors import CkptError, StorageError
from ckpt_engine.store import names
from ckpt_engine.store.manifest import DataFile
from ckpt_engine.store.names import ParityName
from ckpt_engine.store.storage.base import Storage

if TYPE_CHECKING:
    from pyeclib.ec_iface import ECDriver

BLOCK_BYTES = 256 << 10
"""What a stripe has of each range; the last stripe may have less."""
DIGEST_BYTES = 16
MOST_PARTS = 32
"""Ranges and parts of parity together that the library takes."""
ReadInto = Callable[[int, memoryview], object]
"""Fills memory with the bytes of a data file from a position on."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """Where a stripe lies.

    Args:
        start: of its block in each range.
        nbytes: of each block.
        at: of its first part in the parity object; a part is a row of digests and a block of parity.
    """

    start: int
    nbytes: int
    at: int


class FileParity:
    """The parity object of a data file at a place.

    Args:
        name: of the object; its numbers say how it is made.
    """

    def __init__(self, storage: Storage, name: ParityName) -> None:
        self._storage = storage
        self._made = name
        self.name = str(name)
        self.url = f"{storage.url}/{name}"
        self._range_bytes = _range_bytes(name)
        self._row_bytes = (name.data + name.parity + 1) * DIGEST_BYTES

    @classmethod
    def find(cls, storage: Storage, file: str) -> Self | None:
        """The parity of a data file; None: it has none.

        Raises:
            StorageError: that cannot be found out.
        """
        found = (names.parity_of(item.name) for item in storage.list(f"{file}.parity-"))
        return next((cls(storage, one) for one in found if one and one.data + one.parity <= MOST_PARTS), None)

    @property
    def nbytes(self) -> int:
        """The bytes of the object."""
        return sum(self._made.parity * (self._row_bytes + stripe.nbytes) for stripe in self._stripes())

    def encode(self, image: memoryview, out: memoryview, step: Callable[[], object] = lambda: None) -> None:
        """Make the object.

        Args:
            image: the whole data file.
            out: takes the object, `nbytes` bytes.
            step: called before each stripe; what it raises ends this.

        Raises:
            StorageError: the library is not installed.
        """
        data, parity = self._made.data, self._made.parity
        for stripe in self._stripes():
            step()
            blocks, _ = self._data(reader_of(image), stripe)
            made = _driver(data, parity).encode(b"".join(blocks))
            parts = [memoryview(fragment)[-stripe.nbytes :] for fragment in made[data:]]
            row = b"".join(map(xxhash.xxh3_128_digest, [*blocks, *parts]))
            row += xxhash.xxh3_128_digest(row)
            for number, part in enumerate(parts):
                at = self._part_at(stripe, number)
                out[at : at + self._row_bytes] = row
                out[at + self._row_bytes : at + self._row_bytes + stripe.nbytes] = part

    def mend(self, read: ReadInto, start: int = 0, out: memoryview | None = None) -> bool:
        """Make bytes of the data file from what is left of it and from its parity.

        Args:
            read: what is left; an error of this project says that bytes are lost.
            start, out: which bytes are made, and where to: what cannot be made is written as it was read. None: all, and
            nothing is written.

        Returns:
            Whether they are known to be as they were when the parity was made.

        Raises:
            StorageError: the library is not installed.
        """
        is_whole = True
        stop = self._made.nbytes if out is None else start + out.nbytes
        for stripe in self._stripes():
            starts = [number * self._range_bytes + stripe.start for number in range(self._made.data)]
            if all(one >= stop or one + stripe.nbytes <= start for one in starts):
                continue
            blocks, lost = self._data(read, stripe)
            is_whole = self._restore(blocks, lost, stripe) and is_whole
            for number, block in enumerate(blocks):
                first, last = max(starts[number], start), min(starts[number] + stripe.nbytes, stop)
                if out is not None and first < last:
                    out[first - start : last - start] = block[first - starts[number] : last - starts[number]]
        return is_whole

    def damaged_parts(self) -> int:
        """How many parts of the object are not as they were written."""
        damaged = 0
        for stripe in self._stripes():
            digests, parts = self._parity(stripe)
            damaged += self._made.parity - len(_good(parts, digests, self._made.data))
        return damaged

    def _stripes(self) -> Iterator[Stripe]:
        at = 0
        for start in range(0, self._range_bytes, BLOCK_BYTES):
            yield (stripe := Stripe(start, min(BLOCK_BYTES, self._range_bytes - start), at))
            at = self._part_at(stripe, self._made.parity)

    def _part_at(self, stripe: Stripe, number: int) -> int:
        return stripe.at + number * (self._row_bytes + stripe.nbytes)

    def _data(self, read: ReadInto, stripe: Stripe) -> tuple[list[memoryview], set[int]]:
        """The blocks of a stripe, with zeros behind the end of the file, and the numbers of those that are lost."""
        lost: set[int] = set()
        blocks = [memoryview(bytearray(stripe.nbytes)) for _ in range(self._made.data)]
        for number, block in enumerate(blocks):
            start = number * self._range_bytes + stripe.start
            try:
                read(start, block[: max(0, self._made.nbytes - start)])
            except CkptError:
                lost.add(number)
        return blocks, lost

    def _parity(self, stripe: Stripe) -> tuple[bytes, list[memoryview | None]]:
        """The digests of all blocks of a stripe, and its blocks of parity; None for those that are lost.

        A part whose row is not whole is lost. If all are, there are no digests.
        """
        digests = b""
        parts: list[memoryview | None] = []
        for number in range(self._made.parity):
            part = memoryview(bytearray(self._row_bytes + stripe.nbytes))
            try:
                self._storage.get_into(self.name, self._part_at(stripe, number), part)
            except CkptError:
                parts.append(None)
                continue
            row = bytes(part[: self._row_bytes])
            is_sound = xxhash.xxh3_128_digest(row[:-DIGEST_BYTES]) == row[-DIGEST_BYTES:]
            digests = row if is_sound else digests
            parts.append(part[self._row_bytes :] if is_sound else None)
        return digests, parts

    def _restore(self, blocks: Sequence[memoryview], lost: Container[int], stripe: Stripe) -> bool:
        """Make the damaged blocks of a stripe again where they are; whether all have their digests now."""
        data, parity = self._made.data, self._made.parity
        digests, parts = self._parity(stripe)
        there = [None if number in lost else block for number, block in enumerate(blocks)]
        good = _good([*there, *parts], digests)
        missing = [number for number in range(data) if number not in good]
        if not missing or len(good) < data:
            return not missing
        headers = _headers(data, parity, stripe.nbytes)
        fragments = [b"".join((headers[number], block)) for number, block in good.items()]
        made = _driver(data, parity).reconstruct(fragments, missing)
        for number, fragment in zip(missing, made, strict=True):
            blocks[number][:] = memoryview(fragment)[-stripe.nbytes :]
        return True


def is_mendable(there: Mapping[str, int], file: DataFile) -> bool:
    """Whether a data file that is missing or too short can have all its bytes from its parity.

    Args:
        there: the bytes of the objects of a place, by name.
    """
    found = [one for name in there if name.startswith(f"{file.name}.") and (one := names.parity_of(name))]
    return any(there.get(file.name, 0) >= (one.data - one.parity) * _range_bytes(one) for one in found)


def reader_of(image: memoryview) -> ReadInto:
    """Reads from memory that has the data file."""

    def read(start: int, block: memoryview) -> None:
        block[:] = image[start : start + block.nbytes]

    return read


def _range_bytes(name: ParityName) -> int:
    return -(-name.nbytes // name.data)


def _good(blocks: Sequence[memoryview | None], digests: bytes, first: int = 0) -> dict[int, memoryview]:
    """By number those blocks that have their digests, which are counted from `first` on."""
    found = {}
    for number, block in enumerate(blocks):
        at = (first + number) * DIGEST_BYTES
        if block is not None and xxhash.xxh3_128_digest(block) == digests[at : at + DIGEST_BYTES]:
            found[number] = block
    return found


@cache
def _driver(data: int, parity: int) -> ECDriver:
    try:
        from pyeclib.ec_iface import ECDriver
    except ImportError as err:
        raise StorageError("parity needs pyeclib", hint="pip install 'ckpt-engine[parity]'") from err
    return ECDriver(ec_type="isa_l_rs_cauchy", k=data, m=parity)


@cache
def _headers(data: int, parity: int, nbytes: int) -> list[bytes]:
    """What the library wants before each block: it says which one it is, and nothing of its bytes."""
    return [one[:-nbytes] for one in _driver(data, parity).encode(bytes(data * nbytes))]
