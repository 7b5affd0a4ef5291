"""All snapshots of a run in one SQLite file, for clusters that limit the number of files: `sqlite:///path/run.db`."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ckpt_engine.errors import (
    CorruptError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageMissingError,
    StorageReadOnlyError,
)
from ckpt_engine.store import names
from ckpt_engine.store.storage.base import Capabilities, ObjectInfo
from ckpt_engine.store.storage.disk import require_size
from ckpt_engine.store.storage.object_options import ObjectOptions
from ckpt_engine.store.storage.object_requests import checked

PART_BYTES = 64 << 20
"""SQLite holds at most 1 GB in one value."""
BUSY_SECONDS = 60.0
TABLES = """
CREATE TABLE IF NOT EXISTS objects (name TEXT PRIMARY KEY, nbytes INTEGER, version INTEGER);
CREATE TABLE IF NOT EXISTS parts (name TEXT, start INTEGER, data BLOB, UNIQUE (name, start));
"""
ERRORS = {
    sqlite3.SQLITE_FULL: StorageFullError,
    sqlite3.SQLITE_READONLY: StorageReadOnlyError,
    sqlite3.SQLITE_CORRUPT: CorruptError,
    sqlite3.SQLITE_NOTADB: CorruptError,
}


class SqliteStorage:
    """`Storage` in one SQLite file; a put is a transaction, which SQLite syncs before it returns.

    Args:
        url: `sqlite://` and the absolute path of the file.
        options: those of `ObjectOptions`, which mean nothing here; it has none of its own.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.url = url.rstrip("/")
        self._path = Path(self.url.partition("://")[2])
        _, own = ObjectOptions.split(options)
        if own or not self._path.is_absolute():
            raise StorageError(f"{url}: one absolute path, and no storage_options", hint="sqlite:///path/run.db")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(versions=self, cheap_reads=True, slow_answers=False, free_bytes=self.free_bytes)

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        with self._writing(name) as db:
            if exclusive and self._row(db, name) is not None:
                raise StorageExistsError(f"{self.url}/{name} exists")
            self._replace(db, name, blocks)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        with self._reading(name) as db:
            total, _ = self._require(db, name)
            if nbytes is None:
                require_size(f"{self.url}/{name}", total - start, names.most_bytes(name))
            out = bytearray(max(0, min(total - start, total if nbytes is None else nbytes)))
            self._fill(db, name, start, memoryview(out))
            return bytes(out)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        with self._reading(name) as db:
            total, _ = self._require(db, name)
            if start + out.nbytes > total:
                raise CorruptError(f"{self.url}/{name} ends at byte {total}, needed up to {start + out.nbytes}")
            self._fill(db, name, start, out.cast("B"))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._reading(None) as db:
            wanted = "SELECT name, nbytes, version FROM objects WHERE substr(name, 1, ?) = ?"
            rows = db.execute(wanted, (len(prefix), prefix)).fetchall()
        yield from (ObjectInfo(name, nbytes, str(version)) for name, nbytes, version in rows)

    def delete(self, *names: str) -> None:
        for name in names:
            checked(name)
        if names and self._path.exists():
            with self._writing(names[0]) as db:
                for name in names:
                    self._remove(db, name)

    def sweep(self) -> int:
        return 0  # SQLite rolls an interrupted transaction back

    def free_bytes(self) -> int:
        there = next(parent for parent in self._path.parents if parent.exists())
        return shutil.disk_usage(there).free

    # ---- conditional writes, which make the run's lease safe between machines

    def read_versioned(self, name: str) -> tuple[bytes, str] | None:
        with self._reading(name) as db:
            if (row := self._row(db, name)) is None:
                return None
            out = bytearray(row[0])
            self._fill(db, name, 0, memoryview(out))
            return bytes(out), str(row[1])

    def replace(self, name: str, data: bytes, version: str | None) -> None:
        with self._writing(name) as db:
            row = self._row(db, name)
            if (None if row is None else str(row[1])) != version:
                raise StorageExistsError(f"{self.url}/{name} has another version")
            self._replace(db, name, [memoryview(data)])

    # ---- rows

    def _row(self, db: sqlite3.Connection, name: str) -> tuple[int, int] | None:
        row: tuple[int, int] | None = db.execute(
            "SELECT nbytes, version FROM objects WHERE name = ?", (name,)
        ).fetchone()
        return row

    def _require(self, db: sqlite3.Connection, name: str) -> tuple[int, int]:
        if (row := self._row(db, name)) is None:
            raise StorageMissingError(f"{self.url}/{name} does not exist")
        return row

    def _remove(self, db: sqlite3.Connection, name: str) -> None:
        db.execute("DELETE FROM objects WHERE name = ?", (name,))
        db.execute("DELETE FROM parts WHERE name = ?", (name,))

    def _replace(self, db: sqlite3.Connection, name: str, blocks: Sequence[memoryview]) -> None:
        row = self._row(db, name)
        self._remove(db, name)
        start = 0
        for block in (block.cast("B") for block in blocks):
            for offset in range(0, block.nbytes, PART_BYTES):
                part = block[offset : offset + PART_BYTES]
                db.execute("INSERT INTO parts VALUES (?, ?, ?)", (name, start, part))
                start += part.nbytes
        db.execute("INSERT INTO objects VALUES (?, ?, ?)", (name, start, 1 if row is None else row[1] + 1))

    def _fill(self, db: sqlite3.Connection, name: str, start: int, out: memoryview) -> None:
        wanted = (
            "SELECT rowid, start, length(data) FROM parts WHERE name = ? AND start < ? AND start + length(data) > ?"
        )
        for row, first, nbytes in db.execute(wanted, (name, start + out.nbytes, start)).fetchall():
            begin, end = max(first, start), min(first + nbytes, start + out.nbytes)
            with db.blobopen("parts", "data", row, readonly=True) as blob:
                blob.seek(begin - first)
                out[begin - start : end - start] = blob.read(end - begin)

    @contextmanager
    def _reading(self, name: str | None) -> Iterator[sqlite3.Connection]:
        """A snapshot of the file; where there is none, of an empty one."""
        with self._open(name, "ro" if self._path.exists() else "memory") as db:
            db.execute("BEGIN")
            yield db

    @contextmanager
    def _writing(self, name: str) -> Iterator[sqlite3.Connection]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._open(name, "rwc") as db:
            db.execute("PRAGMA synchronous = EXTRA")
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.commit()

    @contextmanager
    def _open(self, name: str | None, mode: str) -> Iterator[sqlite3.Connection]:
        if name is not None:
            checked(name)
        try:
            address = f"file:{self._path}?mode={mode}"
            with closing(sqlite3.connect(address, timeout=BUSY_SECONDS, uri=True, isolation_level=None)) as db:
                if mode != "ro":
                    db.executescript(TABLES)
                yield db
        except (sqlite3.Error, OSError) as err:
            kind = ERRORS.get(getattr(err, "sqlite_errorcode", -1) & 0xFF, StorageError)
            raise kind(f"{self.url}: {err}") from err
