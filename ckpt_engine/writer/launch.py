"""Starts a writer as a process of its own, else as a thread of the trainer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from ckpt_engine.copy.job import ErrorRecord, WriterConfig
from ckpt_engine.errors import WriterError
from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.undo import on_failure
from ckpt_engine.writer import channel
from ckpt_engine.writer.channel import Channel, decode, duplicates, encode, pidfd_of, readable
from ckpt_engine.writer.client import REAP_SECONDS, WriterClient, WriterLife
from ckpt_engine.writer.job_queue import JobQueue
from ckpt_engine.writer.messages import Body, Kind

ENTRY = Path(__file__).with_name("__main__.py")
_TAIL_BYTES = 8192
_LOOK_SECONDS = 5.0
_LOOKS = 2
"""A writer is reported as stopped when it is found so that often in a row: a suspended job continues bit by bit."""


class ThreadWriter(WriterClient):
    """A client whose writer shares the trainer's process: the same messages and code, but it dies with the trainer.

    At the interpreter's exit it still finishes its jobs, for at most `drain_seconds`.
    """

    _who = "the writer thread"
    _continues = "continues it as long as this process lives"

    def __init__(self, config: WriterConfig) -> None:
        super().__init__(config.url)
        self._queue = JobQueue(config, self._hear, self._ended)

    @classmethod
    def start(cls, config: WriterConfig, emit: Callable[[Event], object] | None = None) -> Self:
        """Start the thread; see `open_client` for what is raised, and `ProcessWriter.start` for `emit`."""
        client = cls(config)
        client._queue.start()
        with on_failure(client._queue.skip_waiting):
            client._begin(config, emit)
        return client

    def _finish(self, why: str | None, *, failed: bool, keeps: bool) -> None:  # noqa: ARG002 - it ends with the trainer
        self._queue.finish(failed=failed, why=why)

    @property
    def flushed(self) -> bool:
        return True

    def _send(self, body: Body, fds: Sequence[int] = ()) -> None:
        # Through JSON like everywhere else: nothing the trainer keeps using is shared with the writer.
        self._queue.put(decode(encode(body)), duplicates(fds))

    def _ended(self, broken: str | None) -> None:
        message = f"the writer thread broke down:\n{broken}" if broken else "the writer thread has ended"
        self._no_more(message, WriterError(message), expected=self._life >= WriterLife.CLOSING and not broken)
        self._closed.set()


class CannotSpawnError(WriterError):
    """A writer process cannot be started here, while a thread might do."""


class WatchedProcess:
    """The process of a writer: what it writes to its stderr, and its end. `process`: its stderr is a pipe.

    Attributes:
        process: for its number, and to kill it.
        signs: descriptors that can be read where it has written something, or has ended.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        self.process = process
        self._stderr = process.stderr
        self._tail = b""
        """What it has written last."""
        self._exit_fd = pidfd_of(process.pid)
        self.signs = {self._stderr.fileno(), *([] if self._exit_fd is None else [self._exit_fd])}

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def read(self, ready: set[int]) -> None:
        """Take what it has written, if that is among what is ready."""
        stderr = self._stderr.fileno()
        if stderr in ready:
            text = os.read(stderr, 1 << 16)
            self._tail = (self._tail + text)[-_TAIL_BYTES:]
            if not text:
                self.signs.discard(stderr)

    def has_ended(self, ready: set[int], *, connected: bool) -> bool:
        """Whether it has or, where that cannot be watched, has closed its socket."""
        return not connected if self._exit_fd is None else self._exit_fd in ready

    def reap(self) -> tuple[int | None, str]:
        """Its exit status, None: it hangs; and what it has written last."""
        try:
            status: int | None = self.process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        return status, self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        """Watch it no more."""
        if self._exit_fd is not None:
            os.close(self._exit_fd)
        self._stderr.close()


class ProcessWriter(WriterClient):
    """A client whose writer is a process that outlives the trainer until everything it was given is durable.

    Args:
        process: the writer process; its stderr is a pipe.
        channel: connected to it.
    """

    def __init__(self, config: WriterConfig, process: subprocess.Popen[bytes], channel: Channel) -> None:
        super().__init__(config.url)
        self._watched = WatchedProcess(process)
        self._channel = channel
        self._leaving = False
        # A daemon: the trainer's exit must not wait for it. It only ever waits for its descriptors.
        self._listener = threading.Thread(target=self._listen, name="ckpt-writer-client", daemon=True)

    @classmethod
    def start(cls, config: WriterConfig, emit: Callable[[Event], object] | None = None) -> Self:
        """Start the process and wait until it holds the lease; see `open_client` for what else is raised.

        Args:
            emit: takes what it says meanwhile; None: that is polled later.

        Raises:
            CannotSpawnError: processes, their sockets or their imports do not work here.
        """
        process, channel = _spawn()
        client = cls(config, process, channel)
        client._listener.start()
        folders = [folder for folder in sys.path if folder and Path(folder).is_absolute()]
        channel.send({"kind": Kind.START, "config": asdict(config), "path": folders})
        try:
            client._begin(config, emit)
        except BaseException:
            process.kill()
            client._listener.join(REAP_SECONDS)
            raise
        return client

    @property
    def pid(self) -> int:
        """The writer's process id."""
        return self._watched.process.pid

    @property
    def _who(self) -> str:
        return f"the writer process {self.pid}"

    def close(self, timeout: float, **how: Any) -> bool:
        closed = super().close(timeout, **how)
        if closed and self._life is not WriterLife.ALONE:
            self._listener.join(REAP_SECONDS)
        else:
            self._channel.wake()
        return closed

    def _finish(self, why: str | None, *, failed: bool, keeps: bool) -> None:
        self._leaving = keeps
        self._channel.send({"kind": Kind.LEAVE if keeps else Kind.CLOSE, "failed": failed, "why": why})

    @property
    def flushed(self) -> bool:
        return not (self.alive and self._channel.backlog)

    def _send(self, body: Body, fds: Sequence[int] = ()) -> None:
        self._channel.send(body, fds)

    def _listen(self) -> None:
        """The listener thread: hears the writer until it has ended, then reaps it."""
        try:
            self._hear_all()
            self._reap()
        except Exception as err:  # noqa: BLE001 - every open job learns of it; such a writer is of no use any more
            self._watched.process.kill()
            self._reap(because=f"sent an invalid message: {ErrorRecord.of(err).message}")
        finally:
            self._channel.close()
            self._watched.close()
            self._closed.set()

    def _hear_all(self) -> None:
        """Hear until the process has ended."""
        connected, looks, look_at = True, 0, time.monotonic() + _LOOK_SECONDS
        while True:
            if connected and self._lost is not None:  # the trainer has left it
                self._channel.close()
                connected = False
            if connected:
                received, connected, ready = self._channel.exchange(_LOOK_SECONDS, *self._watched.signs)
                for item in received:
                    self._hear(item.body)
                if not connected and self._leaving:  # what is to become durable is, and the rest is served
                    self._reached(WriterLife.ALONE)
                    self._closed.set()
            else:
                ready = readable(_LOOK_SECONDS, *self._watched.signs)
            if time.monotonic() >= look_at:
                looks, look_at = looks + 1 if self._watched.is_stopped else 0, time.monotonic() + _LOOK_SECONDS
                if looks == _LOOKS:
                    self._say_stopped()
            self._watched.read(ready)
            if self._watched.has_ended(ready, connected=connected):
                return

    def _say_stopped(self) -> None:
        """Nothing else does: its socket takes what it is sent, and snapshots are busy."""
        text = f"{self._who} is stopped by a signal, and no snapshot becomes durable; `kill -CONT"
        self._hear(channel.event(Notice("WARNING", f"{text} {self.pid}` resumes it")))

    def _reap(self, because: str | None = None) -> None:
        status, tail = self._watched.reap()
        ended = because or _describe(status)
        message = f"{self._who} {ended}" + (f":\n{tail}" if tail else "")
        early = CannotSpawnError(f"{message} (before it was ready)")
        self._no_more(message, early, expected=self._life >= WriterLife.CLOSING and status == 0)


def _spawn() -> tuple[subprocess.Popen[bytes], Channel]:
    """Start the process with one end of a socket pair.

    Raises:
        CannotSpawnError: something it needs does not exist here.
    """
    if not sys.executable or not ENTRY.is_file():
        raise CannotSpawnError("there is no Python interpreter, or no source file, to start a process with")
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as err:
        raise CannotSpawnError(f"cannot make a socket pair: {err}") from err
    with theirs:
        try:
            process = subprocess.Popen(
                # -P: the working directory and the script's folder are not searched for modules.
                [sys.executable, "-P", str(ENTRY), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                cwd="/",
                start_new_session=True,  # Ctrl-C in the terminal reaches the trainer, not the snapshot in flight
            )
            return process, Channel(ours)
        except OSError as err:
            ours.close()
            raise CannotSpawnError(f"cannot start {sys.executable}: {err}") from err


def _describe(status: int | None) -> str:
    if status is None:
        return "hangs"
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"ended with status {status}" if status else "has ended"


def open_client(config: WriterConfig, *, thread: bool, emit: Callable[[Event], object]) -> WriterClient:
    """Start a writer: a process, or a thread if asked for or where a process cannot be started (`emit` then says so).

    Raises:
        LeaseHeldError: another writer holds the run's lease; names it.
        ForeignError, CorruptError, NewerFormatError: the folder is not one to write into.
        StorageError: it cannot be written.
        WriterError: the writer does not answer.
    """
    config = completed(config)
    if thread:
        return ThreadWriter.start(config, emit)
    try:
        return ProcessWriter.start(config, emit)
    except CannotSpawnError as err:
        emit(Notice("WARNING", f"snapshots are written by a thread of the trainer: {err.message}"))
        return ThreadWriter.start(config, emit)


def completed(config: WriterConfig) -> WriterConfig:
    """`config` with the trainer as the holder, and with a path that means the same from every working directory."""
    # Arguments may hold secrets, and the lease is readable.
    me = replace(LeaseHolder.current(), command=" ".join([sys.executable, *sys.argv[:1]]))
    tiers = tuple(replace(tier, url=_absolute(tier.url)) for tier in config.tiers)
    return replace(config, url=_absolute(config.url), tiers=tiers, holder=config.holder or me)


def _absolute(url: str) -> str:
    return url if "://" in url else str(Path(url).expanduser().absolute())
