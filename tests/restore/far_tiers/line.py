"""The line to a server, on loopback: it works, is slow, hangs, refuses, is dead or denies, at any moment."""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from typing import Self

WORKS, SLOW, HANGS, REFUSES, DEAD, DENIES = "works", "slow", "hangs", "refuses", "dead", "denies"
"""Dead: not even a connection is made, as behind a network that drops everything."""
STATES = (SLOW, HANGS, REFUSES, DEAD, DENIES)
SLOW_SECONDS = 0.5
"""Each answer comes so much later."""
_PIECE_BYTES = 64 << 10
_LOOK_SECONDS = 0.05
_BACKLOG = 64
_DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Line:
    """A proxy, with a thread per connection; `asked` is set when something arrives that gets no answer.

    Args:
        target: the server.
        port: where it listens.
    """

    def __init__(self, target: tuple[str, int], port: int) -> None:
        self._target = target
        self.port = port
        self._listener: socket.socket | None = None
        self._filling: list[socket.socket] = []
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._ended = False
        self.state = WORKS
        self.asked = threading.Event()
        self.url = f"http://127.0.0.1:{port}"
        self._listen(_BACKLOG)
        self._thread = threading.Thread(target=self._serve, name="line", daemon=True)
        self._thread.start()

    def become(self, state: str) -> None:
        """From now on. Refusing and dead lines lose their connections, a line that hangs keeps them in silence."""
        with self._lock:
            self.state = state
            if state in (REFUSES, DEAD):
                self._close_all()
            if state == DEAD:
                self._listen(0)
                self._fill()
            elif state != REFUSES and (self._listener is None or self._filling):
                self._close_all()
                self._listen(_BACKLOG)

    def close(self) -> None:
        """Of no use any more."""
        self._ended = True
        with self._lock:
            self.state = REFUSES
            self._close_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, backlog: int) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(backlog)
        self._listener = listener

    def _fill(self) -> None:
        """Make connections that the server never accepts: the kernel drops all further ones."""
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", self.port))
            self._filling.append(one)

    def _close_all(self) -> None:
        for one in [*self._filling, *self._open, *([self._listener] if self._listener else [])]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._filling, self._listener = [], None
        self._open.clear()

    def _serve(self) -> None:
        while not self._ended:
            with self._lock:
                listener = None if self.state in (REFUSES, DEAD) else self._listener
            if listener is None:
                time.sleep(_LOOK_SECONDS)
                continue
            with suppress(OSError, ValueError):
                if select.select([listener], [], [], _LOOK_SECONDS)[0]:
                    client, _ = listener.accept()
                    threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with suppress(OSError, ValueError):
            server = socket.create_connection(self._target, 10.0)
            with self._lock:
                self._open |= {client, server}
            asked = threading.Event()
            threading.Thread(target=self._pump, args=(server, client, asked, True), daemon=True).start()
            self._pump(client, server, asked, answers=False)

    def _pump(self, source: socket.socket, sink: socket.socket, asked: threading.Event, answers: bool) -> None:
        with suppress(OSError, ValueError):
            while data := source.recv(_PIECE_BYTES):
                state = self.state
                if state in (HANGS, REFUSES, DEAD):
                    self.asked.set()
                    while self.state == state and not self._ended:
                        time.sleep(_LOOK_SECONDS)
                    break
                if state == DENIES and not answers:
                    self.asked.set()
                    head = f"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: {len(_DENIED)}"
                    source.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + _DENIED)
                    break
                if not answers:
                    asked.set()
                elif asked.is_set():  # the first piece of an answer
                    asked.clear()
                    if state == SLOW:
                        time.sleep(SLOW_SECONDS)
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {source, sink}
        source.close()
