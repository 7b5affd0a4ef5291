"""A network with a delay and losses to a server on this machine, made of two tunnels.

It needs root, and no kernel module. Packets go from one tunnel to the other through this process, which lets them wait,
and drops some.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

SERVER_HOST = "10.199.77.2"
_CLIENT_HOST = "10.199.77.1"
_SPACE = "ckptfar"
_WAIT_SECONDS = 20.0
_PACKET_BYTES = 1 << 16
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def can_run() -> bool:
    """Whether this machine lets us make one."""
    return os.geteuid() == 0 and Path("/dev/net/tun").exists() and shutil.which("ip") is not None


class FarNetwork:
    """The network, as long as the context lasts.

    Args:
        rtt_seconds: there and back.
        loss: share of the packets that do not arrive, in each direction.

    Attributes:
        run: the command after which a server is started in it; it listens on `SERVER_HOST`.
    """

    run = ("ip", "netns", "exec", _SPACE)

    def __init__(self, rtt_seconds: float, loss: float) -> None:
        self._arguments = (str(rtt_seconds), str(loss))

    def __enter__(self) -> Self:
        root = Path(__file__).resolve().parent.parent
        command = [sys.executable, "-m", "benchmarks.far_network", *self._arguments]
        self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        timer = threading.Timer(_WAIT_SECONDS, self._process.kill)
        timer.start()
        ready = self._process.stdout.readline()
        timer.cancel()
        if not ready:
            self.__exit__(None, None, None)
            raise RuntimeError("the far network could not be made")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(_WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _tunnel(name: str) -> int:
    made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(made, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return made


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, timeout=_WAIT_SECONDS)


def _carry(ends: tuple[int, int], delay_seconds: float, loss: float) -> None:
    """Carry packets both ways until standard input ends."""
    drawn = random.Random(1).random
    under_way: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    across = {ends[0]: ends[1], ends[1]: ends[0]}
    while True:
        now = time.monotonic()
        for end, packets in under_way.items():
            while packets and packets[0][0] <= now:
                _send(end, packets.popleft()[1])
        nearest = min([packets[0][0] for packets in under_way.values() if packets], default=now + 1.0)
        ready, _, _ = select.select([*ends, 0], (), (), max(0.0, nearest - time.monotonic()))
        if 0 in ready:
            return
        for end in ready:
            packet = os.read(end, _PACKET_BYTES)
            if drawn() >= loss:
                under_way[across[end]].append((time.monotonic() + delay_seconds, packet))


def _send(end: int, packet: bytes) -> None:
    try:
        os.write(end, packet)
    except BlockingIOError:
        return  # its queue is full: networks drop packets, too


def _main() -> None:
    rtt_seconds, loss = map(float, sys.argv[1:])
    subprocess.run(("ip", "netns", "del", _SPACE), stderr=subprocess.DEVNULL, timeout=_WAIT_SECONDS)
    _ip("netns", "add", _SPACE)
    near, far = _tunnel("ckptnear"), _tunnel("ckptfar")
    _ip("link", "set", "ckptfar", "netns", _SPACE)
    _ip("addr", "add", _CLIENT_HOST, "peer", SERVER_HOST, "dev", "ckptnear")
    _ip("link", "set", "ckptnear", "up")
    _ip("-n", _SPACE, "addr", "add", SERVER_HOST, "peer", _CLIENT_HOST, "dev", "ckptfar")
    _ip("-n", _SPACE, "link", "set", "ckptfar", "up")
    print("ready", flush=True)
    try:
        _carry((near, far), rtt_seconds / 2, loss)
    finally:
        _ip("netns", "del", _SPACE)


if __name__ == "__main__":
    _main()
