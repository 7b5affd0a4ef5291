"""Restore from memory: the snapshot that the writer of a dead trainer still holds, as the nearest place of the run."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ckpt_engine.errors import CorruptError, StorageError, StorageMissingError, StorageReadOnlyError, WriterError
from ckpt_engine.persist import control
from ckpt_engine.persist.mapping import map_shared
from ckpt_engine.persist.pulse import Beat
from ckpt_engine.persist.wire import Received
from ckpt_engine.store import layout
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import ObjectInfo

URL = "memory"
"""How the place is called."""
BYE_SECONDS = 2.0


class MemoryStorage:
    """One snapshot in the memory of another process, read-only; see `Storage`. Nothing is copied before it is read.

    Args:
        texts: the run's record and the manifest, by name.
        file: name of the data file.
        fd: a descriptor of the memory, owned by this object from now on.
        nbytes: bytes of the data file, from the start of the memory on.
        beat: how far the trainer was when it died, as far as it said.

    Raises:
        CorruptError: the memory is smaller.
    """

    url = URL

    def __init__(self, texts: Mapping[str, bytes], file: str, fd: int, nbytes: int, beat: Beat | None = None) -> None:
        self.beat = beat
        self._texts = texts
        self._file = file
        self._fd = fd
        self._nbytes = nbytes
        self._memory: Any = None
        self._lock = threading.Lock()
        # Reading beyond the end of a shared file kills the process (SIGBUS), so trust the file, not the message.
        if os.fstat(fd).st_size < nbytes:
            raise CorruptError(f"the memory of {file} has {os.fstat(fd).st_size} bytes instead of {nbytes}")

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if name == self._file:
            stop = self._nbytes if nbytes is None else min(self._nbytes, start + nbytes)
            return bytes(self.view(name, start, stop - start)) if start < stop else b""
        text = self._text(name)
        return text[start:] if nbytes is None else text[start : start + nbytes]

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        if name == self._file:
            view = self.view(name, start, out.nbytes)
            if not out.nbytes:
                return
            # Unlike a slice assignment this lets go of the GIL.
            ctypes.memmove(address_of(out), address_of(view), out.nbytes)
            return
        found = self._text(name)[start : start + out.nbytes]
        if len(found) < out.nbytes:
            raise CorruptError(f"{URL}/{name} ends before byte {start + out.nbytes}")
        out[:] = found

    def view(self, name: str, start: int, nbytes: int) -> memoryview:
        """Bytes of the data file where they are. They stay mapped as long as anything refers to the result.

        Raises:
            StorageMissingError
            CorruptError: the file ends too early.
        """
        if name != self._file:
            raise StorageMissingError(f"{URL} does not have {name} as memory")
        if start + nbytes > self._nbytes:
            raise CorruptError(f"{URL}/{name} ends before byte {start + nbytes}")
        return memoryview(self._mapped()).cast("B")[start : start + nbytes].toreadonly()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = [ObjectInfo(name, len(text)) for name, text in self._texts.items()]
        found.append(ObjectInfo(self._file, self._nbytes))
        return iter([item for item in found if item.name.startswith(prefix)])

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:  # noqa: ARG002
        raise StorageReadOnlyError(f"{URL} is not written by this process")

    def delete(self, *names: str) -> None:  # noqa: ARG002
        raise StorageReadOnlyError(f"{URL} is not written by this process")

    def sweep(self) -> int:
        return 0

    def free_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        """Unmap it, and give up the memory. Idempotent."""
        with self._lock:
            self._memory = None
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _text(self, name: str) -> bytes:
        try:
            return self._texts[name]
        except KeyError as err:
            raise StorageMissingError(f"{URL} does not have {name}") from err

    def _mapped(self) -> Any:
        with self._lock:
            if self._memory is None:
                if self._fd < 0:
                    raise StorageError(f"{URL} was released")
                try:
                    self._memory = map_shared(self._fd, self._nbytes, writable=False)
                except OSError as err:
                    raise StorageError(f"cannot map {self._nbytes} bytes of {URL}: {err}") from err
            return self._memory


class MemoryPlace:
    """A snapshot in memory, to be restored from.

    Args:
        root_url: of the run.
        reply: of its writer to `control.SNAPSHOT`; its descriptor is owned from now on.

    Attributes:
        repository: for `restore.load`, as the nearest place.
        snapshot, step: its id and its step.

    Raises:
        CorruptError: the memory is smaller than the snapshot.
    """

    def __init__(self, root_url: str, reply: Received) -> None:
        body = reply.body
        self._root_url = root_url
        self._released = False
        self.snapshot = str(body["snapshot"])
        self.step = int(body["step"])
        said = body["beat"]
        beat = None if said is None else Beat(int(said["step"]), float(said["instant_monotonic"]))
        texts = {
            layout.RECORD: str(body["record"]).encode(),
            layout.manifest_name(self.snapshot): str(body["manifest"]).encode(),
        }
        self._storage = MemoryStorage(texts, str(body["file"]), reply.fds[0], int(body["nbytes"]), beat)
        self.repository = Repository(self._storage)

    def release(self, *, bye: bool = True) -> None:
        """Give up the memory. Idempotent; never raises.

        Args:
            bye: tell the writer that it is not needed any more; whoever only looks at the snapshot does not.
        """
        if self._released:
            return
        self._released = True
        self._storage.close()
        if not bye:
            return
        with suppress(WriterError, OSError):  # it lingers a little longer then
            reply = control.ask(self._root_url, {"what": control.BYE, "snapshot": self.snapshot}, BYE_SECONDS)
            for fd in reply.fds if reply is not None else ():
                os.close(fd)


def attach(root_url: str, timeout: float) -> MemoryPlace | None:
    """The snapshot that the writer of a dead trainer holds of the run at `root_url`, on this machine, for this user.

    Args:
        timeout: seconds to wait for the writer; it answers at once, but for the digests of the snapshot.

    Returns:
        None: there is none, or its trainer is alive, or the writer does not answer. The place MUST be released.
    """
    try:
        reply = control.ask(root_url, {"what": control.SNAPSHOT}, timeout)
    except (WriterError, OSError):
        return None
    if reply is None:
        return None
    try:
        if reply.body.get("snapshot") is None or not reply.fds:
            raise LookupError
        return MemoryPlace(root_url, reply)
    except (LookupError, TypeError, ValueError, AttributeError, OSError, CorruptError):
        for fd in reply.fds:
            os.close(fd)
        return None


def address_of(view: memoryview) -> int:
    """Where in memory `view` begins, be it writable or not."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
