"""The storage seam: a flat namespace of immutable objects under one root.

What a file system and an object store can both promise, and no more: there is no rename, no append, no folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object of a listing and its size in bytes.

    Args:
        version: another text once an object of that name has other bytes; empty where the listing does not tell.
    """

    name: str
    nbytes: int
    version: str = field(default="", compare=False)


class Storage(Protocol):
    """Immutable objects under one root; names are relative and use "/".

    Every method may be called from several threads at once and raises `StorageError` or one of its kinds. Nothing is
    cached: what another process has put is seen.
    """

    url: str

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        """Store `blocks`, back to back, as one object: atomically and durably.

        When this returns the whole object is visible and survives power loss. On any error nothing is visible under
        `name`; if not `exclusive`, what was there before or the whole new object.

        Args:
            blocks: contiguous bytes, unchanged until this returns. Fastest is one block starting at a page.
            exclusive: raise if the object exists, instead of replacing it.

        Raises:
            StorageExistsError, StorageFullError, StorageReadOnlyError, NotAFolderError
        """
        ...

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """At most `nbytes` bytes from `start` on; fewer where the object ends.

        Args:
            nbytes: None: all that the format allows for an object of this name (`layout.most_bytes`).

        Raises:
            StorageMissingError
            CorruptError: it has more than the format allows, or it is no regular file.
        """
        ...

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on.

        Raises:
            StorageMissingError
            CorruptError: the object ends too early, or it is no regular file.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose name starts with `prefix`, in no order; never half-written ones. No root, no objects."""
        ...

    def delete(self, *names: str) -> None:
        """Remove objects; durable when this returns. One that does not exist is no error."""
        ...

    def sweep(self) -> int:
        """Remove what interrupted `put`s left behind and return its bytes; never touches a `put` in progress."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes that can still be stored, or None where that is not known."""
        ...
