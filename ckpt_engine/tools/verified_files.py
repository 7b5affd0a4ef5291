"""Remembers which data files of a place a scrub has found whole."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from ckpt_engine.errors import FormatError, StorageError
from ckpt_engine.observe.number_types import Seconds
from ckpt_engine.store import names
from ckpt_engine.store.container import digest
from ckpt_engine.store.sealed_json import parsed, seal, stored
from ckpt_engine.store.storage.base import Storage

PUT_SECONDS = 5.0
"""Between two writes of the record. A scrub that is killed reads again what it has verified since then."""
PieceKey = tuple[int, int, str]
"""A piece of a data file: its offset, its bytes and its digest."""


class VerifiedFiles:
    """The data files of a place whose pieces were found whole.

    Args:
        storage: the place; the record is `scrub.json` there.
        since: what was verified before does not count, in seconds since the epoch; infinity: nothing counts.
        is_kept: the record is written.

    Attributes:
        times: when a file was verified, in seconds since the epoch, by its key.
    """

    def __init__(self, storage: Storage, since: float = math.inf, *, is_kept: bool = False) -> None:
        self._storage = storage
        self._is_kept = is_kept
        self._put_at = time.monotonic()
        self.times: dict[str, float] = {}
        with suppress(FormatError):  # without the record more is read
            found = stored(storage, names.SCRUB, parse_verified) if since < math.inf else None
            self.times = {key: at for key, at in (found or {}).items() if since <= at <= time.time()}

    def add(self, key: str) -> None:
        """A file is verified now."""
        self.times[key] = time.time()
        if time.monotonic() - self._put_at >= PUT_SECONDS:
            self.put()

    def put(self) -> None:
        """Write the record, if it is kept."""
        if self._is_kept:
            with suppress(StorageError):  # as above
                self._storage.put(names.SCRUB, [memoryview(seal({"verified": self.times}) + b"\n")], exclusive=False)
        self._put_at = time.monotonic()


def key_of(file: str, pieces: Iterable[PieceKey]) -> str:
    """The key of a data file in the record: its name, and which of its pieces."""
    return f"{file} {digest(repr(sorted(pieces)).encode())}"


@dataclass(frozen=True, slots=True)
class _Record:
    """What `scrub.json` says."""

    verified: dict[str, Seconds]


def parse_verified(text: bytes, where: str) -> dict[str, float]:
    """When each file was verified, in seconds since the epoch, by the text of the record.

    Raises:
        CorruptError: it is none.
    """
    return parsed(text, where, _Record, "remove it: the next scrub reads everything").verified
