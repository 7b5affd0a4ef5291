"""Keeps the rows of the flight recorder beside the snapshots, as the writer outlives the trainer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_engine.copy.host_memory import shared_bytes
from ckpt_engine.errors import CkptError
from ckpt_engine.observe.events import Event
from ckpt_engine.observe.reporter import Reporter
from ckpt_engine.store import rows
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.disk import closing_fd, translating
from ckpt_engine.store.storage.retries import asking

APPEND_SECONDS = 1.0
"""A folder has what was recorded that long ago."""
_END_SECONDS = 2.0


class RowFile:
    """The rows of one trainer at one place. What goes wrong is said once: training does not depend on it.

    Args:
        storage: the place; calls may hang.
        emit: takes events; any thread.
    """

    def __init__(self, storage: Storage, emit: Callable[[Event], object]) -> None:
        self._storage, self._report = storage, Reporter(emit)
        self._name, self._header = "", b""
        self._written = 0
        self._over, self.committed = threading.Event(), threading.Event()
        """The trainer records no more; a snapshot has become durable here since rows were written."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ckpt-rows", daemon=True)

    def attach(self, body: Mapping[str, Any], fd: int) -> None:
        """Keep the rows that come into this memory from now on; the descriptor is owned. One that came before is left.

        Args:
            body: `name` of the object, and what there is to say `about` the process.
        """
        with closing_fd(fd), self._lock:
            self._ring = rows.Ring(shared_bytes(fd, rows.ROWS * rows.ROW_BYTES, writable=False))
            self._name, self._header = body["name"], rows.header(body["about"])
        if not self._thread.is_alive():
            self._thread.start()

    def end(self, *, waits: bool = True) -> None:
        """The trainer records no more: what is not written yet is written. Idempotent.

        Args:
            waits: until that is done, unless the place hangs.
        """
        self._over.set()
        if waits and self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        with suppress(CkptError):
            rows.forget_older(self._storage, self._name)
        with suppress(CkptError):
            before = rows.read_life(self._storage, self._name)  # of a writer that was lost
            self._written = before.rows[-1].number if before is not None and before.rows else 0
        while not self._over.wait(APPEND_SECONDS):
            self._write(last=False)
        self._write(last=True)

    def _write(self, *, last: bool) -> None:
        with self._lock, asking():
            try:
                folder = self._storage.capabilities.folder
                if folder is not None:
                    self._append(folder.path(self._name))
                elif last or self.committed.is_set():
                    self._put()
            except CkptError as err:
                text = f"the steps are not recorded, a resume cannot be proved: {err.message}"
                self._report.failed("rows", text)

    def _append(self, path: str) -> None:
        new = list(self._ring.after(self._written))
        if not new:
            return
        # Where the run's folder is gone who commits there says so, and makes it again.
        with translating("write", path), suppress(FileNotFoundError):
            Path(path).parent.mkdir(exist_ok=True)
            with closing_fd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)) as fd:
                # A write that failed may have left a part of a row.
                size = os.fstat(fd).st_size // rows.ROW_BYTES * rows.ROW_BYTES
                if not size:
                    size += os.pwrite(fd, self._header, 0)
                wrote = os.pwrite(fd, b"".join(new), size)
                self._written += wrote // rows.ROW_BYTES
                if size + wrote > 2 * rows.ROWS * rows.ROW_BYTES:
                    self._cut(fd)

    def _cut(self, fd: int) -> None:
        """Leave the newest rows only. Where this is interrupted, rows are lost, and none is wrong."""
        size = os.fstat(fd).st_size // rows.ROW_BYTES * rows.ROW_BYTES
        newest = os.pread(fd, rows.ROWS * rows.ROW_BYTES, size - rows.ROWS * rows.ROW_BYTES)
        os.ftruncate(fd, rows.ROW_BYTES)
        os.pwrite(fd, newest, rows.ROW_BYTES)

    def _put(self) -> None:
        self.committed.clear()
        newest = list(self._ring.after(self._written))
        self._written += max(0, len(newest) - rows.PUT_ROWS)
        if newest:
            text = self._header + b"".join(newest[-rows.PUT_ROWS :])
            self._storage.put(self._name, [memoryview(text)], exclusive=False)
