"""Digests of stored bytes: fast, 128 bits, against damage and not against forgery.

xxh3-128 (Yann Collet, xxHash 0.8) runs at memory speed, so that every byte can be checked at every restore.
"""

from __future__ import annotations

import xxhash

ALGORITHM = "xxh3-128"
PIECE_BYTES = 16 << 20
"""Bytes covered by one digest: small enough to locate damage and to hash pieces on several threads."""


def digest(data: bytes | bytearray | memoryview) -> str:
    """`"xxh3-128:<32 hex>"` of contiguous bytes; releases the GIL while it runs."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


class Running:
    """The digest of bytes that come one after the other."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """They come next; releases the GIL while it runs."""
        self._hash.update(data)

    def result(self) -> str:
        """That of all bytes until now, as `digest`."""
        return f"{ALGORITHM}:{self._hash.hexdigest()}"
