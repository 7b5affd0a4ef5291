"""The rows of the flight recorder: what one optimizer step did, in 512 bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import xxhash

from ckpt_engine.errors import StorageError, StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.storage.base import Storage, tidy

ROW_BYTES = 512
CHUNK_BYTES = 96
MOST_CHUNKS = 4
ROWS = 4096
"""So many of the newest rows are in memory; a file has at least these."""
KEPT_FILES = 4
"""Of each rank, those of the newest processes."""
PUT_ROWS = 512
"""Of each process, the newest rows at a place where objects are written as a whole."""
_ROW = struct.Struct(f"<QQQI4xQQQQQdI{MOST_CHUNKS * CHUNK_BYTES}s36x")
_CHECK = struct.Struct("<Q")


class Row(NamedTuple):
    """One optimizer step.

    Args:
        number: of the row in its process, from 1 on.
        calls: optimizer steps of the run so far, this one included.
        step: the training step that it belongs to.
        optimizer: a checksum of its name.
        plan: a digest of which words are looked at; other words cannot be compared.
        batch: a digest of the batches since the row before; 0: none was seen.
        stream: a digest of torch's random stream.
        streams: a digest of the other random streams; 0: they were not looked at.
        rates: a digest of the learning rates.
        time: seconds since the epoch.
        words: of weights and of what the optimizer knows of them, at most `MOST_CHUNKS` chunks of `CHUNK_BYTES`.
    """

    number: int
    calls: int
    step: int
    optimizer: int
    plan: int
    batch: int
    stream: int
    streams: int
    rates: int
    time: float
    words: bytes


def decode(data: bytes) -> Row | None:
    """A row from its bytes; None: it is not whole."""
    if len(data) < ROW_BYTES:
        return None
    *values, nbytes, words = _ROW.unpack_from(data)
    if _CHECK.unpack_from(data, _ROW.size)[0] != xxhash.xxh3_64_intdigest(data[: _ROW.size]):
        return None
    return Row._make([*values, words[:nbytes]])


@dataclass(eq=False)
class Ring:
    """The newest rows of one process, in memory that its writer shares.

    Args:
        memory: `ROWS * ROW_BYTES` bytes.
    """

    _memory: memoryview

    def put(self, row: tuple[Any, ...]) -> None:
        """Add what a `Row` is made of, with a checksum. Where there is one of that place already it is replaced."""
        at = (row[0] - 1) % ROWS * ROW_BYTES
        body = _ROW.pack(*row[:-1], len(row[-1]), row[-1])
        self._memory[at : at + ROW_BYTES] = body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))

    def after(self, number: int) -> Iterator[bytes]:
        """The rows behind this one, in order, as far as they are whole. Those that were replaced are left out."""
        while True:
            at = number % ROWS * ROW_BYTES
            data = bytes(self._memory[at : at + ROW_BYTES])
            row = decode(data)
            if row is None or row.number <= number:
                return
            number = row.number
            yield data


@dataclass(frozen=True, slots=True)
class ProcessRows:
    """What one process has recorded.

    Args:
        about: where it ran: threads, world, torch and so on.
        rows: in order.
    """

    about: Mapping[str, Any]
    rows: tuple[Row, ...]


def header(about: Mapping[str, Any]) -> bytes:
    """What such an object begins with, as long as a row."""
    return json.dumps(dict(about)).encode().ljust(ROW_BYTES - 1) + b"\n"


def files_of(storage: Storage, rank: int) -> list[str]:
    """The objects with rows of a rank, oldest first."""
    return sorted(one.name for one in storage.list(names.ROWS) if names.rows_rank(one.name) == rank)


def forget_older(storage: Storage, name: str) -> None:
    """Remove the rows of processes that are too old to be of use, of the rank of this object, where that is allowed.

    Raises:
        StorageError: it could not be done.
    """
    if (rank := names.rows_rank(name)) is not None:
        tidy(storage, *files_of(storage, rank)[:-KEPT_FILES])


def copy_rows(source: Storage, target: Storage, copied: dict[str, tuple[int, str]]) -> None:
    """Copy the rows of all ranks to a further place, as far as they are new. Raises `StorageError`.

    Args:
        copied: by name, size and version of what was copied.
    """
    for one in source.list(names.ROWS):
        content = one.nbytes, one.version
        if names.rows_rank(one.name) is not None and copied.get(one.name) != content:
            data = memoryview(source.get(one.name))
            newest = data[ROW_BYTES : len(data) // ROW_BYTES * ROW_BYTES][-PUT_ROWS * ROW_BYTES :]
            target.put(one.name, [data[:ROW_BYTES], newest], exclusive=False)
            copied[one.name] = content
            forget_older(target, one.name)


def read_lives(storages: Iterable[Storage], rank: int, but: str = "") -> list[ProcessRows]:
    """What earlier processes of a rank have recorded, oldest first, from the first place that has anything of it.

    Args:
        but: the object of this process.
    """
    for storage in storages:
        with suppress(StorageError):
            found = (read_life(storage, name) for name in files_of(storage, rank) if name != but)
            if lives := [life for life in found if life is not None]:
                return lives
    return []


def read_life(storage: Storage, name: str) -> ProcessRows | None:
    """What the object of this name has; None: nothing that can be used. Rows that are not whole are left out."""
    try:
        data = storage.get(name)
        about = msgspec.json.decode(data[:ROW_BYTES])
    except (StorageMissingError, ValueError, RecursionError):
        return None
    starts = range(ROW_BYTES, len(data) - ROW_BYTES + 1, ROW_BYTES)
    rows = (decode(data[at : at + ROW_BYTES]) for at in starts)
    return ProcessRows(about if isinstance(about, dict) else {}, tuple(row for row in rows if row is not None))
