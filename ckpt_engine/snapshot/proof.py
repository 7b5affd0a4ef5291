"""Proves that what was copied behind training is what it was at the instant.

The 8-byte words of each transfer form a matrix. Its rows and its columns are summed as integers, on the device at the
instant and in the arena behind the copy. A word that changed changes the sum of its row and of its column, and words
that changed places change sums as well; only changes that cancel out in every row and in every column at once would
not be seen. Bytes that fill no whole row are compared themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_WORD = 8
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Sums:
    """Where the sums of one transfer are, in a vector of words.

    Args:
        start: of the transfer, in bytes from the start of the slot.
        nbytes: of the transfer.
        head: bytes ahead of the first whole word.
        rows: of the matrix.
        columns: of the matrix, in words.
        at: where the vector has the sums of the rows; those of the columns follow, then `head` and the bytes behind
            the matrix, each from a whole word on.
    """

    start: int
    nbytes: int
    head: int
    rows: int
    columns: int
    at: int

    @property
    def matrix_bytes(self) -> int:
        """Bytes in the matrix."""
        return self.rows * self.columns * _WORD

    @property
    def tail(self) -> int:
        """Bytes behind the matrix."""
        return self.nbytes - self.head - self.matrix_bytes

    @property
    def words(self) -> int:
        """What it takes in the vector."""
        return self.rows + self.columns + _words(self.head) + _words(self.tail)

    def edges(self, vector: Any) -> Iterator[tuple[Any, int]]:
        """Where the vector, as bytes, has bytes of the transfer, and from which on."""
        at = (self.at + self.rows + self.columns) * _WORD
        if self.head:
            yield vector[at : at + self.head], 0
        if self.tail:
            at += _words(self.head) * _WORD
            yield vector[at : at + self.tail], self.nbytes - self.tail

    def first_difference(self, slot: _Bytes, vector: _Bytes) -> int | None:
        """Where the slot differs from what was summed, in bytes from its start; None: nowhere."""
        copied = slot[self.start : self.start + self.nbytes]
        for expected, first in self.edges(vector):
            changed = copied[first : first + len(expected)] != expected
            if changed.any():
                return self.start + first + int(np.argmax(changed))
        if not self.rows:
            return None
        matrix = np.frombuffer(copied[self.head : self.head + self.matrix_bytes], np.int64).reshape(-1, self.columns)
        summed: np.ndarray[Any, np.dtype[np.int64]] = vector.view(np.int64)[self.at :]
        wrong = np.add.reduce(matrix, axis=1) != summed[: self.rows]
        across = np.add.reduce(matrix, axis=0) != summed[self.rows : self.rows + self.columns]
        if not (wrong.any() or across.any()):
            return None
        return self.start + self.head + (int(np.argmax(wrong)) * self.columns + int(np.argmax(across))) * _WORD


def sums_of(transfers: Iterable[tuple[int, int, int]]) -> list[Sums]:
    """The sums of transfers one behind another in one vector.

    Args:
        transfers: start and length in bytes of each, and how many bytes lie ahead of its first whole word.
    """
    found, at = list[Sums](), 0
    for start, nbytes, ahead in transfers:
        head = min(ahead, nbytes)
        words = (nbytes - head) // _WORD
        columns = 1 << (words.bit_length() // 2)  # so that rows and columns are about as many
        rows = words // columns if words >= columns * 2 else 0
        found.append(Sums(start, nbytes, head, rows, columns if rows else 0, at))
        at += found[-1].words
    return found


def vector_bytes(sums: Iterable[Sums]) -> int:
    """Length of their vector."""
    return sum(one.words for one in sums) * _WORD


def matrix_of(sums: Sums, source: torch.Tensor) -> torch.Tensor:
    """The matrix of a transfer's bytes."""
    return source[sums.head : sums.head + sums.matrix_bytes].view(torch.int64).view(sums.rows, sums.columns)


def _words(nbytes: int) -> int:
    return -(-nbytes // _WORD)
