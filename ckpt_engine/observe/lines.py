"""The sink that appends events to a JSON-lines file, and its reader."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_engine.observe.clock import Clock, SystemClock
from ckpt_engine.observe.events import Event, to_json


class LinesSink:
    """Appends one JSON object per event, with `time` (wall-clock seconds) and `monotonic` beside its fields.

    Each event is one `write` to a file opened for appending, so a killed process leaves at most one torn line at the
    end, which the next sink on the same file closes off and `read_lines` skips. Nothing is synced before `close`: the
    file is for reports, not for recovery. Keep it on a local disk, the write happens on the training thread.

    Raises:
        OSError: the file cannot be opened. A failing `emit` raises it too; see `fanout.FanOutSink`.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Clock | None = None) -> None:
        self._path = Path(path)
        self._clock: Clock = clock or SystemClock()
        self._fd: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def emit(self, event: Event) -> None:
        if self._fd is None:
            return
        # An event that carries its own time keeps it.
        record = {"time": self._clock.wall(), "monotonic": self._clock.monotonic(), **to_json(event)}
        data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        written = os.write(self._fd, data)
        if written != len(data):
            raise OSError(f"{self._path}: only {written} of {len(data)} bytes of an event were written")

    def close(self) -> None:
        """Syncs and closes the file; later events are dropped."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of the file in order, torn lines left out.

    Raises:
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        for raw in file:
            try:
                record = json.loads(raw)
            except ValueError:
                continue  # torn by a crash in the middle of a write
            if isinstance(record, dict):
                yield record
