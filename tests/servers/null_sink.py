"""A server that takes S3 uploads as fast as it can read them and keeps nothing: how fast can the client go at all."""

from __future__ import annotations

import socket
import threading
from typing import Self

_BUFFER_BYTES = 1 << 20


class NullSink:
    """Answers every request with success; `taken_bytes` counts the bodies."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.taken_bytes = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="null-sink", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        buffer = bytearray(_BUFFER_BYTES)
        pending = b""
        with client:
            while True:
                while b"\r\n\r\n" not in pending:
                    data = client.recv(1 << 16)
                    if not data:
                        return
                    pending += data
                head, _, pending = pending.partition(b"\r\n\r\n")
                left = _length(head)
                taken = pending[:left]
                pending = pending[len(taken) :]
                left -= len(taken)
                while left > 0:
                    got = client.recv_into(buffer, min(left, len(buffer)))
                    if not got:
                        return
                    left -= got
                with self._lock:
                    self.taken_bytes += _length(head)
                client.sendall(_answer(head.split(b"\r\n")[0]))


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _answer(line: bytes) -> bytes:
    if line.startswith(b"HEAD"):
        return b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n"
    body = b""
    if line.startswith(b"POST") and b"uploads" in line:
        body = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
    elif line.startswith(b"POST"):
        body = b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
    elif line.startswith(b"GET"):
        body = b"<ListMultipartUploadsResult></ListMultipartUploadsResult>"
    return b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: %d\r\n\r\n' % len(body) + body
