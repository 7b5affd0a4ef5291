"""Writer processes that start in milliseconds: forks of one that has imported what a writer needs and no test.

A process started here is one like any other: a child of the process that asked for it, in a session of its own, with
its environment of that moment. Trainers that are processes of their own start real ones, and so does each test that
sets another interpreter or another entry.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 60.0
IMPORTS = ("ckpt_engine.writer.server", "ckpt_engine.writer.job_queue", "xxhash", "zstandard")
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x8000
_MESSAGE_BYTES = 200_000


class Forked(subprocess.Popen[bytes]):
    """What `subprocess.Popen` would be for a child that another one has made."""

    def __init__(self, pid: int, stderr: int) -> None:
        self.args = [sys.executable]
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = self.stdout = None
        self.stderr = os.fdopen(stderr, "rb")
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._input = None
        self._communication_started = False


def start(theirs: socket.socket) -> Forked:
    """A writer process at the other end of the socket."""
    reading, writing = os.pipe()
    try:
        socket.send_fds(_server(os.getpid()), [json.dumps(dict(os.environ)).encode()], [theirs.fileno(), writing])
    finally:
        os.close(writing)
    return Forked(int(_server(os.getpid()).recv(64)), reading)


def patch(launch: Any) -> None:
    """Let this process start its writers here, unless it has set how they start."""
    if _CLONE is None:
        return
    usual, interpreter, spawn, owner = launch.ENTRY, sys.executable, subprocess.Popen, os.getpid()

    class Starting:
        """`subprocess` as `launch` sees it."""

        PIPE, DEVNULL, TimeoutExpired = subprocess.PIPE, subprocess.DEVNULL, subprocess.TimeoutExpired

        @staticmethod
        def Popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            if command[:-1] != [interpreter, "-P", str(usual)] or os.getpid() != owner:
                return spawn(command, **options)
            with socket.socket(fileno=os.dup(int(command[-1]))) as theirs:
                return start(theirs)

    _server(owner)  # at once: a test may count what it leaves open
    launch.subprocess = Starting


@cache
def _server(_pid: int) -> socket.socket:
    """The process that forks, a child of this one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = [sys.executable, "-m", __name__, str(its.fileno())]
        process = subprocess.Popen(command, pass_fds=[its.fileno()], cwd=REPOSITORY)
    ours.settimeout(PATIENCE_SECONDS)
    atexit.register(_end, ours, process)
    return ours


def _end(server: socket.socket, process: subprocess.Popen[bytes]) -> None:
    server.shutdown(socket.SHUT_RDWR)  # a forked process may have this end too
    server.close()
    process.wait(PATIENCE_SECONDS)


def _serve(requests: socket.socket) -> None:
    """Make a sibling for each request until the other end is closed. This process has one thread."""
    for name in IMPORTS:
        importlib.import_module(name)
    clone = ctypes.CDLL(None, use_errno=True).syscall
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 2)
        if not message:
            return
        pid = clone(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            requests.close()
            _live(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _live(environment: dict[str, str], sock: int, stderr: int) -> None:
    """Be a writer process, to its end."""
    status = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number, descriptor in enumerate((null, null, stderr)):
            os.dup2(descriptor, number)
        for descriptor in (null, stderr):
            if descriptor > 2:
                os.close(descriptor)
        os.chdir("/")
        os.environ.clear()
        os.environ.update(environment)
        random.seed()
        from ckpt_engine.writer.server import main

        status = main([str(sock)])
    except BaseException:  # noqa: BLE001 - the process ends with it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
