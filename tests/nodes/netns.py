"""Nodes of a cluster as network namespaces on one bridge, each with an address and a link to cut. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from typing import Self

from tests.ranks.launch import REPOSITORY, Launcher

COMMAND_SECONDS = 30.0


class Nodes:
    """So many nodes; a context manager.

    Raises:
        PermissionError: this process may not make namespaces, or there is no `ip`.
    """

    def __init__(self, count: int) -> None:
        self._tag = f"ck{os.getpid() % 100_000}"
        self._net = f"10.78.{os.getpid() % 250 + 1}"
        self._count = count

    def __enter__(self) -> Self:
        if shutil.which("ip") is None:
            raise PermissionError("the program `ip` (iproute2) is not installed")
        try:
            _ip("link", "add", f"br-{self._tag}", "type", "bridge")
            _ip("link", "set", f"br-{self._tag}", "up")
            for node in range(self._count):
                self._add(node)
        except subprocess.CalledProcessError as err:
            self._remove()
            raise PermissionError(f"network namespaces cannot be made here: {err.stderr.strip()}") from err
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def address(self, node: int) -> str:
        """Of a node."""
        return f"{self._net}.{node + 1}"

    def command(self, node: int) -> list[str]:
        """What goes before a command that is to run on a node."""
        return ["ip", "netns", "exec", f"{self._tag}-{node}"]

    def cut(self, node: int) -> None:
        """Unplug a node."""
        _ip("link", "set", f"{self._tag}v{node}", "down")

    def mend(self, node: int) -> None:
        """Plug it in again."""
        _ip("link", "set", f"{self._tag}v{node}", "up")

    def _add(self, node: int) -> None:
        name, link = f"{self._tag}-{node}", f"{self._tag}v{node}"
        _ip("netns", "add", name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", link, "master", f"br-{self._tag}", "up")
        _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for node in range(self._count):
            with suppress(subprocess.CalledProcessError):
                _ip("link", "del", f"{self._tag}v{node}")
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", f"{self._tag}-{node}")
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"br-{self._tag}")


class NodeLauncher(Launcher):
    """Starts the ranks of one node, there."""

    def __init__(self, module: str, nodes: Nodes, node: int) -> None:
        self._server = subprocess.Popen(
            [*nodes.command(node), sys.executable, "-W", "ignore", "-m", "tests.ranks.launch", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=COMMAND_SECONDS)
