"""The control socket: one request and one reply per connection, for one user only; no client holds up the writer."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.errors import WaitTimeoutError, WriterError
from ckpt_engine.persist import control
from ckpt_engine.persist.control import Control, Reply, address, ask
from ckpt_engine.persist.wire import Body
from tests.persist.staged import WAIT_SECONDS

NOBODY = 65534


class Echo:
    """Replies with the request, as soon as it may."""

    def __init__(self) -> None:
        self.ready = True
        self.fds: list[int] = []

    def answer(self, request: Body) -> Reply | None:
        return Reply({"you": request}, tuple(self.fds)) if self.ready else None


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def served(tmp_path: Path, echo: Echo, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    monkeypatch.setattr(control, "REQUEST_SECONDS", WAIT_SECONDS)  # a busy machine may be slow at both ends
    made = Control(str(tmp_path), echo.answer)
    made.open(WAIT_SECONDS)
    yield made
    made.close(WAIT_SECONDS)


def connect(root: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(address(str(root)))
    sock.settimeout(WAIT_SECONDS)
    return sock


def works(root: Path) -> bool:
    reply = ask(str(root), {"what": "x"}, WAIT_SECONDS)
    return reply is not None and reply.body == {"you": {"what": "x"}}


def hung_up(sock: socket.socket) -> bool:
    """Whether the server closes the connection in time."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_request_gets_its_reply_with_descriptors(tmp_path: Path, served: Control, echo: Echo) -> None:
    """A big one as well; the writer keeps nothing of it."""
    with (tmp_path / "file").open("wb+") as file:
        file.write(b"there")
        file.flush()
        echo.fds = [os.dup(file.fileno())]
        reply = ask(str(tmp_path), {"big": "x" * 60_000}, WAIT_SECONDS)
    assert reply is not None
    assert reply.body == {"you": {"big": "x" * 60_000}}
    assert os.pread(reply.fds[0], 9, 0) == b"there"
    os.close(reply.fds[0])


def test_nobody_there_is_no_error(tmp_path: Path) -> None:
    """Most of the time there is no writer."""
    assert ask(str(tmp_path), {"what": "x"}, WAIT_SECONDS) is None


def test_the_name_says_the_place_and_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same place in any spelling, another place, another user."""
    root = tmp_path / "a run"
    name = address(str(root))
    monkeypatch.chdir(tmp_path)
    assert name == address("a run") == address(f"{root}/") == address(f"file://{str(root).replace(' ', '%20')}")
    assert address("s3://bucket/run") == address("s3://bucket/run/")
    assert len({name, address(str(tmp_path)), address("s3://bucket/run"), address("s3://other/run")}) == 4
    monkeypatch.setattr(os, "geteuid", lambda: 1234567)
    assert address(str(root)) != name
    assert all(len(address(place)) < 108 for place in ("x" * 9999, "/" + "ü" * 999))


def test_a_reply_may_come_later(tmp_path: Path, served: Control, echo: Echo) -> None:
    """Whoever asked for what is not known yet waits, and others are answered meanwhile."""
    echo.ready = False
    with connect(tmp_path) as sock:
        sock.sendall(struct.pack("<Q", 2) + b"{}")
        with pytest.raises(WaitTimeoutError, match="did not answer"):
            ask(str(tmp_path), {}, 0.05)
        echo.ready = True
        served.poke()
        assert sock.recv(100)[8:] == b'{"you":{}}'


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 9,
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 60_000) + b"[" * 60_000,
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 9) + b'{"fds":3}',
        b"x" * (4 << 20),
    ],
    ids=["length", "http", "too long", "nested", "no object", "no descriptors", "flood"],
)
def test_garbage_is_hung_up_on(tmp_path: Path, served: Control, garbage: bytes) -> None:
    """And the next one is served."""
    with connect(tmp_path) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(garbage)
        assert hung_up(sock)
    assert works(tmp_path)


def test_descriptors_that_nobody_asked_for_are_not_taken(tmp_path: Path, served: Control) -> None:
    """A client cannot fill up the writer's table of descriptors."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with connect(tmp_path) as sock, (tmp_path / "file").open("w") as file:
        socket.send_fds(sock, [struct.pack("<Q", 2)], [file.fileno()] * 100)
        assert hung_up(sock)
    assert works(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 50


def test_slow_clients_hold_up_nobody_and_are_hung_up_on(
    tmp_path: Path, served: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are served at once: silent, or in the middle of a request. Others wait until they are gone."""
    monkeypatch.setattr(control, "REQUEST_SECONDS", 0.2)
    slow = [connect(tmp_path) for _ in range(2 * control._CLIENTS)]
    for number, sock in enumerate(slow):
        if number % 2:
            sock.sendall(struct.pack("<Q", 100) + b"{")
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            assert works(tmp_path)
        except WriterError as err:  # the time was too short for us, too, on a busy machine
            assert "hung up" in str(err) and time.monotonic() < deadline
        else:
            break
    for sock in slow:
        assert hung_up(sock)
        sock.close()


def test_a_client_that_does_not_take_its_reply_is_hung_up_on(
    tmp_path: Path, served: Control, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that is bigger than the socket's buffer waits for it, for a while only."""
    monkeypatch.setattr(control, "TAKE_SECONDS", 0.2)
    monkeypatch.setattr(echo, "answer", None)
    big = Reply({"x": "x" * (8 << 20)})
    served._answer = lambda request: big if request.get("big") else Reply({"you": request})
    with connect(tmp_path) as sock:
        sock.sendall(struct.pack("<Q", 9) + b'{"big":1}')
        assert works(tmp_path)
        got = 0
        deadline = time.monotonic() + WAIT_SECONDS
        while not select.select([sock], [], [], 0)[0] or not is_closed(sock):
            assert time.monotonic() < deadline
        while data := sock.recv(1 << 20):
            got += len(data)
        assert got < 8 << 20
    assert works(tmp_path)


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end has closed the connection, read or not."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(20))


def test_a_client_that_goes_away_is_forgotten(tmp_path: Path, served: Control, echo: Echo) -> None:
    """Before its request, and before its reply."""
    echo.ready = False
    for data in (b"", struct.pack("<Q", 2) + b"{}"):
        with connect(tmp_path) as sock:
            sock.sendall(data)
    echo.ready = True
    assert works(tmp_path)
    deadline = time.monotonic() + WAIT_SECONDS
    while served._clients:
        served.poke()
        assert time.monotonic() < deadline


def as_nobody(work: str) -> int:
    """Run a line of Python as another user, after `import socket, sys`; its exit status."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            scope: dict[str, object] = {"socket": socket, "struct": struct}
            exec(work, scope)
            status = int(str(scope["status"]))
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@root_only
def test_another_user_is_not_let_in(tmp_path: Path, served: Control) -> None:
    """It knows the name, and is hung up on without a word."""
    work = f"""
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.settimeout({WAIT_SECONDS})
sock.connect({address(str(tmp_path))!r})
try:
    sock.sendall(struct.pack("<Q", 2) + b"{{}}")
    status = 0 if sock.recv(100) == b"" else 1
except (BrokenPipeError, ConnectionResetError):
    status = 0
"""
    assert as_nobody(work) == 0
    assert works(tmp_path)


@root_only
def test_another_user_is_not_asked(tmp_path: Path) -> None:
    """One that has taken the name is nobody for us, and a writer goes on without it."""
    ready, done = socket.socketpair()
    child = os.fork()
    if child == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The name of root, not its own.
        listener.bind(f"\0ckpt-engine-0-{address(str(tmp_path)).rpartition('-')[2]}")
        listener.listen()
        done.sendall(b"x")
        done.recv(1)
        os._exit(0)
    try:
        assert ready.recv(1) == b"x"
        assert ask(str(tmp_path), {"what": control.SNAPSHOT}, WAIT_SECONDS) is None
        squatted = Control(str(tmp_path), lambda request: Reply({}))
        with pytest.raises(WriterError, match="somebody else has its name"):
            squatted.open(WAIT_SECONDS)
        squatted.close(WAIT_SECONDS)
    finally:
        ready.sendall(b"x")
        os.waitpid(child, 0)
        ready.close()
        done.close()


def test_the_credentials_decide(tmp_path: Path, served: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, where no other user can be had: the socket is told to be another user's."""
    monkeypatch.setattr(control, "peer_uid", lambda sock: os.geteuid() + 1)
    assert ask(str(tmp_path), {"what": "x"}, WAIT_SECONDS) is None
    with connect(tmp_path) as sock:
        assert hung_up(sock)


def test_a_name_that_is_served_is_not_taken_over(tmp_path: Path, served: Control) -> None:
    """`bye` was not granted."""
    second = Control(str(tmp_path), lambda request: Reply({}))
    with pytest.raises(WriterError, match="serves its trainer"):
        second.open(WAIT_SECONDS)
    second.close(WAIT_SECONDS)
    assert works(tmp_path)


def test_a_name_that_is_given_up_is_taken_over(tmp_path: Path, echo: Echo) -> None:
    """The reply to `bye` comes after the name is free."""

    def answer(request: Body) -> Reply:
        first.hang_up()
        return Reply({"ok": True})

    first = Control(str(tmp_path), answer)
    first.open(WAIT_SECONDS)
    second = Control(str(tmp_path), echo.answer)
    second.open(WAIT_SECONDS)
    assert works(tmp_path)
    first.close(WAIT_SECONDS)
    second.close(WAIT_SECONDS)
    assert ask(str(tmp_path), {"what": "x"}, WAIT_SECONDS) is None
