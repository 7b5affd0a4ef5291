"""A writer that takes the place of a lost one: what it is sent while it is being started it gets when it is there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ckpt_engine.errors import CkptError, StorageError, WriterError
from ckpt_engine.observe.events import SnapshotFailed, WriterLost
from ckpt_engine.persist.client import WriterClient, never
from ckpt_engine.persist.job import ErrorRecord, History, JobDone, Layout, PersistJob
from ckpt_engine.persist.mailbox import Message
from ckpt_engine.snapshot.starting import Starting


class Coming:
    """See `WriterClient`. Training goes on meanwhile, and its snapshots wait in the arena.

    Args:
        starting: starts the writer.
        tier: that it writes to, for events.
        arrived: told of it, on the training thread, before it is told anything else.
    """

    def __init__(self, starting: Starting, tier: str, arrived: Callable[[WriterClient], object]) -> None:
        self.first_seq = self.peer_port = 0
        self.history: History | None = None
        self._starting = starting
        self._tier = tier
        self._arrived = arrived
        self._lock = threading.Lock()
        self._client: WriterClient | None = None
        self._later: list[Callable[[WriterClient], object]] = []
        self._fds: list[int] = []
        self._jobs: list[PersistJob] = []
        self._failed: CkptError | None = None
        self._mail: list[Message] = []

    @property
    def alive(self) -> bool:
        return self._failed is None and (self._client is None or self._client.alive)

    @property
    def flushed(self) -> bool:
        return self._failed is not None if self._client is None else self._client.flushed

    def meet(self, others: Mapping[str, Any]) -> None:
        self._tell(lambda client: client.meet(others))

    def attach_slot(self, slot: int, fd: int, nbytes: int) -> None:
        with self._lock:
            if self._client is None:
                fd = self._kept(fd)
        self._tell(lambda client: client.attach_slot(slot, fd, nbytes))

    def attach_pulse(self, fd: int) -> None:
        with self._lock:
            if self._client is None:
                fd = self._kept(fd)
        self._tell(lambda client: client.attach_pulse(fd))

    def define_layout(self, layout: Layout) -> None:
        self._tell(lambda client: client.define_layout(layout))

    def define_skeleton(self, skeleton_id: int, tree: Any) -> None:
        self._tell(lambda client: client.define_skeleton(skeleton_id, tree))

    def forget(self, *, slots: Sequence[int] = (), layouts: Sequence[int] = (), skeletons: Sequence[int] = ()) -> None:
        self._tell(lambda client: client.forget(slots=slots, layouts=layouts, skeletons=skeletons))

    def cancel(self, snapshot: str, why: str) -> None:
        self._tell(lambda client: client.cancel(snapshot, why))

    def submit(self, job: PersistJob) -> None:
        self._give(job, lambda client: client.submit(job), durable=True)

    def hold(self, job: PersistJob) -> None:
        self._give(job, lambda client: client.hold(job), durable=False)

    def poll(self) -> list[Message]:
        """As of a client. Training thread only, like all that follows.

        Raises:
            CkptError: once: the writer did not start, for a reason that concerns more than its snapshots.
        """
        if self._client is None and self._failed is None and self._starting.done:
            self._look()
        found, self._mail = self._mail, []
        return found if self._client is None else [*found, *self._client.poll()]

    def wait(self, timeout: float) -> bool:
        if self._client is not None:
            return self._client.wait(timeout)
        self._starting.wait(timeout)
        return self._starting.done

    def drain(self, timeout: float) -> bool:
        return self._client.drain(timeout) if self._client is not None else not self._jobs

    def close(self, timeout: float, *, failed: bool = False, hurries: Callable[[], bool] = never) -> bool:
        if self._client is None and self._failed is None:
            self._starting.wait(timeout)
            if self._starting.done:
                self._look()
        if self._client is None:
            return self._failed is not None
        return self._client.close(timeout, failed=failed, hurries=hurries)

    def _tell(self, what: Callable[[WriterClient], object]) -> None:
        with self._lock:
            if self._client is not None:
                what(self._client)
            elif self._failed is None:
                self._later.append(what)

    def _give(self, job: PersistJob, what: Callable[[WriterClient], object], *, durable: bool) -> None:
        with self._lock:
            if self._client is not None:
                what(self._client)
                return
            if self._failed is not None:
                raise WriterError(self._failed.message)
            self._later.append(lambda client: self._hand_over(client, job, what, durable=durable))
            if durable:
                self._jobs.append(job)

    def _hand_over(
        self, client: WriterClient, job: PersistJob, what: Callable[[WriterClient], object], *, durable: bool
    ) -> None:
        try:
            what(client)
        except CkptError as err:  # it is lost again, which it says itself
            if durable:
                self._mail += self._not_taken(job, err)

    def _kept(self, fd: int) -> int:
        """A descriptor that stays open until it is sent."""
        self._fds.append(os.dup(fd))
        return self._fds[-1]

    def _look(self) -> None:
        """Take the writer that has started, and tell it everything; or fail all that waits for it."""
        try:
            client = self._starting.result()
        except CkptError as err:
            with self._lock:
                self._failed = err
                self._let_go()
            self._mail += [message for job in self._jobs for message in self._not_taken(job, err)]
            self._mail.append(WriterLost(f"no other writer starts: {err.message}"))
            if not isinstance(err, StorageError | WriterError):
                raise
            return
        self._mail += self._starting.events
        self.first_seq, self.peer_port, self.history = client.first_seq, client.peer_port, client.history
        self._arrived(client)
        with self._lock:
            for what in self._later:
                what(client)
            self._client = client
            self._let_go()

    def _let_go(self) -> None:
        self._later = []
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
        self._fds = []

    def _not_taken(self, job: PersistJob, error: CkptError) -> list[Message]:
        record = ErrorRecord.of(error)
        failed = SnapshotFailed("", job.step, self._tier, record.code, record.message, hint=record.hint or "")
        return [failed, JobDone(job.job, None, record)]
