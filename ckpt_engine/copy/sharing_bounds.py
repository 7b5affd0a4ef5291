"""The bounds within which a place spares bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_engine.store.manifest import Piece

_OLDER_COUNTS = 0.5
"""A delta that has more than this share of the bytes of all newer ones stays when they are replaced: each row that
changes is then written a second time, and hardly ever a third time."""


@dataclass(frozen=True, slots=True)
class SharingBounds:
    """How far a place goes to spare bytes.

    Args:
        least_bytes, least_share: if less is spared, in bytes or of the state, all is written.
        part_bytes: decoded bytes of one data file, at most; two files are in memory at once, one is put while one is
            encoded. None: everything is encoded before the first file is put, and what is written is known exactly.
        rows_only: differences are changed rows; else any codec that needs a base is tried.
        most_bases: behind each other. A longer chain of rows has its newest differences replaced by one.
        most_bytes: what a piece and all its bases may have together, as a share of its decoded bytes: a restore reads
            all of it.
        most_share: what the differences of all pieces of an entry may have together, of its bytes; then a few pieces
            at a time are written in full. None: each piece is judged separately.
        most_small: files that are hardly more than a header which one snapshot refers to.
    """

    least_bytes: int
    least_share: float
    part_bytes: int | None
    rows_only: bool
    most_bases: int
    most_bytes: float
    most_share: float | None
    most_small: int


def replaced(chains: Mapping[int, Sequence[int]], bounds: SharingBounds) -> dict[int, int]:
    """How many elements at the front of each chain the next delta takes the place of; those with none are left out.

    As many as a chain has: there will be no delta, the piece is written as it is.

    Args:
        chains: of one entry: stored bytes of the elements, by the byte where the piece begins.
    """
    found = {}
    for number, (start, sizes) in enumerate(chains.items()):
        # Pieces that became deltas together are not all replaced together.
        most = bounds.most_bases - (number % (bounds.most_bases // 2) if bounds.most_share is not None else 0)
        if len(sizes) > most:
            found[start] = _front(sizes, most)
    if bounds.most_share is None:
        return found
    deltas = {start: sum(sizes[:-1]) for start, sizes in chains.items()}
    # What is added now is taken to be as much as the last time.
    excess = sum(deltas.values()) + sum(sizes[0] for sizes in chains.values() if len(sizes) > 1)
    excess -= int(bounds.most_share * sum(sizes[-1] for sizes in chains.values()))
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


def are_in_bounds(chains: Sequence[Sequence[Piece]], bounds: SharingBounds) -> bool:
    """Whether differences to these, encoded together, would be within the bounds if they are like the last ones."""
    stored_bytes = sum(sum(piece.nbytes for piece in chain) for chain in chains)
    stored_bytes += sum(chain[0].nbytes for chain in chains if len(chain) > 1)
    raw_bytes = sum(chain[0].raw_nbytes for chain in chains)
    return max(map(len, chains)) <= bounds.most_bases and stored_bytes <= bounds.most_bytes * raw_bytes
