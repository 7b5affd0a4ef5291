"""Encodes pieces of which few rows have changed since an older snapshot, where that is likely and pays.

Decides which chains of deltas are shortened with the next snapshot: a few at a time, so that none costs much more.

A chain is what a piece is made of: deltas, the newest first, and at its end the piece as it once was. Reading it back
takes longer the more deltas there are, and the more bytes they have.

Reads at a tier that nothing depends on: one that hangs is left behind, and the call that asked goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckpt_engine.copy.job import EntryLayout
from ckpt_engine.copy.staged import Extent
from ckpt_engine.errors import CorruptError, FormatError, StorageMissingError
from ckpt_engine.store.codecs.codec import Chunk, get_codec
from ckpt_engine.store.container import PIECE_BYTES, digest
from ckpt_engine.store.decode import Decoder, chain_of
from ckpt_engine.store.manifest import Manifest, Piece
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import watchdog
from ckpt_engine.store.storage.watchdog import SLOWEST_BYTES_PER_SECOND, CallProgress, Lane

CODEC = "rows"
LEAST_ROWS = 64
"""In a piece; with fewer of them most pieces change in most rows."""
SAMPLES = 4
"""Rows of an entry that are looked at first."""
MOST_BYTES = 0.75
"""What the deltas of one chain may have together, as a share of the piece; of all chains of an entry see
`row_deltas`.
"""


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
        """What of the chains of an entry is replaced, see `row_deltas.replaced`."""
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


MOST_BASES = 40
"""Behind each other. A longer chain has its newest deltas replaced by one."""
MOST_SHARE = 0.3
"""What the deltas of an entry may have together, of its bytes: a restore reads them besides the entry itself."""
_OLDER_COUNTS = 0.5
"""A delta that has more than this share of the bytes of all newer ones stays when they are replaced: each row that
changes is then written a second time, and hardly ever a third time."""


def replaced(chains: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """How many elements at the front of each chain the next delta takes the place of; those with none are left out.

    As many as a chain has: there will be no delta, the piece is written as it is.

    Args:
        chains: of one entry: stored bytes of the elements, by the byte where the piece begins.
    """
    found = {}
    for number, (start, sizes) in enumerate(chains.items()):
        # Pieces that became deltas together are not all replaced together.
        most = MOST_BASES - number % (MOST_BASES // 2)
        if len(sizes) > most:
            found[start] = _front(sizes, most)
    deltas = {start: sum(sizes[:-1]) for start, sizes in chains.items()}
    # What is added now is taken to be as much as the last time.
    excess = sum(deltas.values()) + sum(sizes[0] for sizes in chains.values() if len(sizes) > 1)
    excess -= int(MOST_SHARE * sum(sizes[-1] for sizes in chains.values()))
    for start in sorted(deltas, key=lambda start: -deltas[start]):
        if excess <= 0:
            break
        found[start] = len(chains[start])
        excess -= deltas[start]
    return found


def _front(sizes: Sequence[int], most: int) -> int:
    """How many of the newest deltas are replaced by one: at least half of those that there may be."""
    count, nbytes = 0, 0
    while count < len(sizes) - 1 and (count < most // 2 or sizes[count] <= _OLDER_COUNTS * nbytes):
        nbytes += sizes[count]
        count += 1
    return count


T = TypeVar("T")


class Aside:
    """Reads at one tier while a call to it is under way.

    There is at most one read that hangs: until it ends, others are refused at once.

    Args:
        repository: at the tier; watched by `lane`, and of no other use.
        lane: that the reads run in.
        waiting: progress of the call that asks, which must not look as if it hung while a read does.
    """

    def __init__(self, repository: Repository, lane: Lane, waiting: CallProgress) -> None:
        self._repository = repository
        self._lane = lane
        self.waiting = waiting

    def read(self, work: Callable[[Repository], T], nbytes: int = 0) -> T:
        """The result of `work`, which reads at most so many bytes in one call, and into nothing that others need.

        Raises:
            StorageStalledError: it hangs, or one before still does.
        """
        self.waiting.moved(watchdog.STALL_SECONDS + nbytes / SLOWEST_BYTES_PER_SECOND)
        try:
            return self._lane.call(lambda: work(self._repository))
        finally:
            self.waiting.moved()
