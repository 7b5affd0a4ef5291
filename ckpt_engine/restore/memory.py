"""Restore from memory: the snapshot that the writer of a dead trainer still holds, as the nearest place of the run."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ckpt_engine.copy.staged import map_shared, shared_bytes
from ckpt_engine.errors import (
    CorruptError,
    StorageError,
    StorageMissingError,
    StorageReadOnlyError,
    WaitTimeoutError,
    WriterError,
)
from ckpt_engine.snapshot import host_memory
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Capabilities, ObjectInfo
from ckpt_engine.writer import control
from ckpt_engine.writer.channel import Beat, Received
from ckpt_engine.writer.peer_service import memory_file

URL = "memory"
"""How the place is called."""
BYE_SECONDS = 2.0
KNOCK_SECONDS = 5.0
"""How long a writer may take to say that it is there."""


class SharedFile:
    """A data file in the memory of another process. Thread safe.

    Args:
        name: of the data file.
        fd: a descriptor of the memory, owned by this object from now on.
        nbytes: bytes of the data file, from the start of the memory on.

    Raises:
        CorruptError: the memory is smaller.
    """

    def __init__(self, name: str, fd: int, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._fd = fd
        self._memory: Any = None
        self._lock = threading.Lock()
        # Reading beyond the end of a shared file kills the process (SIGBUS), so trust the file, not the message.
        if os.fstat(fd).st_size < nbytes:
            raise CorruptError(f"the memory of {name} has {os.fstat(fd).st_size} bytes instead of {nbytes}")

    def mapped(self) -> Any:
        """Its memory. It stays mapped as long as anything refers to the result."""
        with self._lock:
            if self._memory is None:
                if self._fd < 0:
                    raise StorageError(f"{URL} was released")
                try:
                    self._memory = map_shared(self._fd, self.nbytes, writable=False)
                except OSError as err:
                    raise StorageError(f"cannot map {self.nbytes} bytes of {URL}: {err}") from err
            return self._memory

    def close(self) -> None:
        """Unmap it, and give up the memory. Idempotent."""
        with self._lock:
            self._memory = None
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class MemoryStorage:
    """One snapshot in the memory of other processes, read-only; see `Storage`. Nothing is copied before it is read.

    Args:
        texts: the run's record and the manifest, by name.
        files: its data files, owned by this object from now on.
        beat: how far the trainer was when it died, as far as it said.
    """

    url = URL

    def __init__(self, texts: Mapping[str, bytes], files: Sequence[SharedFile], beat: Beat | None = None) -> None:
        self._beat = beat
        self._texts = texts
        self._files = {file.name: file for file in files}

    @property
    def capabilities(self) -> Capabilities:
        step = self._beat.step if self._beat is not None else None
        return Capabilities(view=self.view, cheap_reads=True, slow_answers=False, died_at_step=step)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        file = self._files.get(name)
        if file is not None:
            stop = file.nbytes if nbytes is None else min(file.nbytes, start + nbytes)
            return bytes(self.view(name, start, stop - start)) if start < stop else b""
        text = self._text(name)
        return text[start:] if nbytes is None else text[start : start + nbytes]

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        if name in self._files:
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
        file = self._files.get(name)
        if file is None:
            raise StorageMissingError(f"{URL} does not have {name} as memory")
        if start + nbytes > file.nbytes:
            raise CorruptError(f"{URL}/{name} ends before byte {start + nbytes}")
        return memoryview(file.mapped()).cast("B")[start : start + nbytes].toreadonly()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = [ObjectInfo(name, len(text)) for name, text in self._texts.items()]
        found += [ObjectInfo(file.name, file.nbytes) for file in self._files.values()]
        return iter([item for item in found if item.name.startswith(prefix)])

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:  # noqa: ARG002
        raise StorageReadOnlyError(f"{URL} is not written by this process")

    def delete(self, *names: str) -> None:  # noqa: ARG002
        raise StorageReadOnlyError(f"{URL} is not written by this process")

    def sweep(self) -> int:
        return 0

    def close(self) -> None:
        """Unmap it, and give up the memory. Idempotent."""
        for file in self._files.values():
            file.close()

    def _text(self, name: str) -> bytes:
        try:
            return self._texts[name]
        except KeyError as err:
            raise StorageMissingError(f"{URL} does not have {name}") from err


class MemoryPlace:
    """A snapshot in memory, to be restored from.

    Args:
        root_url: of the run.
        snapshot, step: its id and its step.
        storage: where it is.
        ranks: how many writers hold it.

    Attributes:
        repository: for `restore.load`, as the nearest place.
    """

    def __init__(self, root_url: str, snapshot: str, step: int, storage: MemoryStorage, ranks: int = 1) -> None:
        self._root_url = root_url
        self._ranks = ranks
        self._released = False
        self.snapshot = snapshot
        self.step = step
        self._storage = storage
        self.repository = Repository(storage)

    def release(self, *, bye: bool = True) -> None:
        """Give up the memory. Idempotent; never raises.

        Args:
            bye: tell the writer that it is not needed any more; a reader that only looks at the snapshot does not.
        """
        if self._released:
            return
        self._released = True
        self._storage.close()
        if not bye:
            return
        for rank in range(self._ranks):
            with suppress(WriterError, OSError):  # it lingers a little longer then
                request = {"what": control.BYE, "snapshot": self.snapshot}
                reply = control.ask(self._root_url, request, BYE_SECONDS, rank)
                for fd in reply.fds if reply is not None else ():
                    os.close(fd)


def answers(root_url: str, rank: int = 0) -> bool:
    """Whether there is a writer on this machine that can be asked for what it holds, which may take it long to say.

    Raises:
        WaitTimeoutError: it does not even say who it is, within `KNOCK_SECONDS`.
    """
    try:
        reply = control.ask(root_url, {"what": control.STATUS}, KNOCK_SECONDS, rank)
    except WaitTimeoutError:
        raise
    except (WriterError, OSError):
        return False
    return reply is not None


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
        body, file = reply.body, shared_file(reply)
        manifest = {names.manifest_name(str(body["snapshot"])): str(body["manifest"]).encode()}
        storage = MemoryStorage({names.RECORD: str(body["record"]).encode(), **manifest}, [file], beat_of(reply))
        return MemoryPlace(root_url, str(body["snapshot"]), int(body["step"]), storage)
    except (LookupError, TypeError, ValueError, AttributeError, OSError, CorruptError):
        for fd in reply.fds:
            os.close(fd)
        return None


def is_held(root_url: str, timeout: float) -> bool:
    """Whether the writer of a dead trainer on this machine holds a snapshot of the run, be it one that `attach` cannot
    have, such as a rank's share: it is about to make it durable.
    """
    try:
        reply = control.ask(root_url, {"what": control.HELD}, timeout)
    except (WriterError, OSError):
        return False
    return reply is not None and bool(reply.body.get("held"))


def shared_file(reply: Received) -> SharedFile:
    """What a writer offers with its reply to `control.SNAPSHOT`; owns its descriptor.

    Raises:
        LookupError, ValueError, TypeError, CorruptError: it offers nothing that is of use.
    """
    if reply.body.get("snapshot") is None or not reply.fds:
        raise LookupError("nothing is offered")
    return SharedFile(str(reply.body["file"]), reply.fds[0], int(reply.body["nbytes"]))


def beat_of(reply: Received) -> Beat | None:
    """How far the trainer was that the writer worked for."""
    said = reply.body["beat"]
    return None if said is None else Beat(int(said["step"]), float(said["instant_monotonic"]))


def address_of(view: memoryview) -> int:
    """Where in memory `view` begins, be it writable or not."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def own_memory(nbytes: int, beside: int) -> tuple[int, memoryview]:
    """Memory of this process for a share that is not on this machine: its descriptor, and its bytes.

    Args:
        beside: ranks of this machine that need as much at the same time.

    Raises:
        WriterError: the machine has too little.
        OSError: the system refuses.
    """
    room = host_memory.look()
    if room is not None and nbytes * beside > room.nbytes // 2:
        raise WriterError(f"too little memory for a share of another machine: {nbytes} bytes for each rank here")
    fd = memory_file(nbytes)
    try:
        return fd, shared_bytes(fd, nbytes, writable=True)
    except OSError:
        os.close(fd)
        raise
