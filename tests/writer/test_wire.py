"""Whole messages and descriptors cross the socket, whatever pieces it takes them in."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ckpt_engine.errors import WriterError
from ckpt_engine.writer.channel import Channel, Received

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channels = Channel(ends[0]), Channel(ends[1])
    yield channels
    for channel in channels:
        channel.close()


def move(sender: Channel, receiver: Channel) -> list[Received]:
    """Everything in flight from one end to the other, by single steps of both."""
    found: list[Received] = []
    while True:
        sender.flush()
        messages, is_open = receiver.receive()
        found += messages
        if not is_open or not (sender.backlog or select.select([receiver], [], [], 0)[0]):
            return found


def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    """Any JSON survives, also text that is no valid Unicode, and a message of many times the socket's buffer."""
    bodies = [{"a": i, "text": "\udc80é", "none": None} for i in range(100)] + [{"big": "x" * (5 << 20)}, {"last": 1}]
    for body in bodies:
        assert pair[0].send(body)
    assert pair[0].backlog
    assert [item.body for item in move(*pair)] == bodies


def test_descriptors_arrive_with_their_message(pair: Pair) -> None:
    """Each message gets its own descriptors, also when it waited behind a big one, and the sender keeps its own."""
    files = [os.memfd_create(f"file-{i}") for i in range(3)]
    for i, fd in enumerate(files):
        os.write(fd, b"%d" % i)
        pair[0].send({"pad": "x" * (1 << 20)})
        pair[0].send({"file": i}, [fd])
    for fd in files:
        os.close(fd)
    received = [item for item in move(*pair) if "file" in item.body]
    assert [(item.body["file"], os.pread(item.fds[0], 9, 0)) for item in received] == [(i, b"%d" % i) for i in range(3)]
    for item in received:
        assert os.get_inheritable(item.fds[0]) is False
        os.close(item.fds[0])


def test_a_full_socket_wakes_the_owner(pair: Pair) -> None:
    """What does not fit is kept, and the owner's selector hears of it."""
    pair[0].send({"big": "x" * (5 << 20)})
    assert select.select([pair[0].wake_fd], [], [], 0)[0]
    pair[0].clear_wake()
    assert not select.select([pair[0].wake_fd], [], [], 0)[0]


def test_without_a_backlog_the_peer_reads_everything_whatever_becomes_of_us(pair: Pair) -> None:
    """The backlog ends when the kernel has the last byte, and the peer reads that after our end."""
    assert not pair[0].backlog
    pair[0].send({"big": "x" * (5 << 20)})
    pair[0].send({"last": 1})
    assert pair[0].backlog
    bodies = []
    while pair[0].backlog:
        pair[0].flush()
        bodies += [item.body for item in pair[1].receive()[0]]
    pair[0].close()
    bodies += [item.body for item in pair[1].receive()[0]]
    assert [list(body) for body in bodies] == [["big"], ["last"]]


def test_what_another_thread_is_sending_is_no_backlog() -> None:
    """A thread asks for the backlog while another one is in the middle of a message that the socket takes at once."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    class Asked(socket.socket):
        def sendmsg(self, *args: Any) -> int:
            asking.start()
            asking.join(0.2)
            return super().sendmsg(*args)

    found: list[bool] = []
    with far:
        channel = Channel(Asked(fileno=near.detach()))
        asking = threading.Thread(target=lambda: found.append(channel.backlog))
        channel.send({"small": 1})
        asking.join(10.0)
        channel.close()
    assert found == [False]


def test_a_channel_may_have_limits() -> None:
    """Longer messages and any descriptors are refused before they are taken in."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with far:
        channel = Channel(near, most_bytes=100)
        far.sendall(struct.pack("<Q", 2) + b"{}" + struct.pack("<Q", 101))
        with pytest.raises(WriterError, match="101 bytes announced"):
            channel.receive()
        channel.close()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with far:
        channel = Channel(near, takes_fds=False)
        socket.send_fds(far, [struct.pack("<Q", 2)], [far.fileno()])
        with pytest.raises(WriterError, match="descriptors"):
            channel.receive()
        channel.close()


def test_the_end_of_the_peer_comes_after_its_last_message(pair: Pair) -> None:
    """What was sent before the end still arrives, and sending to a closed peer is no error."""
    pair[0].send({"last": 1})
    pair[0].close()
    messages, is_open = pair[1].receive()
    assert [item.body for item in messages] == [{"last": 1}]
    assert not is_open
    pair[1].send({"to": "the closed"})
    assert not pair[1].backlog
    assert not pair[0].send({"from": "the closed"})


def test_closing_lets_go_of_everything(pair: Pair) -> None:
    """Descriptors that were never sent, or never asked for, are closed; the fixture of the folder counts them."""
    fd = os.memfd_create("x")
    pair[0].send({"big": "x" * (5 << 20)})
    pair[0].send({"file": 1}, [fd])
    pair[1].send({"file": 2}, [fd])
    os.close(fd)
    pair[0].close()
    pair[0].close()
    pair[1].close()


def test_descriptors_of_half_a_message_are_closed() -> None:
    """A peer that dies in the middle of a message leaves nothing open here."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    fd = os.memfd_create("x")
    socket.send_fds(far, [struct.pack("<Q", 100)], [fd])
    os.close(fd)
    far.close()
    channel = Channel(near)
    assert channel.receive() == ([], False)
    channel.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, struct.pack("<Q", 4) + b"null", struct.pack("<Q", 3) + b"{x}", struct.pack("<Q", 9) + b'{"fds":2}'],
    ids=["length", "no message", "no JSON", "no descriptors"],
)
def test_something_else_than_messages_is_refused(garbage: bytes) -> None:
    """A stranger at the other end is an error, not a hang or a crash."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with far:
        channel = Channel(near)
        far.send(garbage)
        with pytest.raises(WriterError):
            channel.receive()
        channel.close()
