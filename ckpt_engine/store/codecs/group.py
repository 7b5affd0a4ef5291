"""The seam of codecs that need several arrays at once, because one tells what another must have become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Stored = bytes | memoryview


class GroupCodec(Protocol):
    """Encodes the arrays of a group against the same arrays of an older snapshot.

    Each member (a *role*) gets stored bytes of its own, so that each is a piece with a digest like any other; decoding
    one needs all of them. Guarantees are those of `Codec`.
    """

    @property
    def name(self) -> str:
        """What `Piece.codec` says of every member."""
        ...

    @property
    def roles(self) -> tuple[str, ...]:
        """The members of a group, all of them arrays of the same size."""
        ...

    def encode(
        self,
        arrays: Mapping[str, memoryview],
        bases: Mapping[str, memoryview],
        told: Sequence[Mapping[str, float]],
    ) -> Mapping[str, Stored] | None:
        """Stored bytes by role, or None where prediction fails: then each array is encoded by itself.

        Args:
            told: numbers that the prediction needs; a codec says which. Where it is not sure which numbers were used,
                several: the ones that fit are taken.
        """
        ...

    def decode(
        self, stored: Mapping[str, memoryview], outs: Mapping[str, memoryview], bases: Mapping[str, memoryview]
    ) -> None:
        """Fill all `outs`.

        Raises:
            CorruptError: the stored bytes or the bases are not those of `encode`.
            NewerFormatError: a later version wrote them.
        """
        ...
