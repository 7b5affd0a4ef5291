"""Encodes pieces of which few rows have changed since an older snapshot, where that is likely and pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_engine.errors import CorruptError, FormatError, StorageMissingError
from ckpt_engine.persist.aside import Aside
from ckpt_engine.persist.job import EntryLayout
from ckpt_engine.persist.pieces import Extent
from ckpt_engine.persist.upkeep import replaced
from ckpt_engine.store.codecs.base import Chunk, get_codec
from ckpt_engine.store.decode import Decoder, chain_of
from ckpt_engine.store.digest import PIECE_BYTES, digest
from ckpt_engine.store.manifest import Manifest, Piece
from ckpt_engine.store.repository import Repository

CODEC = "rows"
LEAST_ROWS = 64
"""In a piece; with fewer of them most pieces change in most rows."""
SAMPLES = 4
"""Rows of an entry that are looked at first."""
MOST_BYTES = 0.75
"""What the deltas of one chain may have together, as a share of the piece; of all chains of an entry see `upkeep`."""


@dataclass(frozen=True, slots=True)
class Delta:
    """An encoded piece.

    Args:
        over: what it was made against, and the bases of that.
        base: the snapshot that has it.
    """

    stored: bytes
    over: tuple[Piece, ...]
    base: str


class RowDeltas:
    """Encodes pieces of one image against an older snapshot in a repository whose data is near.

    Older data that is damaged or gone is not built on; any other trouble with the storage is raised.

    Args:
        aside: reads the older data.
        before: the older snapshot.
        image: of the new one.
    """

    def __init__(self, aside: Aside, before: Manifest, image: memoryview) -> None:
        self._aside = aside
        self._before = before
        self._image = image
        self._decoder = Decoder(before, self._fetch, self._glance)
        self._likely: dict[str, bool] = {}
        self._replaced: dict[str, dict[int, int]] = {}
        self._base = memoryview(bytearray())

    def encode(self, entry: EntryLayout, extent: Extent, wanted: str, chain: tuple[Piece, ...]) -> Delta | None:
        """The delta of a piece of the image; None: it is better stored as it is.

        Args:
            wanted: digest of the piece.
            chain: what the older snapshot has there, and its bases.

        Raises:
            StorageError: the older data cannot be read, or that hangs.
        """
        row_nbytes = _row_nbytes(entry, extent)
        if row_nbytes is None or not self.is_likely(entry, extent, chain):
            return None
        base_id, start = self._before.info.id, extent.offset - entry.offset
        if count := self._upkeep(entry.name).get(start, 0):
            if count == len(chain):
                return None
            base_id, chain = str(chain[count - 1].base), chain[count:]
        data = self._image[extent.offset : extent.offset + extent.nbytes]
        base = self._room(extent.nbytes)
        try:
            self._decoder.read(entry.name, start, chain[0], base)
        except (FormatError, StorageMissingError):
            return None
        codec = get_codec(CODEC)
        chunk = Chunk(entry.dtype, (extent.nbytes // row_nbytes, *entry.shape[1:]), entry.name)
        stored = codec.encode(data, chunk, base)
        if stored is None:
            self._likely[entry.name] = False
            return None
        if len(stored) + sum(piece.nbytes for piece in chain[:-1]) > MOST_BYTES * extent.nbytes:
            return None
        codec.decode(memoryview(stored), base, base)
        return Delta(bytes(stored), chain, base_id) if digest(base) == wanted else None

    def is_likely(self, entry: EntryLayout, extent: Extent, chain: Sequence[Piece]) -> bool:
        """Whether few rows of an entry seem to have changed, as far as a few rows of one piece tell."""
        known = self._likely.get(entry.name)
        if known is None:
            known = self._likely[entry.name] = len(chain) > 1 or self._sample(entry, extent, chain[0])
        return known

    def _sample(self, entry: EntryLayout, extent: Extent, piece: Piece) -> bool:
        row_nbytes = _row_nbytes(entry, extent)
        if row_nbytes is None or piece.nbytes != extent.nbytes:
            return False
        rows = extent.nbytes // row_nbytes
        file = self._before.files[piece.file].name
        starts = [rows * (2 * number + 1) // (2 * SAMPLES) * row_nbytes for number in range(SAMPLES)]

        def there(repository: Repository) -> list[bytes]:
            return [repository.storage.get(file, piece.offset + start, row_nbytes) for start in starts]

        try:
            old = self._aside.read(there)
        except (FormatError, StorageMissingError):
            return False
        here = (self._image[extent.offset + start :][:row_nbytes] for start in starts)
        return 2 * sum(a == b for a, b in zip(old, here, strict=True)) >= SAMPLES

    def _upkeep(self, name: str) -> dict[int, int]:
        """What of the chains of an entry is replaced, see `upkeep.replaced`."""
        found = self._replaced.get(name)
        if found is None:
            chains: dict[int, list[int]] = {}
            start = 0
            for piece in self._before.entries[name].pieces:
                chains[start] = [one.nbytes for one in chain_of(self._before, name, start, piece)]
                start += piece.raw_nbytes
            found = self._replaced[name] = replaced(chains)
        return found

    def _fetch(self, entry: str, piece: Piece, out: memoryview) -> None:
        self._glance(entry, piece, out)
        if digest(out) != piece.digest:
            name = self._before.files[piece.file].name
            raise CorruptError(f"{entry!r}: bytes of {name} do not match their digest")

    def _glance(self, _: str, piece: Piece, out: memoryview) -> None:
        name = self._before.files[piece.file].name
        self._aside.read(lambda repository: repository.storage.get_into(name, piece.offset, out), out.nbytes)

    def _room(self, nbytes: int) -> memoryview:
        if len(self._base) < nbytes:
            self._base = memoryview(bytearray(max(nbytes, PIECE_BYTES)))
        return self._base[:nbytes]


def _row_nbytes(entry: EntryLayout, extent: Extent) -> int | None:
    """Bytes of a row of an entry whose piece has enough whole rows."""
    if len(entry.shape) < 2 or entry.nbytes % entry.shape[0]:
        return None
    row_nbytes = entry.nbytes // entry.shape[0]
    rows, rest = divmod(extent.nbytes, row_nbytes)
    return row_nbytes if rest == 0 and rows >= LEAST_ROWS else None
