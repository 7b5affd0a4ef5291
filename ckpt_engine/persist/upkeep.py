"""Decides which chains of deltas are shortened with the next snapshot: a few at a time, so that none costs much more.

A chain is what a piece is made of: deltas, the newest first, and at its end the piece as it once was. Reading it back
takes longer the more deltas there are, and the more bytes they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
