"""A writer that is being started on a thread of its own, because its lease may have to wait for another one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.persist.client import WriterClient

OpenWriter = Callable[[bool, Callable[[Event], None]], WriterClient]
"""Starts a writer, with a memory tier or without; tells events to the second argument, on the calling thread."""


class Starting:
    """Begins to start a writer at once.

    Args:
        open_writer: may take as long as waiting for the lease does.
        memory: its first argument.
    """

    def __init__(self, open_writer: OpenWriter, memory: bool) -> None:
        self.events: list[Event] = []
        self._client: WriterClient | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(open_writer, memory), name="ckpt-start", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return not self._thread.is_alive()

    def wait(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for it."""
        self._thread.join(timeout)

    def result(self) -> WriterClient:
        """The client, once `done`.

        Raises:
            CkptError: why it did not start.
        """
        if self._error is not None:
            raise self._error
        assert self._client is not None
        return self._client

    def _run(self, open_writer: OpenWriter, memory: bool) -> None:
        try:
            self._client = open_writer(memory, self.events.append)
        except Exception as err:  # noqa: BLE001 - raised on the training thread
            self._error = err


def outlives_the_trainer(client: WriterClient, emit: Callable[[Event], None]) -> bool:
    """Whether a writer can be a memory tier; else `emit` says why not."""
    from ckpt_engine.persist.thread import ThreadWriter

    if isinstance(client, ThreadWriter):
        emit(Notice("WARNING", "there is no memory tier: a writer thread ends with the trainer"))
        return False
    return True
