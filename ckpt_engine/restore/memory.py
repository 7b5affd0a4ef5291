"""Restores from the memory of the writer of a dead trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ckpt_engine.copy import memory_limits
from ckpt_engine.copy.host_memory import shared_bytes, shared_memory
from ckpt_engine.errors import (
    CkptError,
    CorruptError,
    StorageMissingError,
    WaitTimeoutError,
    WriterError,
)
from ckpt_engine.store import names
from ckpt_engine.store.storage.base import Capabilities, ObjectInfo, ReadOnlyStorage
from ckpt_engine.writer import control
from ckpt_engine.writer.channel import Received, close_all
from ckpt_engine.writer.pulse import Heartbeat

URL = "memory"
"""How the place is called."""
KNOCK_SECONDS = 5.0
"""How long a writer may take to say that it is there."""


class MemoryStorage(ReadOnlyStorage):
    """One snapshot in the memory of other processes, read-only; see `Storage`. Nothing is copied before it is read.

    Args:
        texts: the run's record and the manifest, by name.
        files: descriptor and size of its data files in shared memory, by name; duplicates of the descriptors are kept,
            and the memory stays mapped as long as anything refers to it.
        beat: how far the trainer was when it died, as far as it said.

    Raises:
        CorruptError, OSError: as `shared_bytes`.
    """

    url = URL

    def __init__(
        self, texts: Mapping[str, bytes], files: Mapping[str, tuple[int, int]], beat: Heartbeat | None = None
    ) -> None:
        self._beat = beat
        self._objects = {name: memoryview(text) for name, text in texts.items()} | {
            name: shared_bytes(*file, writable=False) for name, file in files.items()
        }
        self._fds = {name: os.dup(fd) for name, (fd, _) in files.items()}

    @property
    def capabilities(self) -> Capabilities:
        step = self._beat.step if self._beat is not None else None
        return Capabilities(view=self.view, cheap_reads=True, slow_answers=False, died_at_step=step)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        return bytes(self._object(name)[start : None if nbytes is None else start + nbytes])

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        view = self.view(name, start, out.nbytes)
        # Mapped memory would be entered page by page into the tables of this process, and be taken out again.
        if name not in self._fds or os.preadv(self._fds[name], [out], start) < out.nbytes:
            out[:] = view

    def view(self, name: str, start: int, nbytes: int) -> memoryview:
        """Bytes of an object where they are.

        Raises:
            StorageMissingError
            CorruptError: it ends too early.
        """
        found = self._object(name)
        if start + nbytes > found.nbytes:
            raise CorruptError(f"{URL}/{name} ends before byte {start + nbytes}")
        return found[start : start + nbytes].toreadonly()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([ObjectInfo(name, one.nbytes) for name, one in self._objects.items() if name.startswith(prefix)])

    def close(self) -> None:
        """Give up the memory. Idempotent."""
        self._objects.clear()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _object(self, name: str) -> memoryview:
        try:
            return self._objects[name]
        except KeyError as err:
            raise StorageMissingError(f"{URL} does not have {name}") from err


def answers(root_url: str, rank: int = 0) -> bool:
    """Whether there is a writer on this machine that can be asked for what it holds, which may take it long to say.

    Raises:
        WaitTimeoutError: it does not even say who it is, within `KNOCK_SECONDS`.
    """
    try:
        reply = control.ask(root_url, {"what": control.Question.STATUS}, KNOCK_SECONDS, rank)
    except WaitTimeoutError:
        raise
    except (WriterError, OSError):
        return False
    return reply is not None


def attach(root_url: str, timeout: float) -> MemoryStorage | None:
    """The snapshot that the writer of a dead trainer holds of the run at `root_url`, on this machine, for this user.

    Args:
        timeout: seconds to wait for the writer; it answers at once, but for the digests of the snapshot.

    Returns:
        None: there is none, or its trainer is alive, or the writer does not answer. It MUST be closed.
    """
    reply = ask_writer(root_url, {"what": control.Question.SNAPSHOT}, 0, timeout)
    if reply is None:
        return None
    try:
        body = reply.body
        texts = {
            names.RECORD: str(body["record"]).encode(),
            names.manifest_name(str(body["snapshot"])): str(body["manifest"]).encode(),
        }
        return MemoryStorage(texts, shared_file(reply), beat_of(reply))
    except (LookupError, TypeError, ValueError, AttributeError, OSError, CorruptError):
        return None
    finally:
        close_all(reply.fds)


def is_held(root_url: str, timeout: float) -> bool:
    """Whether the writer of a dead trainer on this machine holds a snapshot of the run, be it one that `attach` cannot
    have, such as a rank's share: it is about to make it durable.
    """
    reply = ask_writer(root_url, {"what": control.Question.HELD}, 0, timeout)
    return reply is not None and bool(reply.body.get("held"))


def shared_file(reply: Received) -> dict[str, tuple[int, int]]:
    """Descriptor and size of the data file that a writer offers with its reply to `SNAPSHOT`, by its name.

    Raises:
        LookupError, ValueError, TypeError: it offers nothing that is of use.
    """
    if reply.body.get("snapshot") is None or not reply.fds:
        raise LookupError("nothing is offered")
    return {str(reply.body["file"]): (reply.fds[0], int(reply.body["nbytes"]))}


def image_of(reply: Received) -> memoryview:
    """The memory that came with a reply, read-only."""
    return shared_bytes(reply.fds[0], int(reply.body["nbytes"]), writable=False)


def beat_of(reply: Received) -> Heartbeat | None:
    """How far the trainer was that the writer worked for."""
    said = reply.body["beat"]
    return None if said is None else Heartbeat(int(said["step"]), float(said["instant_monotonic"]))


def address_of(view: memoryview) -> int:
    """Where in memory `view` begins, be it writable or not."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def own_memory(nbytes: int, beside: int) -> tuple[int, memoryview]:
    """Memory of this process for a share that is not on this machine: its descriptor, and its bytes.

    Args:
        beside: ranks of this machine that need as much at the same time.

    Raises:
        WriterError: the machine has too little.
        StateError: the system refuses.
    """
    room = memory_limits.look()
    if room is not None and nbytes * beside > room.nbytes // 2:
        raise WriterError(f"too little memory for a share of another machine: {nbytes} bytes for each rank here")
    return shared_memory("ckpt-share", nbytes)


def ask_writer(root_url: str, request: dict[str, Any], writer: int, timeout: float) -> Received | None:
    """The reply of the writer of that rank; None: it does not answer."""
    try:
        return control.ask(root_url, request, max(0.1, timeout), writer)
    except (CkptError, OSError):
        return None
