"""The parity of a data file: its bytes again from the rest, where up to so many parts of it are lost.

A Reed-Solomon code of the library pyeclib (docs/format.md, "Parity"). A data file is cut into ranges of equal size, and
a stripe is one block of each range. Digests say which blocks of a stripe are damaged: these count as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import xxhash

from ckpt_engine.errors import CkptError, FormatError, StorageError, StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.manifest import DataFile
from ckpt_engine.store.names import ParityName
from ckpt_engine.store.storage.base import Storage

if TYPE_CHECKING:
    from pyeclib.ec_iface import ECDriver

BLOCK_BYTES = 256 << 10
"""What a stripe has of each range; the last stripe may have less."""
DIGEST_BYTES = 16
FillRange = Callable[[int, memoryview], object]
"""Fills memory with the bytes of a data file from a position on; an error of this project says that they are lost."""


@dataclass(frozen=True, slots=True)
class FileParity:
    """The parity object of a data file at a place.

    Args:
        storage: the place.
        name: of the object, which says how it is made.
    """

    storage: Storage
    name: ParityName

    @property
    def nbytes(self) -> int:
        """The bytes of the object."""
        return self.name.parity * (self.name.range_bytes + self._row_bytes * len(self._starts))

    def encode(self, image: memoryview, out: memoryview, step: Callable[[], object]) -> None:
        """Make the object.

        Args:
            image: the whole data file.
            out: takes the object.
            step: called before each stripe.

        Raises:
            StorageError: the library is not installed.
        """
        for start in self._starts:
            step()
            nbytes = self._block_bytes(start)
            found = [image[place : place + nbytes] for place in self._places(start)]
            data = b"".join([part for block in found for part in (block, bytes(nbytes - len(block)))])
            blocks = [memoryview(data)[at : at + nbytes] for at in range(0, len(data), nbytes)]
            fragments = _driver(self.name.data, self.name.parity).encode(data)
            parts = [memoryview(fragment)[-nbytes:] for fragment in fragments[self.name.data :]]
            row = b"".join(map(xxhash.xxh3_128_digest, [*blocks, *parts]))
            row += xxhash.xxh3_128_digest(row)
            stripe = b"".join([one for part in parts for one in (row, part)])
            at = self._stripe_at(start)
            out[at : at + len(stripe)] = stripe

    def mend(self, read: FillRange, start: int = 0, out: memoryview | None = None) -> bool:
        """Make bytes of the data file from what is left of it and from its parity.

        Args:
            read: reads what is left.
            start, out: which bytes are made, and where to; what cannot be made is written as it was read. None: all
                bytes are looked at, and nothing is written.

        Returns:
            Whether they are known to be as they were when the parity was made.

        Raises:
            StorageError: the library is not installed, or the object cannot be read.
        """
        stop = self.name.nbytes if out is None else start + out.nbytes
        is_whole = True
        for stripe in self._starts:
            places = self._places(stripe)
            spans = [(max(one, start), min(one + self._block_bytes(stripe), stop)) for one in places]
            if any(first < last for first, last in spans):
                blocks = self._blocks(read, stripe)
                is_whole = self._restore(blocks, stripe) and is_whole
                for block, place, (first, last) in zip(blocks, places, spans, strict=True):
                    if out is not None and first < last:
                        out[first - start : last - start] = block[first - place : last - place]
        return is_whole

    def damaged_parts(self, advance: Callable[[int], object]) -> int:
        """How many parts of the object are not as they were written; `advance` takes the bytes just read.

        Raises:
            StorageError: the object cannot be read.
        """
        damaged = 0
        for digests, parts in map(self._parts, self._starts):
            damaged += self.name.parity - len(_good([None] * self.name.data + parts, digests))
            advance(self.nbytes // len(self._starts))
        return damaged

    @property
    def _row_bytes(self) -> int:
        """The digests of all blocks of a stripe, and the digest of these."""
        return (self.name.data + self.name.parity + 1) * DIGEST_BYTES

    @property
    def _starts(self) -> range:
        """Where the stripes begin in each range."""
        return range(0, self.name.range_bytes, BLOCK_BYTES)

    def _block_bytes(self, start: int) -> int:
        return min(BLOCK_BYTES, self.name.range_bytes - start)

    def _places(self, start: int) -> list[int]:
        """Where the blocks of a stripe are in the data file."""
        return [number * self.name.range_bytes + start for number in range(self.name.data)]

    def _stripe_at(self, start: int) -> int:
        """Where a stripe is in the object: of each part a row of digests and a block."""
        return self.name.parity * (start + start // BLOCK_BYTES * self._row_bytes)

    def _blocks(self, read: FillRange, start: int) -> list[memoryview]:
        """The blocks of a stripe, with zeros for what is lost and behind the end of the file."""
        blocks = [memoryview(bytearray(self._block_bytes(start))) for _ in range(self.name.data)]
        for place, block in zip(self._places(start), blocks, strict=True):
            with suppress(CkptError):
                read(place, block[: max(0, self.name.nbytes - place)])
        return blocks

    def _parts(self, start: int) -> tuple[list[bytes], list[memoryview | None]]:
        """The digests of all blocks of a stripe, and its blocks of parity; None for those whose row is damaged.

        If all rows are, there are no digests.

        Raises:
            StorageError: the object cannot be read.
        """
        part_bytes = self._row_bytes + self._block_bytes(start)
        stripe = memoryview(bytearray(self.name.parity * part_bytes))
        with suppress(FormatError, StorageMissingError):
            self.storage.get_into(str(self.name), self._stripe_at(start), stripe)
        digests = b""
        parts: list[memoryview | None] = []
        for at in range(0, stripe.nbytes, part_bytes):
            row = bytes(stripe[at : at + self._row_bytes])
            is_sound = xxhash.xxh3_128_digest(row[:-DIGEST_BYTES]) == row[-DIGEST_BYTES:]
            digests = row if is_sound else digests
            parts.append(stripe[at + self._row_bytes : at + part_bytes] if is_sound else None)
        return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)], parts

    def _restore(self, blocks: Sequence[memoryview], start: int) -> bool:
        """Make the damaged blocks of a stripe again where they are; whether all are whole now."""
        digests, parts = self._parts(start)
        good = _good([*blocks, *parts], digests)
        missing = [number for number in range(self.name.data) if number not in good]
        if not missing or len(good) < self.name.data:
            return not missing
        headers = _headers(self.name.data, self.name.parity, self._block_bytes(start))
        fragments = [headers[number] + block for number, block in good.items()]
        made = _driver(self.name.data, self.name.parity).reconstruct(fragments, missing)
        for number, fragment in zip(missing, made, strict=True):
            blocks[number][:] = fragment[-blocks[number].nbytes :]
        return True


def restored(storage: Storage, file: str, start: int = 0, out: memoryview | None = None) -> str | None:
    """Make bytes of a data file from what a place has of it and of its parity, to be verified.

    Args:
        start, out: as of `FileParity.mend`.

    Returns:
        The URL of the parity; None: there is none, or it is not enough.
    """
    with suppress(CkptError):
        for item in storage.list(f"{file}.parity-"):
            name = names.parity_of(item.name)
            if name is not None and FileParity(storage, name).mend(partial(storage.get_into, file), start, out):
                return f"{storage.url}/{name}"
    return None


def advice_on(storage: Storage, file: str) -> str:
    """What lets the parity of a damaged data file be used, to be added to a message; empty: it has none, or nothing is
    missing.
    """
    with suppress(CkptError):
        if find_spec("pyeclib") is None and any(storage.list(f"{file}.parity-")):
            return "; `pip install 'ckpt-engine[parity]'` lets its parity mend it"
    return ""


def is_mendable(there: Mapping[str, int], file: DataFile) -> bool:
    """Whether a data file that is missing or too short can have all its bytes from its parity.

    Args:
        there: the bytes of the objects of a place, by name.
    """
    return any(
        there.get(file.name, 0) >= (one.data - one.parity) * one.range_bytes
        for name in there
        if name.startswith(f"{file.name}.") and (one := names.parity_of(name)) is not None
    )


def _good(blocks: Sequence[memoryview | None], digests: Sequence[bytes]) -> dict[int, memoryview]:
    """Those blocks that have their digests, by number."""
    return {
        number: block
        for number, (block, one) in enumerate(zip(blocks, digests, strict=False))
        if block is not None and xxhash.xxh3_128_digest(block) == one
    }


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
