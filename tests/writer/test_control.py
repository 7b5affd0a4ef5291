"""The control socket: one request and one reply per connection, for one user only; no client delays the writer."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.copy.job import RankConfig
from ckpt_engine.errors import WaitTimeoutError, WriterError
from ckpt_engine.writer import control, unix_sockets
from ckpt_engine.writer.control import Control, ControlHandlers, ask
from ckpt_engine.writer.memory_snapshots import Ids, MemorySnapshots
from ckpt_engine.writer.messages import Body, Reply
from ckpt_engine.writer.unix_sockets import name_of
from tests.writer.staged import WAIT_SECONDS

ANOTHER_USER = 65534


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
    sock.connect(path_of(root))
    sock.settimeout(WAIT_SECONDS)
    return sock


def path_of(root: Path) -> str:
    """The socket of who serves there, or has been killed."""
    (found,) = (one for folder in unix_sockets.folders() if (one := Path(folder, name_of(str(root)))).exists())
    return str(found)


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


def test_a_run_without_a_writer_is_no_error(tmp_path: Path) -> None:
    """A request to a run that has no writer gets no reply and raises nothing: most runs have none."""
    assert ask(str(tmp_path), {"what": "x"}, WAIT_SECONDS) is None


def test_the_name_says_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same place in any spelling, another place, another rank; and it is never too long for a socket."""
    root = tmp_path / "a run"
    name = name_of(str(root))
    monkeypatch.chdir(tmp_path)
    assert name == name_of("a run") == name_of(f"{root}/") == name_of(f"file://{str(root).replace(' ', '%20')}")
    assert name_of("s3://bucket/run") == name_of("s3://bucket/run/")
    others = [name_of(str(tmp_path)), name_of("s3://bucket/run"), name_of("s3://other/run"), name_of(str(root), 1)]
    assert len({name, *others}) == 5
    assert all(len(name_of(place)) == 32 for place in ("x" * 9999, "/" + "ü" * 999))


def test_a_reply_may_come_later(tmp_path: Path, served: Control, echo: Echo) -> None:
    """A client whose reply is not ready waits for it, and other clients do not wait for that client."""
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
    """The writer closes the connection, and serves the next one."""
    with connect(tmp_path) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(garbage)
        assert hung_up(sock)
    assert works(tmp_path)


def test_unasked_descriptors_are_not_taken(tmp_path: Path, served: Control) -> None:
    """A client cannot fill up the writer's table of descriptors."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with connect(tmp_path) as sock, (tmp_path / "file").open("w") as file:
        socket.send_fds(sock, [struct.pack("<Q", 2)], [file.fileno()] * 100)
        assert hung_up(sock)
    assert works(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 50


def test_slow_clients_delay_no_other_and_are_hung_up_on(
    tmp_path: Path, served: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are served at once: silent, or in the middle of a request. Others wait until they are gone."""
    monkeypatch.setattr(control, "REQUEST_SECONDS", 0.2)
    slow = [connect(tmp_path) for _ in range(2 * control._CLIENTS)]
    for number, sock in enumerate(slow):
        if number % 2:
            with contextlib.suppress(BrokenPipeError):  # on a busy machine it is hung up on already
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


def as_another_user(work: str) -> int:
    """Run a line of Python as another user, after `import socket, sys`; its exit status."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.setgroups([])
            os.setgid(ANOTHER_USER)
            os.setuid(ANOTHER_USER)
            scope: dict[str, object] = {"socket": socket, "struct": struct}
            exec(work, scope)
            status = int(str(scope["status"]))
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@root_only
def test_another_user_cannot_connect(tmp_path: Path, served: Control) -> None:
    """A user who knows the name reaches neither the writer nor the queue before it."""
    work = f"""
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
try:
    sock.connect({path_of(tmp_path)!r})
    status = 1
except PermissionError:
    status = 0
"""
    assert as_another_user(work) == 0
    assert works(tmp_path)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Where all users may make folders, with nothing in it. With names that are short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as one, tempfile.TemporaryDirectory(dir="/tmp") as two:
        monkeypatch.setattr(unix_sockets, "_PLACES", (one, two))
        yield Path(one), Path(two)
        Path(one).mkdir(exist_ok=True)


def test_a_folder_that_others_can_enter_is_not_believed(tmp_path: Path, places: tuple[Path, Path], echo: Echo) -> None:
    """Such a folder, a link, a file or a foreign folder is neither asked nor used, and one of our own is made."""
    prefix = f"ckpt-engine-{os.geteuid()}-"
    open_to_all, link, file = (places[0] / f"{prefix}{name}" for name in ("all", "link", "file"))
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    (places[0] / "private").mkdir(mode=0o700)
    link.symlink_to(places[0] / "private")
    file.touch()
    if os.geteuid() == 0:
        foreign = places[0] / f"{prefix}foreign"
        foreign.mkdir(mode=0o700)
        os.chown(foreign, ANOTHER_USER, ANOTHER_USER)
    fake = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fake.bind(str(open_to_all / name_of(str(tmp_path))))
    fake.listen()
    assert ask(str(tmp_path), {"what": "x"}, WAIT_SECONDS) is None
    made = Control(str(tmp_path), echo.answer)
    made.open(WAIT_SECONDS)
    assert works(tmp_path)
    (folder,) = unix_sockets.folders()
    assert Path(folder).parent == places[0] and folder not in map(str, (open_to_all, link, file))
    made.close(WAIT_SECONDS)
    fake.close()


def test_where_no_folder_can_be_made_the_next_place_is_used(
    tmp_path: Path, places: tuple[Path, Path], echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root file system that can only be read still has memory for files; without any, the writer says so."""
    places[0].rmdir()
    made = Control(str(tmp_path), echo.answer)
    made.open(WAIT_SECONDS)
    assert works(tmp_path) and Path(unix_sockets.folders()[0]).parent == places[1]
    made.close(WAIT_SECONDS)
    monkeypatch.setattr(unix_sockets, "_PLACES", (str(tmp_path / "nothing"),))
    nowhere = Control(str(tmp_path), echo.answer)
    with pytest.raises(WriterError, match="nothing"):
        nowhere.open(WAIT_SECONDS)
    nowhere.close(WAIT_SECONDS)


def test_what_a_killed_writer_has_left_stops_no_other(tmp_path: Path, places: tuple[Path, Path], echo: Echo) -> None:
    """No client takes the socket of a killed writer for a living one; the next writer of any run removes it."""
    for name in (name_of(str(tmp_path)), name_of("another run")):
        killed = unix_sockets.SocketListener(name, WAIT_SECONDS)
        killed._sock.close()
    folder = Path(unix_sockets.folders()[0])
    assert len(list(folder.iterdir())) == 2 - 1  # the second one has removed the first
    killed = unix_sockets.SocketListener(name_of(str(tmp_path)), WAIT_SECONDS)
    killed._sock.close()
    assert ask(str(tmp_path), {"what": "x"}, WAIT_SECONDS) is None
    made = Control(str(tmp_path), echo.answer)
    made.open(WAIT_SECONDS)
    assert works(tmp_path)
    assert [one.name for one in folder.iterdir()] == [name_of(str(tmp_path))]
    made.close(WAIT_SECONDS)
    assert list(folder.iterdir()) == []


def test_a_writer_that_takes_no_connections_is_not_waited_for(
    tmp_path: Path, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To connect takes a second at most, however long the reply may take."""
    monkeypatch.setattr(unix_sockets, "_BACKLOG", 0)
    stands = unix_sockets.SocketListener(name_of(str(tmp_path)), WAIT_SECONDS)
    waits = []
    while len(waits) < 2:
        waits.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        with contextlib.suppress(BlockingIOError):
            waits[-1].connect(path_of(tmp_path))
    given: list[float] = []
    monkeypatch.setattr(unix_sockets, "connect", lambda name, timeout: given.append(timeout))
    assert ask(str(tmp_path), {"what": "x"}, 1e6) is None
    assert given == [1.0]
    monkeypatch.undo()
    monkeypatch.setattr(unix_sockets, "_PLACES", tuple(map(str, places)))
    monkeypatch.setattr(control, "CONNECT_SECONDS", 0.01)
    with pytest.raises(WaitTimeoutError, match="did not answer"):
        ask(str(tmp_path), {"what": "x"}, 1e6)
    stands.close()
    for one in waits:
        one.close()


def test_the_credentials_decide(tmp_path: Path, served: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer refuses a socket whose credentials name another user; no second user is needed for this test."""
    monkeypatch.setattr(unix_sockets, "peer_of", lambda sock: (0, os.geteuid() + 1))
    assert ask(str(tmp_path), {"what": "x"}, WAIT_SECONDS) is None
    with connect(tmp_path) as sock:
        assert hung_up(sock)


def test_a_name_that_is_served_is_not_taken_over(tmp_path: Path, served: Control) -> None:
    """A second writer fails while the first one refuses `bye`."""
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


# ---------------------------------------------------------------------- fuzz


def attack(root: Path, seed: int) -> None:
    """One connection that means no good: a request that is changed, cut off, too much, or none."""
    chance = random.Random(seed)
    whats = ["snapshot", "held", "parity", "bye!", "save", "flush", "status", "x", 7, None, [], {}]
    values = [None, -1, 1 << 70, 1e308, "x" * 99, [[]], {"a": {}}, True, "\ud800"]
    body: dict[str, object] = {"what": chance.choice(whats)}
    for key in chance.sample(["snapshot", "rank", "who", "fds", "you"], chance.randrange(4)):
        body[key] = chance.choice(values)
    text = json.dumps(body).encode()
    length = chance.choice([len(text)] * 6 + [0, len(text) - 1, len(text) + 1, 1 << 16, 1 << 40, (1 << 64) - 1])
    data = struct.pack("<Q", length) + text
    match chance.randrange(8):
        case 0:
            data = data[: chance.randrange(len(data))]
        case 1:
            at = chance.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 2:
            data = struct.pack("<Q", 50_000) + chance.choice([b"[", b'{"":']) * 50_000
        case 3:
            data = chance.randbytes(chance.randrange(1, 3000))
        case _:
            data *= chance.choice([1, 1, 2])
    with contextlib.suppress(OSError), connect(root) as sock:
        for at in range(0, len(data), size := chance.choice([1 << 20, 7])):
            sock.sendall(data[at : at + size])
        if chance.random() < 0.5:
            sock.settimeout(0.02)
            sock.recv(1 << 20)


def campaign(root: Path, seeds: range) -> None:
    """Against what a writer answers: after each of them it answers what it should."""
    ranks = RankConfig(1, 2, "secret", None, 1.0, "here", mirrors=True)
    memory = MemorySnapshots(Ids(), lambda: None)
    queue: Any = SimpleNamespace(held=memory, flush=lambda: None, config=SimpleNamespace(ranks=ranks), peers=None)
    handlers = ControlHandlers(queue, lambda what, who: True, lambda: True, lambda: None)
    served = Control(str(root), handlers.answer)
    served.open(WAIT_SECONDS)
    ended: list[object] = []
    before, threading.excepthook = threading.excepthook, lambda args: ended.append(args.exc_value)
    try:
        for seed in seeds:
            attack(root, seed)
            reply = ask(str(root), {"what": control.Question.STATUS}, WAIT_SECONDS)
            assert reply is not None and reply.body["pid"] == os.getpid(), seed
    finally:
        threading.excepthook = before
        served.close(WAIT_SECONDS)
    assert ended == [] and not served._clients


def test_no_bytes_keep_a_writer_from_answering(tmp_path: Path) -> None:
    """A few of the campaign below."""
    campaign(tmp_path, range(60))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fuzzed_requests(tmp_path: Path) -> None:
    """Three thousand connections: the thread that answers lives, and answers the next one at once."""
    campaign(tmp_path, range(1000, 4000))
