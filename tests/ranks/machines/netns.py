"""Machines of a cluster as namespaces: each with a name, processes, shared memory, an address and a link to cut.

They share one file system, as machines with the same mount do. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from tests.ranks.launch import PATIENCE_SECONDS, REPOSITORY, Launcher

COMMAND_SECONDS = 30.0
LINK = "eth0"
"""How each machine calls its link."""
_HERE = 254
_IDLE = "sleep"
_BOOT = f"""
hostname "$1" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$2" /etc/hosts || exit 99
echo ready
{_IDLE} infinity
"""
"""The shell is the first process of the machine: what loses its parent is reaped by it."""


class Nodes:
    """So many machines on one bridge; a context manager. This process reaches them too.

    Raises:
        PermissionError: this process may not make namespaces, or there is no `ip`.
    """

    def __init__(self, count: int) -> None:
        self._tag = f"ck{os.getpid() % 100_000}"
        self._net = f"10.78.{os.getpid() % 250 + 1}"
        self._count = count
        self._booted: list[subprocess.Popen[str]] = []
        self._first: list[psutil.Process] = []

    def __enter__(self) -> Self:
        if not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
            raise PermissionError("one of `ip` (iproute2), `unshare`, `nsenter` (util-linux) is not installed")
        handle, hosts = tempfile.mkstemp(prefix=f"hosts-{self._tag}-")
        self._hosts = Path(hosts)
        with os.fdopen(handle, "w") as file:
            file.write("127.0.0.1 localhost\n")
            file.writelines(f"{self.address(node)} {self.name(node)}\n" for node in range(self._count))
        self._hosts.chmod(0o644)
        try:
            _ip("link", "add", f"br-{self._tag}", "type", "bridge")
            _ip("addr", "add", f"{self._net}.{_HERE}/24", "dev", f"br-{self._tag}")
            _ip("link", "set", f"br-{self._tag}", "up")
            for node in range(self._count):
                self._add(node)
                self._boot(node)
        except (subprocess.CalledProcessError, PermissionError) as err:
            self._remove()
            raise PermissionError(f"namespaces cannot be made here: {getattr(err, 'stderr', err)}") from err
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def name(self, node: int) -> str:
        """As the machine calls itself, and the others call it."""
        return f"{self._tag}-{node}"

    def address(self, node: int) -> str:
        """Of a machine."""
        return f"{self._net}.{node + 1}"

    def command(self, node: int) -> list[str]:
        """What goes before a command that is to run on a machine, in the repository."""
        where = ["--net", "--uts", "--mount", "--pid", f"--wd={REPOSITORY}"]
        return ["nsenter", "--target", str(self._first[node].pid), *where]

    def processes(self, node: int) -> list[psutil.Process]:
        """All that run there, but for those that make it a machine."""
        first = self._first[node]
        theirs, found = _namespace(first.pid), []
        for one in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, OSError):
                if _namespace(one.pid) == theirs and one != first and one.name() != _IDLE:
                    found += [one] if one.status() != psutil.STATUS_ZOMBIE else []
        return found

    def lose(self, node: int, keep: Collection[int] = ()) -> None:
        """Power it off and on: whatever ran there is gone, but for these processes."""
        deadline = time.monotonic() + COMMAND_SECONDS
        while doomed := [one for one in self.processes(node) if one.pid not in keep]:
            assert time.monotonic() < deadline, f"they do not die: {doomed}"
            for one in doomed:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            time.sleep(0.005)

    def cut(self, node: int) -> None:
        """Unplug a machine."""
        _ip("link", "set", self._link(node), "down")

    def mend(self, node: int) -> None:
        """Plug it in again."""
        _ip("link", "set", self._link(node), "up")

    def part(self, node: int, other: int) -> None:
        """What a machine sends to another one vanishes; both reach all others."""
        _ip("-n", self.name(node), "route", "add", "blackhole", f"{self.address(other)}/32")

    def join(self, node: int, other: int) -> None:
        """Undo `part`."""
        _ip("-n", self.name(node), "route", "del", "blackhole", f"{self.address(other)}/32")

    def _link(self, node: int) -> str:
        return f"{self._tag}v{node}"

    def _add(self, node: int) -> None:
        name, link = self.name(node), self._link(node)
        _ip("netns", "add", name)
        _ip("link", "add", link, "type", "veth", "peer", "name", LINK, "netns", name)
        _ip("link", "set", link, "master", f"br-{self._tag}", "up")
        _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", LINK)
        _ip("-n", name, "link", "set", LINK, "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def _boot(self, node: int) -> None:
        spaces = ["--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        shell = ["sh", "-c", _BOOT, "sh", self.name(node), str(self._hosts)]
        command = ["ip", "netns", "exec", self.name(node), "unshare", *spaces, *shell]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._booted.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise PermissionError(f"a machine does not start: status {process.wait(COMMAND_SECONDS)}")
        self._first += psutil.Process(process.pid).children()

    def _remove(self) -> None:
        for process in self._booted:
            process.kill()  # all that runs there ends with its first process
            process.wait(COMMAND_SECONDS)
            assert process.stdout is not None
            process.stdout.close()
        for node in range(self._count):
            with suppress(subprocess.CalledProcessError):
                _ip("link", "del", self._link(node))
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self.name(node))
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"br-{self._tag}")
        self._hosts.unlink(missing_ok=True)


class NodeLauncher(Launcher):
    """Starts the ranks of one machine, there.

    Args:
        module: of the ranks, see `Launcher`.
        node: the machine.
    """

    def __init__(self, module: str, nodes: Nodes, node: int) -> None:
        self._nodes, self._node = nodes, node
        self._server = subprocess.Popen(
            [*nodes.command(node), sys.executable, "-W", "ignore", "-m", "tests.ranks.launch", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self,
        job: dict[str, Any],
        size: int,
        log: Path,
        patience: float = PATIENCE_SECONDS,
        *,
        first: int = 0,
        world: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[int]:
        """The process ids of the ranks, as this process sees them; see `Launcher.start`."""
        within = super().start(job, size, log, patience, first=first, world=world, environment=environment)
        outside = {_within(one.pid): one.pid for one in self._starter().children()}
        return [outside[pid] for pid in within]

    def lose(self) -> None:
        """The machine loses its power, but for who starts its ranks."""
        self._nodes.lose(self._node, keep={self._starter().pid})

    def _starter(self) -> psutil.Process:
        (found,) = psutil.Process(self._server.pid).children()
        return found


def _namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())


def _within(pid: int) -> int:
    """A process id as the process itself knows it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise LookupError(f"process {pid} has no NSpid")


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    return done.stdout
