"""Serves the folder of one node to the ranks of other nodes, read-only.

The connection is that of `writer.peer_service`: both ends prove that they know a secret which the ranks have agreed on.

| `what`     | carries                     | reply |
|---|---|---|
| `manifest` | `snapshot`                  | `files`: the sizes of its data files, by name; `nbytes`, the bytes |
| `read`     | `name`, `start`, `nbytes`   | `nbytes`, the bytes of a data file |

Where it cannot be done the reply is `error`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from typing import Any

from ckpt_engine.copy.job import ErrorRecord
from ckpt_engine.errors import (
    CkptError,
    CorruptError,
    StorageError,
    WriterError,
)
from ckpt_engine.store import manifest_codec
from ckpt_engine.store import names as layout
from ckpt_engine.store.storage.base import Folder
from ckpt_engine.store.storage.retries import GrowingPauses
from ckpt_engine.undo import on_failure
from ckpt_engine.writer.peer_service import SECONDS, PeerConnection, Server, connect

LINES = 4
"""Most connections of a rank to each leader: requests beyond wait for each other."""
ALL_LINES = 448
"""Of all ranks to one leader: what `writer.peer_service` takes, and some to spare."""
MOST_BYTES = 4 << 20
"""Of one request: a leader has so much in memory for each of those that it answers."""
AT_ONCE = 16
"""Requests that a leader answers at the same time."""
PATIENCE_SECONDS = 30.0
"""How long a rank asks again where it is hung up on: a leader may have too many guests."""
_PAUSES = GrowingPauses(0.05, 2.0)


def lines(ranks: int) -> int:
    """How many connections each of so many ranks may have to a leader."""
    return max(1, min(LINES, ALL_LINES // ranks))


def manifest_at(root: Folder, snapshot: str) -> tuple[bytes, dict[str, int]]:
    """The manifest that a root has of a snapshot, and the sizes of those data files that are there.

    Raises:
        StorageMissingError, FormatError, StorageError: it cannot be used.
    """
    data = root.get(layout.manifest_name(snapshot))
    names = {file.name for file in manifest_codec.decode(data).files}
    return data, {item.name: item.nbytes for item in root.list(layout.DATA) if item.name in names}


class FolderServer(Server):
    """Serves a root until it is closed.

    Args:
        host: where those who may ask reach this machine.
        secret: of theirs.
        ranks: how many may.

    Raises:
        OSError: no port is to be had.
    """

    def __init__(self, root: Folder, host: str, secret: str, ranks: int) -> None:
        self._root = root
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(host, secret, self._lend, clients=lines(ranks) * ranks)

    def _lend(self, request: dict[str, Any], line: PeerConnection) -> None:
        if not self._turns.acquire(timeout=SECONDS):
            raise WriterError("too many ask at once")  # hangs up: it asks again
        try:
            try:
                head, data = self._found(request)
            except CkptError as err:
                line.send({"error": asdict(ErrorRecord.of(err))})
                return
            line.send({**head, "nbytes": data.nbytes})
            line.send_file(data)
        finally:
            self._turns.release()

    def _found(self, request: dict[str, Any]) -> tuple[dict[str, Any], memoryview]:
        if request["what"] == "manifest":
            data, files = manifest_at(self._root, str(request["snapshot"]))
            return {"files": files}, memoryview(data)
        name, start, nbytes = str(request["name"]), int(request["start"]), int(request["nbytes"])
        if layout.data_owner(name) is None or start < 0 or not 0 <= nbytes <= MOST_BYTES:
            raise StorageError(f"{nbytes} bytes of {name} from {start} on are not lent")
        out = memoryview(bytearray(nbytes))
        self._root.get_into(name, start, out)
        return {}, out


class FolderClient:
    """A rank's side of another place's lender. Thread safe; connects when it is first asked.

    Args:
        leader: of that place, for messages.
        ranks: how many may ask there.
    """

    def __init__(self, host: str, port: int, secret: str, leader: int, ranks: int) -> None:
        self.url = f"the folder of rank {leader} at {host}"
        self.gone: str | None = None
        """Why it does not answer; it is not asked again then."""
        self._where = (host, port, secret)
        self._room = threading.BoundedSemaphore(lines(ranks))
        self._keeps = ranks <= ALL_LINES
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._idle: list[PeerConnection] = []

    def manifest(self, snapshot: str) -> tuple[bytes, dict[str, int]]:
        """As `manifest_at` there.

        Raises:
            StorageError: it does not answer. And as `manifest_at`.
        """
        head, data = self._ask({"what": "manifest", "snapshot": snapshot})
        return bytes(data), {str(name): int(nbytes) for name, nbytes in head["files"].items()}

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Storage.get_into`."""
        out = out.cast("B")
        for at in range(0, max(1, out.nbytes), MOST_BYTES):
            part = out[at : at + MOST_BYTES]
            self._ask({"what": "read", "name": name, "start": start + at, "nbytes": part.nbytes}, part)

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def _ask(self, request: dict[str, Any], out: memoryview | None = None) -> tuple[dict[str, Any], memoryview]:
        """The reply to a request, and its bytes, in `out` if that is given; asked again where a connection breaks."""
        pause = _PAUSES.first_seconds
        with self._room:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while True:
                if self.gone is not None:
                    raise StorageError(self.gone)
                try:
                    head, data = self._once(request, out)
                    break
                except (OSError, WriterError) as err:
                    # No server listens any more: waiting does not change that.
                    ended = isinstance(err, ConnectionRefusedError) or time.monotonic() + pause > deadline
                    if ended or self._closed.wait(pause):
                        self.gone = f"{self.url} does not answer on port {self._where[1]}: {err}"
                        raise StorageError(self.gone) from err
                pause = _PAUSES.after(pause)
        if "error" in head:
            raise ErrorRecord(**head["error"]).exception()
        return head, data

    def _once(self, request: dict[str, Any], out: memoryview | None) -> tuple[dict[str, Any], memoryview]:
        with self._lock:
            line = self._idle.pop() if self._idle else None
        line = line or connect(*self._where)
        with on_failure(line.close):
            line.send(request)
            head = line.receive()
            nbytes = int(head.get("nbytes", 0))  # no bytes follow an error
            data = memoryview(bytearray(nbytes)) if out is None or "error" in head else out
            if data.nbytes != nbytes:
                raise CorruptError(f"{self.url} sends {nbytes} bytes of {request['name']} instead of {data.nbytes}")
            line.fill(data)
        if self._keeps:
            with self._lock:
                self._idle.append(line)
        else:
            line.close()
        return head, data
