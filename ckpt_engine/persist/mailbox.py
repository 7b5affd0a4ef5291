"""What the writer has said and the trainer has not yet taken in, and which jobs are still open."""

from __future__ import annotations

import threading
import time
from collections import deque

from ckpt_engine.observe import events
from ckpt_engine.observe.events import Event, Requested, SnapshotFailed, WriterLost
from ckpt_engine.persist import protocol
from ckpt_engine.persist.job import ErrorRecord, JobDone, Mirrored, PersistJob, SlotFreed, done_from_json
from ckpt_engine.persist.wire import Body

Message = JobDone | SlotFreed | Mirrored | Event


class Mailbox:
    """Collects messages on whatever thread hears them; the training thread takes them in order. Thread safe.

    It never holds more than a few messages per open job, and jobs are bounded by the arena's slots. A request that
    waits to be taken in is not kept twice.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._messages: deque[Message] = deque()
        self._open: dict[int, PersistJob] = {}
        self._unsettled: set[int] = set()
        self._lost: ErrorRecord | None = None
        self._changed = threading.Condition()

    @property
    def lost(self) -> ErrorRecord | None:
        """Why no more messages will come, if so."""
        return self._lost

    def expect(self, job: PersistJob) -> bool:
        """Note a job whose outcome will come; False, and nothing noted, if the writer is lost."""
        with self._changed:
            if self._lost is not None:
                return False
            self._open[job.job] = job
            self._unsettled.add(job.job)
            return True

    def withdraw(self, job: PersistJob) -> None:
        """The job was not sent after all."""
        with self._changed:
            self._open.pop(job.job, None)
            self._unsettled.discard(job.job)
            self._changed.notify_all()

    def hear(self, body: Body) -> None:
        """Take in an `event`, `done`, `freed`, `mirrored`, `settled` or `request` message."""
        with self._changed:
            match body["kind"]:
                case protocol.EVENT:
                    self._messages.append(events.from_json(body["event"]))
                case protocol.DONE:
                    done = done_from_json(body["done"])
                    self._open.pop(done.job, None)
                    self._messages.append(done)
                case protocol.FREED:
                    self._messages.append(SlotFreed(body["slot"]))
                case protocol.MIRRORED:
                    self._messages.append(Mirrored(body["snapshot"]))
                case protocol.SETTLED:
                    self._unsettled.discard(body["job"])
                case protocol.REQUEST:
                    request = Requested(body["what"], body["who"])
                    if request not in self._messages:
                        self._messages.append(request)
            self._changed.notify_all()

    def lose(self, why: ErrorRecord, *, expected: bool) -> None:
        """No more messages will come. Open jobs fail with `why`; once, and with `WriterLost` unless `expected`."""
        with self._changed:
            if self._lost is not None:
                return
            self._lost = why
            for job in self._open.values():
                self._messages.append(SnapshotFailed("", job.step, self._tier, why.code, why.message))
                self._messages.append(JobDone(job.job, None, why))
            if not expected or self._open:
                self._messages.append(WriterLost(why.message))
            self._open.clear()
            self._unsettled.clear()
            self._changed.notify_all()

    def poll(self) -> list[Message]:
        """All messages since the last call, in order. Never waits."""
        with self._changed:
            found = list(self._messages)
            self._messages.clear()
            return found

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for something to `poll`; whether there is. A lost writer ends the wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._lost is not None, timeout)
            return bool(self._messages)

    def drain(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until every job is done and retention after it too; whether that is so."""
        deadline = time.monotonic() + timeout
        with self._changed:
            return self._changed.wait_for(lambda: not self._unsettled, max(0.0, deadline - time.monotonic()))
