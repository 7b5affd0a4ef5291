"""The connections between the writers of several machines.

A share is kept for a partner, verified, and given to the restarted training.

One TCP connection carries one request after the other, in frames: an 8-byte little-endian length, so many bytes, and
a tag. A message is a frame of JSON; one with `nbytes` is followed by so many bytes of a data file, slice by slice.
Before anything else both ends prove that they know the secret that the ranks have agreed on, in four frames of fixed
size; until then nothing that the other end says is looked into. The tag is an HMAC-SHA256 of the place of the frame in
its direction, its length, its kind and its bytes, with a key of that connection and direction. Nothing is encrypted.

| `what`     | carries                                                          | reply |
|---|---|---|
| `add`      | a `PeerShare`; `digest` of a chunk of it, and the chunk          | `ok` when it is whole; else `why` |
| `snapshot` | `snapshot`                                                       | as `control`, and the file |
| `parity`   | `snapshot`                                                       | as `control`, and the parity |
| `mirrored` | `rank`, `snapshot`                                               | `ok` |
| `moved`    | `rank`, `host`, `port`: of the writer that has taken its place   | `ok` |
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ckpt_engine.errors import CorruptError, WriterError
from ckpt_engine.observe.number_types import Size
from ckpt_engine.store.container import digest
from ckpt_engine.writer import part_records
from ckpt_engine.writer.channel import decode, encode
from ckpt_engine.writer.part_records import PartRecord

SECONDS = 30.0
"""How long the other end may take for anything it has to do next."""
HANDSHAKE_SECONDS = 10.0
"""How long both proofs may take together."""
SLICE_BYTES = 1 << 20
"""Of a data file in one frame."""
STRANGERS = 64
"""So many connections may be without a proof at the same time; the next one takes the place of one of them."""
_TRIES = 3
_LENGTH = struct.Struct("<Q")
_PLACE = struct.Struct("<QQ")
_HELLO = b"ckpt-2\r\n"
_NUMBER_BYTES = 32
_PROOF_BYTES = 32
_TAG_BYTES = 16
_MESSAGE, _DATA = b"m", b"d"
_TEXT_BYTES = 256 << 20
_CONNECTIONS = 64
_BACKLOG = 1024
_MOST_CONNECTIONS = 512
"""Each takes a descriptor, of which a process has 1024 on most systems, and the writer needs others."""
_IDLE_SECONDS = 3600.0
_AGAIN_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class PeerShare:
    """A rank's share of a snapshot in memory.

    Args:
        part: its part record.
        record: of the run.
        file: name of the data file.
        nbytes: bytes of the data file.
    """

    rank: Size
    snapshot: str
    part: str
    record: str
    file: str
    nbytes: Size

    def decoded(self) -> PartRecord:
        """Its part record.

        Raises:
            FormatError: it is none, or that of another share.
        """
        part = part_records.decode(self.part.encode(), f"the share of rank {self.rank}")
        if (part.rank, part.manifest.info.id) != (self.rank, self.snapshot):
            raise CorruptError(f"the share of rank {self.rank} is of rank {part.rank} and of {part.manifest.info.id}")
        return part


def verify(share: PeerShare, image: memoryview) -> None:
    """Compare a share's bytes with the digests of its part record.

    Raises:
        FormatError: they are not what was sent.
    """
    for name, entry in share.decoded().manifest.entries.items():
        for piece in entry.pieces:
            if digest(image[piece.offset : piece.offset + piece.nbytes]) != piece.digest:
                raise CorruptError(f"{name!r} of the share of rank {share.rank} does not match its digest")


@dataclass(eq=False)
class _Seal:
    """Makes the tags of one direction of a connection: each is good for one frame, at one place."""

    _key: bytes
    _count: int = field(default=0, init=False)

    def tag(self, kind: bytes, body: bytes | memoryview) -> bytes:
        """Of the next frame."""
        found = hmac.new(self._key, _PLACE.pack(self._count, len(body)) + kind, hashlib.sha256)
        found.update(body)
        self._count += 1
        return found.digest()[:_TAG_BYTES]


class PeerConnection:
    """One end of a connection. One thread; every wait ends after `SECONDS` without progress.

    Raises:
        OSError, WriterError: from every method: the other end is gone, hangs, or is not our writer.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone says nothing
        self._sock = sock
        self._deadline: float | None = None
        self._sends = self._receives = _Seal(b"")

    def prove(self, secret: str, *, answers: bool) -> None:
        """Both ends show that they know `secret`, each for a number that the other has drawn. First of all.

        It takes `HANDSHAKE_SECONDS` at most, however little comes at a time. Who answers says nothing of the secret
        before the other end has shown that it knows it.
        """
        self._deadline = time.monotonic() + HANDSHAKE_SECONDS
        mine = os.urandom(_NUMBER_BYTES)
        hello = bytearray(len(_HELLO) + _NUMBER_BYTES)
        if not answers:
            self._sock.sendall(_HELLO + mine)
        self._take(memoryview(hello))
        if not hello.startswith(_HELLO):
            raise WriterError("what connects is no writer")
        if answers:
            self._sock.sendall(_HELLO + mine)
        theirs = bytes(hello[len(_HELLO) :])
        numbers = theirs + mine if answers else mine + theirs

        def made(what: str) -> bytes:
            return hmac.digest(secret.encode(), what.encode() + numbers, "sha256")

        # The role is part of it: our own answer is of no use to the other end.
        roles = ("server", "client") if answers else ("client", "server")
        proof = bytearray(_PROOF_BYTES)
        if not answers:
            self._sock.sendall(made(roles[0]))
        self._take(memoryview(proof))
        if not hmac.compare_digest(proof, made(roles[1])):
            raise WriterError("somebody without the ranks' secret has connected")
        if answers:
            self._sock.sendall(made(roles[0]))
        self._sends, self._receives = (_Seal(made(f"{role} frames")) for role in roles)
        self._deadline = None
        self._sock.settimeout(SECONDS)

    def wait(self, seconds: float) -> None:
        """How long the next frame may take to begin; it continues with `SECONDS`."""
        self._sock.settimeout(seconds)
        if not self._sock.recv(1, socket.MSG_PEEK):
            raise ConnectionResetError("the other writer hung up")
        self._sock.settimeout(SECONDS)

    def send(self, body: Mapping[str, Any]) -> None:
        """Send a message."""
        self._send(_MESSAGE, encode(body))

    def receive(self, most_bytes: int = _TEXT_BYTES) -> dict[str, Any]:
        """The next message."""
        nbytes = self._announced(most_bytes)
        data = bytearray()
        while len(data) < nbytes:  # what is only announced takes no memory
            part = bytearray(min(SLICE_BYTES, nbytes - len(data)))
            self._take(memoryview(part))
            data += part
        self._check(_MESSAGE, memoryview(data))
        return decode(bytes(data))

    def send_file(self, image: memoryview, pace: Callable[[int], object] = lambda _: None) -> None:
        """Send a data file; `pace` is called before each slice."""
        for at in range(0, image.nbytes, SLICE_BYTES):
            slice_ = image[at : at + SLICE_BYTES]
            pace(slice_.nbytes)
            self._send(_DATA, slice_)

    def fill(self, out: memoryview) -> None:
        """Receive as many bytes of a data file as `out` has: all of it, or a number of whole slices."""
        at = 0
        while at < out.nbytes:
            part = out[at : at + self._announced(out.nbytes - at)]
            self._take(part)
            self._check(_DATA, part)
            at += part.nbytes

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def _send(self, kind: bytes, body: bytes | memoryview) -> None:
        blocks = [memoryview(one) for one in (_LENGTH.pack(len(body)), body, self._sends.tag(kind, body))]
        sent = self._sock.sendmsg(blocks)
        for block in blocks:
            if sent < block.nbytes:
                self._sock.sendall(block[sent:])
            sent = max(0, sent - block.nbytes)

    def _announced(self, most_bytes: int) -> int:
        """The length of the next frame."""
        head = bytearray(_LENGTH.size)
        self._take(memoryview(head))
        nbytes = int(_LENGTH.unpack(head)[0])
        if not 0 < nbytes <= most_bytes:
            raise WriterError(f"a frame of {nbytes} bytes announced between writers")
        return nbytes

    def _check(self, kind: bytes, body: memoryview) -> None:
        tag = bytearray(_TAG_BYTES)
        self._take(memoryview(tag))
        if not hmac.compare_digest(tag, self._receives.tag(kind, body)):
            raise WriterError("what came from another writer was changed on the way")

    def _take(self, out: memoryview) -> None:
        at = 0
        while at < out.nbytes:
            if self._deadline is not None:
                left = self._deadline - time.monotonic()
                if left <= 0.0:
                    raise WriterError("the other writer does not prove in time that it is one")
                self._sock.settimeout(left)
            count = self._sock.recv_into(out[at : at + SLICE_BYTES])
            if count == 0:
                raise ConnectionResetError("the other writer hung up")
            at += count


def connect(host: str, port: int, secret: str) -> PeerConnection:
    """A connection to another writer; raises as `PeerConnection`.

    One that is hung up on before both have proved themselves tries again: strangers may have been in the way.
    """
    for left in reversed(range(_TRIES)):
        line = PeerConnection(socket.create_connection((host, port), SECONDS))
        try:
            line.prove(secret, answers=False)
            return line
        except BaseException as err:
            line.close()
            if not (left and isinstance(err, ConnectionError)):
                raise
    raise AssertionError("unreachable")


class Server:
    """Answers other writers, each connection on a thread of its own.

    Who has not proved to know the secret gets little: `HANDSHAKE_SECONDS`, and one of `STRANGERS` places. Where all are
    taken the next one has that of the oldest one of the address that has the most of them.

    Args:
        host: the address to listen at.
        secret: of the ranks.
        answer: takes a request and its connection, from which it reads what follows, and replies there.
        clients: so many stay connected.

    Raises:
        OSError: no port is to be had there.

    Attributes:
        closed: set once `close` was called.
    """

    def __init__(
        self, host: str, secret: str, answer: Callable[[dict[str, Any], PeerConnection], None], clients: int = 0
    ) -> None:
        self._secret = secret
        self._answer = answer
        self._room = min(_MOST_CONNECTIONS, _CONNECTIONS + clients)
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, str] = {}
        self._serving: set[socket.socket] = set()
        self.closed = threading.Event()
        family, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(where, family=family, backlog=_BACKLOG)
        self.host, self.port = (str(host), int(self._listener.getsockname()[1]))
        self._thread = threading.Thread(target=self._run, name="ckpt-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections, and end those there are. Idempotent."""
        self.closed.set()
        with self._lock:
            for sock in [self._listener, *self._strangers, *self._serving]:
                _wake(sock)
        self._thread.join(SECONDS)

    def _run(self) -> None:
        while True:
            try:
                sock, (address, *_) = self._listener.accept()
            except OSError:
                if self.closed.wait(_AGAIN_SECONDS):
                    self._listener.close()
                    return
                continue  # the process has no descriptor left for now, or the other end has gone again
            with self._lock:
                if len(self._strangers) >= STRANGERS:
                    (most, _), *_ = Counter(self._strangers.values()).most_common(1)
                    oldest = next(one for one, where in self._strangers.items() if where == most)
                    del self._strangers[oldest]
                    _wake(oldest)
                self._strangers[sock] = str(address)
            try:
                threading.Thread(target=self._serve, args=(sock,), name="ckpt-peer", daemon=True).start()
            except RuntimeError:  # the system gives no thread for now
                with self._lock:
                    self._strangers.pop(sock, None)
                sock.close()

    def _admit(self, sock: socket.socket) -> bool:
        """It is one of the ranks' writers; whether there is room for it."""
        with self._lock:
            if self._strangers.pop(sock, None) is None or len(self._serving) >= self._room or self.closed.is_set():
                return False
            self._serving.add(sock)
            return True

    def _serve(self, sock: socket.socket) -> None:
        try:
            line = PeerConnection(sock)
            line.prove(self._secret, answers=True)
            if not self._admit(sock):
                return
            while True:
                line.wait(_IDLE_SECONDS)  # between two requests the training may take its time
                self._answer(line.receive(), line)
        except Exception:  # noqa: BLE001 - whatever it says, it finds out by the end of its connection
            return
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
                self._serving.discard(sock)
                sock.close()


def _wake(sock: socket.socket) -> None:
    """End a connection whose thread closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
