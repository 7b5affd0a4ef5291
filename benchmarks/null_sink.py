"""An S3 endpoint that takes uploads and keeps nothing: what remains of an upload's time is the client's own work.

It is a process of its own and leaves bodies in the kernel (`MSG_TRUNC`), so that it costs the client next to nothing.
Under TLS it does not decrypt them.
"""

from __future__ import annotations

import http.client
import itertools
import json
import mmap
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import xml.sax.saxutils
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

from benchmarks.tls_records import Records, make_certificate

START_SECONDS = 30.0
STOP_SECONDS = 10.0
TAKEN = "/.taken"
"""Asked for with GET: how many bytes of bodies have come so far. No bucket has such a name."""
_HEAD_BYTES = 1 << 16
_DISCARD_BYTES = 1 << 20
_SEALED = {"x-amz-server-side-encryption": "aws:kms"}
"""With this an ETag is no digest of the bytes, and no client takes it for a wrong one."""
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class NullSink:
    """The endpoint at `url`, as long as the context lasts.

    Args:
        tls: speak TLS 1.3.
        run: the command and its arguments after which the server is started, such as those that enter a namespace.
        host: where it listens.

    Attributes:
        certificate: of the file by which clients know it; empty without TLS.
    """

    def __init__(self, *, tls: bool = False, run: Sequence[str] = (), host: str = "127.0.0.1") -> None:
        self.url = self.certificate = ""
        self._tls = tls
        self._run = run
        self._host = host

    def __enter__(self) -> Self:
        root = Path(__file__).resolve().parent.parent
        self._folder = tempfile.TemporaryDirectory()
        if self._tls:
            self.certificate = str(make_certificate(Path(self._folder.name), self._host))
        self._process = subprocess.Popen(
            [*self._run, sys.executable, "-m", "benchmarks.null_sink", self._host, self.certificate],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        timer = threading.Timer(START_SECONDS, self._process.kill)
        timer.start()
        try:
            port = self._process.stdout.readline().strip()
        finally:
            timer.cancel()
        if not port:
            self.__exit__(None, None, None)
            raise RuntimeError("the null sink did not start")
        self.url = f"{'https' if self._tls else 'http'}://{self._host}:{int(port)}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._process:  # closes its standard input, on which it ends
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._folder.cleanup()

    def taken_bytes(self) -> int:
        """Bytes of bodies that have come so far."""
        at = urlsplit(self.url)
        connection = http.client.HTTPConnection(at.netloc, timeout=STOP_SECONDS)
        if self._tls:
            trusting = ssl.create_default_context(cafile=self.certificate)
            connection = http.client.HTTPSConnection(at.netloc, timeout=STOP_SECONDS, context=trusting)
        try:
            connection.request("GET", TAKEN)
            return int(json.loads(connection.getresponse().read()))
        finally:
            connection.close()


class _Server:
    """What all connections share: the sizes of objects and the bytes that came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, int] = {}
        self._uploads: dict[str, int] = {}
        self._ids = itertools.count(1)
        self._taken = 0

    def serve(self, connection: socket.socket, certificate: str) -> None:
        """Answer the requests of one connection until it ends."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pending = b""
        with connection:
            client = Records(connection, certificate) if certificate else _Plain(connection)
            while True:
                while b"\r\n\r\n" not in pending:
                    data = client.recv(_HEAD_BYTES)
                    if not data:
                        return
                    pending += data
                head, _, pending = pending.partition(b"\r\n\r\n")
                line, headers = _parsed(head)
                if "transfer-encoding" in headers:
                    client.sendall(b"HTTP/1.1 501 Not Implemented\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    return
                if headers.get("expect", "").lower() == "100-continue":
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                nbytes = int(headers.get("content-length", "0"))
                here = min(nbytes, len(pending))
                pending = pending[here:]
                if not client.discard(nbytes - here):
                    return
                client.sendall(self._answer(*line, nbytes))

    def _answer(self, method: str, target: str, nbytes: int) -> bytes:
        url = urlsplit(target)
        key, query = unquote(url.path), parse_qs(url.query, keep_blank_values=True)
        with self._lock:
            self._taken += nbytes if method == "PUT" else 0
            if target == TAKEN:
                return _response(200, str(self._taken))
            if method == "PUT":
                if "uploadId" in query:
                    self._uploads[query["uploadId"][0]] += nbytes
                else:
                    self._objects[key] = nbytes
                return _response(200, "", ETag=f'"{next(self._ids):032x}"', **_SEALED)
            if method == "POST":
                return self._multipart(key, query)
            if method == "DELETE":
                self._objects.pop(key, None)
                self._uploads.pop(query.get("uploadId", [""])[0], None)
                return _response(204, "")
            if method == "HEAD":
                found = self._objects.get(key)
                return (
                    _response(404, "") if found is None else _response(200, "", length=found, ETag='"0-1"', **_SEALED)
                )
            if "uploads" in query:
                return _response(200, f"<ListMultipartUploadsResult {_NAMESPACE}></ListMultipartUploadsResult>")
            if "list-type" in query:
                return _response(200, self._listing(f"{key.rstrip('/')}/", query.get("prefix", [""])[0]))
            return _response(404, "<Error><Code>NoSuchKey</Code></Error>")

    def _multipart(self, key: str, query: dict[str, list[str]]) -> bytes:
        name = xml.sax.saxutils.escape(key.lstrip("/").partition("/")[2])
        if "uploads" in query:
            upload = f"upload-{next(self._ids)}"
            self._uploads[upload] = 0
            inner = f"<Key>{name}</Key><UploadId>{upload}</UploadId>"
            return _response(
                200, f"<InitiateMultipartUploadResult {_NAMESPACE}>{inner}</InitiateMultipartUploadResult>"
            )
        self._objects[key] = self._uploads.pop(query["uploadId"][0])
        inner = f"<Key>{name}</Key><ETag>&quot;0-1&quot;</ETag>"
        return _response(200, f"<CompleteMultipartUploadResult {_NAMESPACE}>{inner}</CompleteMultipartUploadResult>")

    def _listing(self, bucket: str, prefix: str) -> str:
        names = sorted(key for key in self._objects if key.startswith(bucket + prefix))
        rows = "".join(
            f"<Contents><Key>{xml.sax.saxutils.escape(key[len(bucket) :])}</Key><Size>{self._objects[key]}</Size>"
            f'<ETag>"0-1"</ETag></Contents>'
            for key in names
        )
        head = f"<Name>{bucket.strip('/')}</Name><Prefix>{xml.sax.saxutils.escape(prefix)}</Prefix>"
        return f"<ListBucketResult {_NAMESPACE}>{head}<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"


class _Plain:
    """A connection without encryption."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._scratch = mmap.mmap(-1, _DISCARD_BYTES)
        self.recv = connection.recv
        self.sendall = connection.sendall

    def discard(self, nbytes: int) -> bool:
        """Read `nbytes` without copying them out of the kernel; false if the client left."""
        while nbytes > 0:
            got = self._socket.recv_into(self._scratch, min(nbytes, len(self._scratch)), socket.MSG_TRUNC)
            if not got:
                return False
            nbytes -= got
        return True


def _parsed(head: bytes) -> tuple[tuple[str, str], dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return (method, target), headers


def _response(status: int, body: str, *, length: int | None = None, **headers: str) -> bytes:
    data = body.encode()
    rows = {
        "Date": formatdate(usegmt=True),
        "Content-Length": str(len(data) if length is None else length),
        "Content-Type": "application/xml",
        **headers,
    }
    text = "".join(f"{name}: {value}\r\n" for name, value in rows.items())
    return f"HTTP/1.1 {status} {http.client.responses[status]}\r\n{text}\r\n".encode() + data


def _main() -> None:
    host, certificate = sys.argv[1:]
    server = _Server()
    listener = socket.create_server((host, 0))

    def serve(client: socket.socket) -> None:
        try:
            server.serve(client, certificate)
        except OSError:
            client.close()  # the client gave up

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    _main()
