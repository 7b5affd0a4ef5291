"""Storages that count: requests as S3 bills them (a listing has pages of 1,000 names), or bytes that are read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ckpt_engine.errors import CorruptError, StorageExistsError, StorageMissingError
from ckpt_engine.store.storage.base import Capabilities, ObjectInfo, Storage

PAGE_NAMES = 1000


class CountedStorage:
    """`Storage` over a dict; `requests` counts by kind: list (pages), get, put, delete."""

    capabilities = Capabilities()

    def __init__(self, url: str = "counted://run") -> None:
        self.url = url
        self.objects: dict[str, bytes] = {}
        self._etags: dict[str, tuple[bytes, str]] = {}
        self.requests: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All requests so far."""
        return sum(self.requests.values())

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        """See `Storage`."""
        self.requests["put"] += 1
        if exclusive and name in self.objects:
            raise StorageExistsError(f"{name} exists")
        self.objects[name] = b"".join(blocks)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See `Storage`."""
        self.requests["get"] += 1
        if name not in self.objects:
            raise StorageMissingError(f"no object {name}")
        data = self.objects[name]
        return data[start:] if nbytes is None else data[start : start + nbytes]

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Storage`."""
        data = self.get(name, start, out.nbytes)
        if len(data) < out.nbytes:
            raise CorruptError(f"{name} ends too early")
        out[:] = data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Storage`."""
        found = [name for name in list(self.objects) if name.startswith(prefix)]
        self.requests["list"] += max(1, -(-len(found) // PAGE_NAMES))
        for name in found:
            yield ObjectInfo(name, len(self.objects[name]), self._etag(name))

    def _etag(self, name: str) -> str:
        data = self.objects[name]
        known = self._etags.get(name)
        if known is None or known[0] is not data:
            known = self._etags[name] = data, hashlib.md5(data, usedforsecurity=False).hexdigest()
        return known[1]

    def delete(self, *names: str) -> None:
        """See `Storage`."""
        self.requests["delete"] += len(names)
        for name in names:
            self.objects.pop(name, None)

    def sweep(self) -> int:
        """See `Storage`."""
        return 0


class CountedReads:
    """A storage that counts the bytes that are read from it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.nbytes = 0
        """Of contents so far; listings are not counted."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See `Storage`."""
        found = self._storage.get(name, start, nbytes)
        self.nbytes += len(found)
        return found

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Storage`."""
        self._storage.get_into(name, start, out)
        self.nbytes += out.nbytes
