"""A bad network between a client and an HTTP server, on loopback.

```python
with Wire("127.0.0.1", 9000) as wire:          # wire.url is what the client talks to
    wire.rule("503", "PUT", r"/bucket/data", times=2)
```
Actions on a request that a rule matches:

| action | what happens |
| --- | --- |
| `503`, `500`, `403` | the server is not asked; the client gets SlowDown, InternalError or AccessDenied |
| `lost` | the server is asked and acts, its answer is thrown away, the connection reset |
| `refuse` | reset before the server is asked |
| `midbody` | reset after half of the request's body went to the server |
| `truncate` | half of the answer's body, then the connection is closed |
| `stall` | the body is taken, nothing is ever answered |
| `block` | the body is not even taken |
| `corrupt` | one byte of the answer's body is flipped |
| `spoil` | one byte of the request's body is flipped |
| `lie` | the server is not asked; the client gets status 200 and the bytes `lie` |
| `lose` | the server is not asked; the client gets status 200 and the ETag of what it has sent |
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

_PIECE_BYTES = 256 << 10
_PATIENCE_SECONDS = 60.0
_ANSWERS = {
    "503": ("SlowDown", "Please reduce your request rate."),
    "500": ("InternalError", "Internal error."),
    "403": ("AccessDenied", "Access Denied."),
}
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class _Rule:
    action: str
    method: re.Pattern[str]
    path: re.Pattern[str]
    times: int | None
    chance: float
    after: int
    then: Callable[[], object] | None


@dataclass(frozen=True)
class _Head:
    """The first lines of a request or an answer."""

    raw: bytes
    line: str
    fields: dict[str, str]

    @property
    def length(self) -> int:
        return int(self.fields.get("content-length", 0))


class Wire:
    """A proxy in a thread of its own.

    `log` has (method, path, action) of each request. `answers` has method, path and bytes of each answer that is passed
    on, counted before they are sent: a client that has got all of them finds them there.
    """

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        self._target = (host, port)
        self._rules: list[_Rule] = []
        self._random = random.Random(seed)
        self.corrupted_byte: int | None = None
        """Which byte of an answer's body `corrupt` flips, modulo its length; None: a random one."""
        self.lie = b""
        self._writers: set[asyncio.StreamWriter] = set()
        self._down = False
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self.log: list[tuple[str, str, str]] = []
        self.answers: list[list[Any]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rule(
        self,
        action: str,
        method: str = ".*",
        path: str = ".*",
        *,
        times: int | None = None,
        chance: float = 1.0,
        after: int = 0,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Do `action` to requests whose method matches whole and whose path and query match anywhere.

        Args:
            times: to so many of them; None: to all.
            chance: to this share of them.
            after: only once so many have passed.
            then: called at each of them, on the proxy's thread, before the action.
        """
        self._rules.append(_Rule(action, re.compile(method), re.compile(path), times, chance, after, then))

    def clear(self) -> None:
        """Pass everything on."""
        self._rules.clear()

    def cut(self) -> None:
        """Reset every connection, and each new one."""
        self._down = True
        self._loop.call_soon_threadsafe(self._reset_all)

    def mend(self) -> None:
        """Undo `cut`."""
        self._down = False

    @property
    def waiting(self) -> int:
        """How many rules with a number of times have not met all their requests."""
        return sum(bool(rule.times) for rule in self._rules)

    @property
    def struck(self) -> int:
        """How many requests since `log` was cleared were not passed on as they were."""
        return sum(action != "pass" for _, _, action in list(self.log))

    def count(self, method: str, path: str = "") -> int:
        """How many requests there were."""
        return sum(m == method and re.search(path, p) is not None for m, p, _ in list(self.log))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(_PATIENCE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(_PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _stop(self) -> None:
        self._reset_all()
        self._loop.stop()

    def _reset_all(self) -> None:
        for writer in list(self._writers):
            _reset(writer)

    def _action(self, method: str, path: str) -> str:
        for rule in self._rules:
            wanted = rule.times != 0 and rule.method.fullmatch(method) and rule.path.search(path)
            if wanted and rule.after > 0:
                rule.after -= 1
            elif wanted and self._random.random() < rule.chance:
                if rule.times is not None:
                    rule.times -= 1
                if rule.then is not None:
                    rule.then()
                return rule.action
        return "pass"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        up: list[asyncio.StreamWriter] = []
        try:
            if self._down:
                _reset(writer)
                return
            server: _Streams | None = None
            while True:
                request = await _head(reader)
                method, path, _ = request.line.split(" ", 2)
                action = self._action(method, path)
                self.log.append((method, path, action))
                if action == "refuse":
                    _reset(writer)
                    return
                if action == "block":
                    await asyncio.Event().wait()
                if action in (*_ANSWERS, "stall", "lie", "lose"):
                    taken = hashlib.md5(usedforsecurity=False)
                    async for piece in _body(reader, request):
                        taken.update(piece)
                    if action == "stall":
                        await asyncio.Event().wait()
                    if action in _ANSWERS:
                        await _refuse(writer, action, empty=method == "HEAD")
                    else:
                        lost = f'ETag: "{taken.hexdigest()}"\r\n' if action == "lose" else ""
                        await _accept(writer, self.lie if action == "lie" else b"", lost, empty=method == "HEAD")
                    continue
                if server is None:
                    server = await asyncio.open_connection(*self._target, limit=1 << 20)
                    up.append(server[1])
                    self._writers.add(server[1])
                if not await self._pass(method, action, request, (reader, writer), server):
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            return  # no task awaits this one, not even the one that cancels it
        finally:
            for one in (writer, *up):
                self._writers.discard(one)
                one.close()

    async def _pass(self, method: str, action: str, request: _Head, client: _Streams, server: _Streams) -> bool:
        """Pass a request and its answer on; whether the connection may be used again."""
        server[1].write(request.raw)
        sent = 0
        spot = self._random.randrange(request.length) if request.length else 0
        async for piece in _body(client[0], request):
            if action == "midbody" and sent + len(piece) > request.length // 2:
                _reset(client[1])
                return False
            if action == "spoil" and sent <= spot < sent + len(piece):
                piece = _flipped(piece, spot - sent)
            server[1].write(piece)
            await server[1].drain()
            sent += len(piece)
        answer = await _head(server[0])
        while " 100 " in answer.line:
            answer = await _head(server[0])
        bare = method == "HEAD" or answer.line.split()[1] in ("204", "304")
        if action == "lost":
            async for _piece in _body(server[0], answer, bare=bare):
                pass
            _reset(client[1])
            return False
        method, path, _ = request.line.split(" ", 2)
        counted: list[Any] = [method, path, 0]
        self.answers.append(counted)
        client[1].write(answer.raw)
        passed, half = 0, answer.length // 2
        spot = self._random.randrange(answer.length) if answer.length else 0
        if self.corrupted_byte is not None and answer.length:
            spot = self.corrupted_byte % answer.length
        async for piece in _body(server[0], answer, bare=bare):
            if action == "truncate" and passed + len(piece) > half:
                client[1].write(piece[: max(0, half - passed)])
                await client[1].drain()
                return False
            if action == "corrupt" and passed <= spot < passed + len(piece):
                piece = _flipped(piece, spot - passed)
            counted[2] += len(piece)
            client[1].write(piece)
            await client[1].drain()
            passed += len(piece)
        await client[1].drain()
        return answer.fields.get("connection", "").lower() != "close"


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        sock = writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST instead of FIN
        writer.transport.abort()


def _flipped(piece: bytes, at: int) -> bytes:
    return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]


async def _refuse(writer: asyncio.StreamWriter, status: str, *, empty: bool) -> None:
    code, message = _ANSWERS[status]
    text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    body = b"" if empty else text.encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def _accept(writer: asyncio.StreamWriter, body: bytes, more: str, *, empty: bool) -> None:
    head = f"HTTP/1.1 200 OK\r\n{more}Content-Type: text/html\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + (b"" if empty else body))
    await writer.drain()


async def _head(reader: asyncio.StreamReader) -> _Head:
    raw = await reader.readuntil(b"\r\n\r\n")
    lines = raw.decode("latin1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines[1:] if ":" in line)
    return _Head(raw, lines[0], {name.strip().lower(): value.strip() for name, value in pairs})


async def _body(reader: asyncio.StreamReader, head: _Head, *, bare: bool = False) -> AsyncIterator[bytes]:
    """The body as it is on the wire, framing included."""
    if bare:
        return
    if "chunked" in head.fields.get("transfer-encoding", "").lower():
        while True:
            line = await reader.readline()
            nbytes = int(line.split(b";")[0] or b"0", 16)
            yield line
            yield await reader.readexactly(nbytes + 2)
            if nbytes == 0:
                return
    elif "content-length" in head.fields:
        left = head.length
        while left:
            piece = await reader.read(min(left, _PIECE_BYTES))
            if not piece:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(piece)
            yield piece
    elif head.line.startswith("HTTP/"):
        while piece := await reader.read(_PIECE_BYTES):
            yield piece
