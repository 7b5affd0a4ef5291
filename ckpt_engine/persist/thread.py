"""The writer as a thread of the trainer: where no process can be started, or when asked for."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from typing import Self

from ckpt_engine.errors import WriterError
from ckpt_engine.observe.events import Event
from ckpt_engine.persist import protocol
from ckpt_engine.persist.client import Client, never
from ckpt_engine.persist.job import ErrorRecord, WriterConfig
from ckpt_engine.persist.wire import Body, decode, encode
from ckpt_engine.persist.worker import Worker, refusal, unfinished

ANSWER_SECONDS = 60.0


class ThreadWriter(Client):
    """A client whose writer shares the trainer's process: the same messages and code, but it dies with the trainer.

    At the interpreter's exit it still finishes its jobs, for at most `drain_seconds`.
    """

    def __init__(self, config: WriterConfig) -> None:
        super().__init__(config)
        self._config = config
        self._refused: ErrorRecord | None = None
        self._closing = False
        self._closed = threading.Event()
        self._worker = Worker(config, self._hear, self._ended)

    @classmethod
    def start(cls, config: WriterConfig, emit: Callable[[Event], None] | None = None) -> Self:
        """Start the thread; see `open_client` for what is raised, and `ProcessWriter.start` for `emit`."""
        client = cls(config)
        client._worker.start()
        timeout = config.lease_wait_seconds + ANSWER_SECONDS
        try:
            if not client._wait_for_answer(timeout, emit):
                raise WriterError(f"the writer thread does not answer after {timeout:.0f} s; storage: {config.url}")
        except BaseException:
            client._worker.skip_waiting()
            raise
        if client._refused is not None:
            raise client._refused.exception()
        atexit.register(client._finish_at_exit)
        return client

    def close(self, timeout: float, *, failed: bool = False, hurries: Callable[[], bool] = never) -> bool:  # noqa: ARG002 - it ends with the trainer
        if self._foreign:
            return True
        self._closing = True
        atexit.unregister(self._finish_at_exit)
        self._worker.finish()
        ended = self._wait_for_the_end(self._closed, timeout, hurries)
        if not ended:
            self._mailbox.lose(ErrorRecord("CKPT603", f"not durable {timeout:.0f} s after closing"), expected=True)
        return ended

    @property
    def _goes_on_with_copies(self) -> str:
        return "the writer thread goes on with it as long as this process lives, and then the next run does"

    def _leave_copies(self) -> bool:
        return True

    @property
    def flushed(self) -> bool:
        return True

    def _send(self, body: Body, fds: Sequence[int] = ()) -> None:
        # Through JSON like everywhere else: nothing the trainer goes on using is shared with the writer.
        self._worker.put(decode(encode(body)), tuple(os.dup(fd) for fd in fds))

    def _hear(self, body: Body) -> None:
        match body["kind"]:
            case protocol.STARTED:
                self._started(body)
                self._answered.set()
            case protocol.REFUSED:
                self._refused = refusal(body)
            case protocol.COPYING:
                self._copies_remain(body)
            case protocol.CLOSED:
                if body["unfinished"]:
                    self._mailbox.hear(protocol.event(unfinished(body, self._goes_on_with_copies)))
                    self._closed.set()
            case _:
                self._mailbox.hear(decode(encode(body)))
        self._news.set()

    def _ended(self, broken: str | None) -> None:
        message = f"the writer thread broke down:\n{broken}" if broken else "the writer thread has ended"
        if not self._answered.is_set() and self._refused is None:
            self._refused = ErrorRecord(WriterError.code, message)
        self._mailbox.lose(ErrorRecord(WriterError.code, message), expected=self._closing and not broken)
        self._answered.set()
        self._news.set()
        self._closed.set()

    def _finish_at_exit(self) -> None:
        self.close(self._config.drain_seconds)
