"""Shares between the writers of several machines: kept for a partner, and given to whoever restarts the training.

One TCP connection carries one request after the other. A message is an 8-byte little-endian length and that many bytes
of JSON; one with `nbytes` is followed by so many bytes of a data file. Before anything else both ends prove that they
know the secret that the ranks have agreed on. Nothing is encrypted.

| `what`     | carries                                                          | reply |
|---|---|---|
| `keep`     | `rank`, `snapshot`, `part`, `record`, `file`, `nbytes`, the file | `ok` when it is whole; else `why` |
| `add`      | the same but the file; `digest` of a chunk of it, and the chunk  | `ok` when it is whole; else `why` |
| `give`     | `rank`, `snapshot`                                               | as `control.SNAPSHOT`, and the file |
| `parity`   | `snapshot`                                                       | as `control.PARITY`, and the parity |
| `mirrored` | `rank`, `snapshot`                                               | `ok` |
| `moved`    | `rank`, `host`, `port`: of the writer that has taken its place   | `ok` |
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt_engine.errors import CkptError, CorruptError, WriterError
from ckpt_engine.persist import parts
from ckpt_engine.persist.parts import Part
from ckpt_engine.store.digest import digest

SECONDS = 30.0
"""How long the other end may take for anything it has to do next."""
_LENGTH = struct.Struct("<Q")
_TEXT_BYTES = 256 << 20
_SLICE_BYTES = 1 << 20
_CONNECTIONS = 64
_MOST_CONNECTIONS = 512
"""Each takes a descriptor, of which a process has 1024 on most systems, and the writer needs others."""
_IDLE_SECONDS = 3600.0
_AGAIN_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a snapshot in memory.

    Args:
        part: its part record.
        record: of the run.
        file: name of the data file.
        fd: a descriptor of the memory; whoever has the value closes it.
        nbytes: bytes of the data file.
    """

    rank: int
    snapshot: str
    part: str
    record: str
    file: str
    fd: int
    nbytes: int

    @classmethod
    def told(cls, said: Mapping[str, Any], fd: int) -> Share:
        """The inverse of `described`, in memory that `fd` is a descriptor of; -1: in none.

        Raises:
            LookupError, TypeError, ValueError: `said` is no description.
        """
        return cls(
            int(said["rank"]),
            str(said["snapshot"]),
            str(said["part"]),
            str(said["record"]),
            str(said["file"]),
            fd,
            int(said["nbytes"]),
        )

    def decoded(self) -> Part:
        """Its part record.

        Raises:
            FormatError: it is none, or that of another share.
        """
        part = parts.decode(self.part.encode(), f"the share of rank {self.rank}")
        if (part.rank, part.manifest.info.id) != (self.rank, self.snapshot):
            raise CorruptError(f"the share of rank {self.rank} is of rank {part.rank} and of {part.manifest.info.id}")
        return part

    def described(self) -> dict[str, Any]:
        """What a message says of it."""
        return {
            "rank": self.rank,
            "snapshot": self.snapshot,
            "part": self.part,
            "record": self.record,
            "file": self.file,
            "nbytes": self.nbytes,
        }


def verify(share: Share, image: memoryview) -> None:
    """Compare a share's bytes with the digests of its part record.

    Raises:
        FormatError: they are not what was sent.
    """
    for name, entry in share.decoded().manifest.entries.items():
        for piece in entry.pieces:
            if digest(image[piece.offset : piece.offset + piece.nbytes]) != piece.digest:
                raise CorruptError(f"{name!r} of the share of rank {share.rank} does not match its digest")


class Line:
    """One end of a connection. One thread; every wait ends after `SECONDS` without progress.

    Raises:
        OSError, WriterError: from every method: the other end is gone, hangs, or is not one of ours.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone says nothing
        self._sock = sock

    def prove(self, secret: str, *, answers: bool) -> None:
        """Both ends show that they know `secret`, each for a number that the other has drawn."""
        mine = secrets.token_hex(16)
        self.send({"number": mine})
        theirs = str(self.receive(1024).get("number"))
        # The role is part of it: nobody can hand us back our own answer.
        self.send({"proof": _proof(secret, theirs, answers=answers)})
        proof = str(self.receive(1024).get("proof"))
        if not hmac.compare_digest(proof, _proof(secret, mine, answers=not answers)):
            raise WriterError("somebody without the ranks' secret has connected")

    def send(self, body: Mapping[str, Any]) -> None:
        """Send a message."""
        data = json.dumps(body).encode()
        self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, most_bytes: int = _TEXT_BYTES) -> dict[str, Any]:
        """The next message."""
        head = bytearray(_LENGTH.size)
        self.fill(memoryview(head))
        (nbytes,) = _LENGTH.unpack(head)
        if nbytes > most_bytes:
            raise WriterError(f"a message of {nbytes} bytes announced between writers")
        data = bytearray(nbytes)
        self.fill(memoryview(data))
        try:
            body = json.loads(bytes(data))
        except ValueError as err:
            raise WriterError(f"no message came from another writer: {err}") from err
        if not isinstance(body, dict):
            raise WriterError("no message came from another writer")
        return body

    def send_file(self, image: memoryview, pace: Callable[[int], object] = lambda _: None) -> None:
        """Send a data file; `pace` is told of each slice before."""
        for at in range(0, image.nbytes, _SLICE_BYTES):
            slice_ = image[at : at + _SLICE_BYTES]
            pace(slice_.nbytes)
            self._sock.sendall(slice_)

    def fill(self, out: memoryview) -> None:
        """Receive as many bytes as `out` has."""
        at = 0
        while at < out.nbytes:
            count = self._sock.recv_into(out[at : at + _SLICE_BYTES])
            if count == 0:
                raise WriterError("the other writer hung up")
            at += count

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()


def _proof(secret: str, number: str, *, answers: bool) -> str:
    text = f"{'server' if answers else 'client'}/{number}"
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def connect(host: str, port: int, secret: str) -> Line:
    """A connection to another writer; raises as `Line`."""
    sock = socket.create_connection((host, port), SECONDS)
    line = Line(sock)
    try:
        line.prove(secret, answers=False)
    except BaseException:
        line.close()
        raise
    return line


class Server:
    """Answers other writers, each connection on a thread of its own.

    Args:
        secret: of the ranks.
        answer: takes a request and its connection, from which it reads what follows, and replies there.
        clients: so many stay connected.
    """

    def __init__(self, secret: str, answer: Callable[[dict[str, Any], Line], None], clients: int = 0) -> None:
        self._secret = secret
        self._answer = answer
        self._room = threading.BoundedSemaphore(min(_MOST_CONNECTIONS, _CONNECTIONS + clients))
        self._lock = threading.Lock()
        self._serving: set[socket.socket] = set()
        self._closed = threading.Event()
        self._listener = socket.create_server(("", 0), backlog=_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="ckpt-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections, and end those there are. Idempotent."""
        self._closed.set()
        with self._lock:
            found = [self._listener, *self._serving]
        for sock in found:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        self._thread.join(SECONDS)

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(_AGAIN_SECONDS):
                    self._listener.close()
                    return
                continue  # the process has no descriptor left for now, or the other end has gone again
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="ckpt-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        line = Line(sock)
        with self._lock:
            self._serving.add(sock)
        try:
            line.prove(self._secret, answers=True)
            while True:
                sock.settimeout(_IDLE_SECONDS)  # between two requests the training may take its time
                request = line.receive()
                sock.settimeout(SECONDS)
                self._answer(request, line)
        except (OSError, CkptError, LookupError, TypeError, ValueError):
            return  # it is gone, or not one of ours: it finds out by the end of the connection
        finally:
            with self._lock:
                self._serving.discard(sock)
            line.close()
            self._room.release()


def memory_file(nbytes: int) -> int:
    """A descriptor of new memory.

    Raises:
        OSError: there is none.
    """
    fd = os.memfd_create("ckpt-share", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(1, nbytes))
    return fd
