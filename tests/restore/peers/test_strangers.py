"""A stranger that connects to a writer's port costs the writer little, and keeps no partner away from it."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from ckpt_engine.errors import WriterError
from ckpt_engine.ranks import world
from ckpt_engine.ranks.world import towards_others
from ckpt_engine.writer import peer_service
from ckpt_engine.writer.peer_service import STRANGERS, PeerConnection, Server, connect
from tests.restore.peers.writers import SECRET, Writer, meet, until
from tests.writer.staged import WAIT_SECONDS


class Echo:
    """A server that sends back what it is asked, and takes in so many bytes of a file before."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.server = Server(host, SECRET, self._answer)

    def _answer(self, request: dict[str, Any], line: PeerConnection) -> None:
        room = bytearray(request.get("nbytes", 0))
        line.fill(memoryview(room))
        line.send({"you": request, "sum": sum(room)})

    def connect(self) -> PeerConnection:
        return connect("127.0.0.1", self.server.port, SECRET)

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), WAIT_SECONDS)

    def serves(self) -> bool:
        """Whether one of the ranks' writers gets an answer."""
        line = self.connect()
        try:
            line.send({"nbytes": 3})
            line.send_file(memoryview(b"\1\2\3"))
            return line.receive() == {"you": {"nbytes": 3}, "sum": 6}
        finally:
            line.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.server.close()
    until(lambda: not [one for one in threading.enumerate() if one.name in ("ckpt-peer", "ckpt-peers")])


def hung_up(sock: socket.socket) -> bool:
    """Whether the other end closes the connection, whatever it says before."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


@pytest.mark.parametrize(
    "said", [b"", b"ckpt", peer_service._HELLO + bytes(20)], ids=["nothing", "little", "half a hello"]
)
def test_strangers_that_wait_keep_no_partner_away(echo: Echo, said: bytes) -> None:
    """However many there are, from the same address, and whatever they have said: the oldest ones make room."""
    crowd = [echo.stranger() for _ in range(3 * STRANGERS)]
    for one in crowd:
        with suppress(OSError):
            one.sendall(said)
    assert echo.serves()
    assert len(echo.server._strangers) <= STRANGERS
    assert all(hung_up(one) for one in crowd[:STRANGERS])
    for one in crowd:
        one.close()


def test_strangers_of_one_address_make_room_for_those_of_others(echo: Echo) -> None:
    """The one that has the most connections loses the oldest of them."""
    other = socket.socket()
    other.bind(("127.0.0.2", 0))
    other.connect(("127.0.0.1", echo.server.port))
    until(lambda: len(echo.server._strangers) == 1)
    crowd = [echo.stranger() for _ in range(2 * STRANGERS)]
    until(lambda: len(echo.server._strangers) == STRANGERS and hung_up(crowd[STRANGERS]))
    assert "127.0.0.2" in echo.server._strangers.values()
    assert echo.serves()
    for one in [other, *crowd]:
        one.close()


def test_a_proof_that_comes_byte_by_byte_is_not_waited_for(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is for the whole of it, not for the next byte."""
    monkeypatch.setattr(peer_service, "HANDSHAKE_SECONDS", 0.5)
    over = threading.Event()
    with echo.stranger() as slow:

        def trickle() -> None:
            with suppress(OSError):
                while not over.wait(0.05):
                    slow.sendall(peer_service._HELLO[:1])

        hello = peer_service._HELLO + os.urandom(32)
        slow.sendall(hello)  # the bytes that follow could be a proof, one day
        thread = threading.Thread(target=trickle)
        monkeypatch.setattr(peer_service, "_PROOF_BYTES", 1 << 20)
        thread.start()
        assert hung_up(slow)
        over.set()
        thread.join(WAIT_SECONDS)


def test_nothing_listens_where_the_ranks_do_not_meet(echo: Echo) -> None:
    """The port is open at one address of the machine only."""
    assert echo.server._listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", echo.server.port), WAIT_SECONDS)


def test_a_machine_listens_where_it_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that knows its address does there. One that knows its name only, as that of rank 0: towards the others."""
    routes = {"10.0.0.7": "10.0.0.1", "node7": "192.168.0.1", "node0": "127.0.1.1", "lost": None}
    monkeypatch.setattr(world, "towards", routes.get)
    assert towards_others("10.0.0.5", ["10.0.0.7"]) == "10.0.0.5"
    assert towards_others("node0", ["node7", "10.0.0.7"]) == "10.0.0.1"
    assert towards_others("node0", ["node7"]) == "192.168.0.1"
    assert towards_others("node0", []) == "node0"
    assert towards_others("lost", ["lost"]) == "127.0.0.1"


def test_every_frame_after_the_proof_counts_at_its_place_only(echo: Echo) -> None:
    """One that is changed, comes twice, is left out or is of the other kind ends the connection, and does nothing."""
    head, body, tag = range(3)

    def frames(line: PeerConnection) -> list[list[bytes]]:
        found: list[list[bytes]] = []
        sealed = [peer_service._MESSAGE, b'{"nbytes": 4}'], [peer_service._DATA, b"abcd"]
        for kind, data in sealed:
            found.append([struct.pack("<Q", len(data)), data, line._sends.tag(kind, data)])
        return found

    def changed(at: int, part: int) -> list[bytes]:
        line = echo.connect()
        sent = frames(line)
        sent[at][part] = bytes([sent[at][part][0] ^ 1]) + sent[at][part][1:]
        return said(line, [one for frame in sent for one in frame])

    def said(line: PeerConnection, parts: list[bytes]) -> list[bytes]:
        with suppress(OSError):
            line._sock.sendall(b"".join(parts))
            line._sock.shutdown(socket.SHUT_WR)
        answer = []
        with suppress(OSError):
            while data := line._sock.recv(4096):
                answer.append(data)
        line.close()
        return answer

    line = echo.connect()
    assert said(line, [one for frame in frames(line) for one in frame])
    assert [changed(at, part) for at in range(2) for part in (head, body, tag)] == [[]] * 6
    for order in ((1, 0), (0, 0), (1,), (0, 0, 1)):
        line = echo.connect()
        sent = frames(line)
        assert said(line, [one for at in order for one in sent[at]]) == []
    assert echo.serves()


def sealed(line: PeerConnection, body: bytes) -> None:
    """Send any bytes as a message."""
    line._send(peer_service._MESSAGE, body)


@pytest.mark.parametrize(
    "body",
    [b"[" * 200_000, b'{"a":' * 100_000, b"null", b"\xff", b'{"nbytes": -1}', b'{"nbytes": 1e999}', b'{"nbytes": "x"}'],
    ids=["lists", "objects", "null", "bytes", "negative", "infinite", "text"],
)
def test_a_request_that_is_none_ends_its_connection_and_nothing_else(echo: Echo, body: bytes) -> None:
    """That is so for a client that knows the secret, too."""
    line = echo.connect()
    sealed(line, body)
    with suppress(WriterError, OSError):
        line.receive()
    line.close()
    assert echo.serves()


# ---------------------------------------------------------------------- fuzz


def random_message(chance: random.Random) -> bytes:
    values: list[Any] = [None, -1, 0, 1 << 70, 1e308, "x" * 999, [], {}, True, [[[[]]]], {"nbytes": 1 << 62}]
    keys = ["what", "nbytes", "rank", "snapshot", "part", "file", "digest", "record", "name", "start", "host", "port"]
    whats = ["add", "snapshot", "parity", "mirrored", "moved", "read", "manifest", "?"]
    body = {key: chance.choice(values) for key in chance.sample(keys, chance.randrange(len(keys)))}
    if chance.random() < 0.8:
        body["what"] = chance.choice(whats)
    return json.dumps(body).encode() if chance.random() < 0.9 else b"[" * chance.randrange(100_000)


def attack(port: int, secret: str, seed: int) -> None:
    """One connection of somebody who means no good: right so far, and then changed, cut off or too much."""
    chance = random.Random(seed)
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as sock:
        sock.settimeout(0.2)  # what waits for more of it is left
        if chance.random() < 0.2:
            sock.sendall(chance.randbytes(chance.randrange(2000)))
            return
        mine = chance.randbytes(32)
        sock.sendall(broken(peer_service._HELLO + mine, chance))
        hello = sock.recv(40, socket.MSG_WAITALL)
        if len(hello) < 40:
            return
        key = (secret if chance.random() < 0.7 else "another").encode()
        sock.sendall(broken(hmac.digest(key, b"client" + mine + hello[8:], "sha256"), chance))
        if len(sock.recv(32, socket.MSG_WAITALL)) < 32:
            return
        seal = peer_service._Seal(hmac.digest(key, b"client frames" + mine + hello[8:], hashlib.sha256))
        for _ in range(chance.randrange(1, 4)):
            body, kind = (
                random_message(chance),
                chance.choice([peer_service._MESSAGE, peer_service._MESSAGE, peer_service._DATA]),
            )
            sock.sendall(broken(struct.pack("<Q", len(body)) + body + seal.tag(kind, body), chance))
        if chance.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
            hung_up(sock)


def broken(data: bytes, chance: random.Random) -> bytes:
    """Mostly as it is."""
    if chance.random() < 0.8:
        return data
    match chance.randrange(4):
        case 0:
            return data[: chance.randrange(len(data))]
        case 1:
            at = chance.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 2:
            return data + chance.randbytes(chance.randrange(1, 100))
        case _:
            return data * 2


def campaign(seeds: range) -> None:
    """Against a writer that keeps shares, one that keeps parity, and a leader that lends: each still does its work."""
    writers = [Writer(rank, 2) for rank in range(2)]
    meet(writers)
    group = [Writer(rank, 3, 3) for rank in range(3)]
    meet(group)
    ended: list[object] = []
    before, threading.excepthook = threading.excepthook, lambda args: ended.append(args.exc_value)
    try:
        for seed in seeds:
            target = (writers[seed % 2], group[seed % 3])[seed // 2 % 2]
            attack(target.peers.server.port, SECRET, seed)
            if seed % 25 == 0:
                snapshot = writers[0].offer(seed + 1)
                until(lambda snapshot=snapshot: snapshot in writers[1].kept)
        for one in group:
            one.offer(1)
        until(lambda: all(one.kept for one in group))
    finally:
        threading.excepthook = before
        for one in [*writers, *group]:
            one.close()
    assert ended == [], f"a thread has ended: {ended}"


@pytest.mark.long
def test_no_bytes_keep_a_writer_from_its_partner() -> None:
    """A few of the campaign below."""
    campaign(range(60))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fuzzed_frames() -> None:
    """Two thousand connections: no thread ends by an error, nothing hangs, the partners are served all the time."""
    campaign(range(1000, 3000))
