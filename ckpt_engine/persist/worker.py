"""One thread that feeds messages to a writer, first in, first out."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence

from ckpt_engine.errors import CkptError
from ckpt_engine.observe.events import Notice
from ckpt_engine.persist import protocol
from ckpt_engine.persist.job import ErrorRecord, WriterConfig
from ckpt_engine.persist.wire import Body
from ckpt_engine.persist.writer import Emit, Writer

_IDLE_SECONDS = 60.0


class Worker:
    """Opens a writer, lets it handle messages in order, and closes it.

    `put`, `finish` and `skip_waiting` may be called from any thread and never wait. The queue is bounded by the arena:
    a trainer sends no job without a free slot.

    Args:
        emit: takes the messages to the trainer, on any thread; answers `start` with `started` or `refused`.
        on_exit: called once on this thread, last; with the text of the error if the writer broke down.

    `opened` says whether the lease was taken, `ended` whether the writer is closed.
    """

    def __init__(self, config: WriterConfig, emit: Emit, on_exit: Callable[[str | None], None]) -> None:
        self._writer = Writer(config, emit)
        self._emit = emit
        self._on_exit = on_exit
        self._todo: deque[tuple[Body, Sequence[int]]] = deque()
        self._finishing = False
        self._changed = threading.Condition()
        self.opened = False
        self.ended = False
        self._thread = threading.Thread(target=self._run, name="ckpt-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, body: Body, fds: Sequence[int] = ()) -> None:
        """Queue a message; the writer owns `fds` from now on."""
        with self._changed:
            self._todo.append((body, fds))
            self._changed.notify()

    def finish(self) -> None:
        """Exit after what is queued."""
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def skip_waiting(self) -> None:
        """Exit after the message at hand, leaving further tiers as they are."""
        self._writer.stop_draining()
        with self._changed:
            self._todo.clear()
            self._finishing = True
            self._changed.notify()

    def join(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the thread to end; whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        broken: str | None = None
        try:
            if self._open():
                self._serve()
        except BaseException:  # noqa: BLE001 - told to the trainer, which starts a new writer
            broken = traceback.format_exc()
        finally:
            try:
                self._writer.close()
                if broken is None:
                    self._writer.drain()
            except Exception:  # noqa: BLE001 - told like any other: nobody may wait for a thread that is gone
                broken = broken or traceback.format_exc()
            self._writer.stop_draining()
            self.ended = True
            self._on_exit(broken)

    def _open(self) -> bool:
        try:
            self._writer.open()
        except CkptError as err:
            self._emit({"kind": protocol.REFUSED, "code": err.code, "message": err.message, "hint": err.hint})
            return False
        self.opened = True
        self._emit({"kind": protocol.STARTED})
        return True

    def _serve(self) -> None:
        self._writer.prepare()
        while True:
            with self._changed:
                while not self._todo and not self._finishing:
                    self._changed.wait(_IDLE_SECONDS)
                if not self._todo:
                    return
                body, fds = self._todo.popleft()
            self._writer.handle(body, fds)


def refusal(body: Body) -> ErrorRecord:
    """The error of a `refused` message."""
    return ErrorRecord(body["code"], body["message"], body["hint"])


def unfinished(body: Body, who: str) -> Notice:
    """What a `closed` message means for people."""
    tiers = "; nor on ".join(body["unfinished"])
    return Notice("WARNING", f"not everything is on {tiers}; {who} goes on with it for a while")
