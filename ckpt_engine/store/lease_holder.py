"""Who may write a run: the process that has its lease."""

from __future__ import annotations

import os
import socket
import sys
import time
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from ckpt_engine.observe.clock import started_ticks
from ckpt_engine.observe.number_types import Seconds, Size
from ckpt_engine.store.sealed_json import parsed

_COMMAND_CHARACTERS = 10_000


class Lease(AbstractContextManager["Lease"]):
    """The right to write and to collect, until `release` or the end of the process.

    `check` MUST be called before something is deleted: a lease that has to be renewed may be lost meanwhile.
    """

    @abstractmethod
    def check(self) -> None:
        """Raises `LeaseHeldError` if the lease is no longer ours."""

    @abstractmethod
    def release(self) -> None:
        """Give it back; twice is fine."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Who holds a lease: shown to those who are refused. `started` is wall-clock seconds, for display."""

    pid: Size
    host: str
    started: Seconds
    command: str

    @classmethod
    def current(cls) -> Self:
        """This process, from now on."""
        command = " ".join([sys.executable, *sys.argv])[:_COMMAND_CHARACTERS]
        return cls(os.getpid(), socket.gethostname(), time.time(), command)

    def is_process_of(self, other: LeaseHolder) -> bool:
        """Whether both are the same process, at whatever time."""
        return (self.pid, self.host) == (other.pid, other.host)

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host} since {since} ({self.command})"


def parse_holder(text: bytes, where: str) -> LeaseHolder | None:
    """Who a lease file with this text names; None if it was given back.

    Raises:
        CorruptError: it is damaged.
    """
    if not text.strip(b"{} \n"):
        return None
    return parsed(text, where, LeaseHolder, "the next start writes it again")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process as only its own machine knows it: a new process of the same number is another one."""

    boot: str
    namespace: str
    pid: int
    ticks: int

    @classmethod
    def current(cls) -> Self | None:
        """This process; None where the system does not tell."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process that has this number here; None where the system does not tell, or there is none."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(boot, str(Path("/proc/self/ns/pid").readlink()), pid, started_ticks(pid))
        except OSError:
            return None

    def is_dead(self) -> bool:
        """Whether the process has ended; False where that cannot be known from here."""
        here = ProcessIdentity.current()
        if here is None or (here.boot, here.namespace) != (self.boot, self.namespace):
            return False
        try:
            return started_ticks(self.pid) != self.ticks
        except FileNotFoundError:
            return True
        except OSError:
            return False
