"""The trainer's side of the writer.

What all clients share is here: what the writer has reported and the trainer has not yet taken in, which jobs are still
open, and how far the end is.
"""

from __future__ import annotations

import abc
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec

from ckpt_engine.copy.job import (
    ErrorRecord,
    JobDone,
    Layout,
    Mirrored,
    PersistJob,
    SlotFreed,
    Started,
    WriterConfig,
    to_json,
)
from ckpt_engine.errors import CkptError, WaitTimeoutError, WriterError
from ckpt_engine.observe import events
from ckpt_engine.observe.events import (
    LOG,
    TELL_SECONDS,
    Event,
    Notice,
    Requested,
    SnapshotFailed,
    WriterLost,
    announce,
    said_if_slow,
)
from ckpt_engine.observe.units import duration
from ckpt_engine.writer import channel
from ckpt_engine.writer.messages import Body, Kind

ANSWER_SECONDS = 60.0
"""How long a writer may take to start and answer, on top of waiting for the lease."""
REAP_SECONDS = 10.0
_LOOK_SECONDS = 0.25

Message = JobDone | SlotFreed | Mirrored | Event


def never(_copies: bool) -> bool:
    """There is no hurry."""
    return False


class WriterLife(IntEnum):
    """How far the end of a writer is, as its client knows it. It only goes forward."""

    SERVING = 1
    """It starts, or takes jobs."""
    CLOSING = 2
    """The trainer has closed it, or it has refused to start. It is expected to end."""
    COPYING = 3
    """Nothing is missing at the nearest tier any more."""
    ANNOUNCED = 4
    """That further tiers are waited for was said."""
    ALONE = 5
    """It continues, and the trainer does not wait for that."""
    DIED = 6
    """It has ended unasked."""


@dataclass(eq=False)
class WriterClient(abc.ABC):
    """A started writer. What jobs refer to MUST be sent before the first of them.

    Sending never waits for storage and may be done by one thread at a time; the rest belongs to the training thread,
    which takes in what the writer has said, on whatever thread that is heard. It is never more than a few messages per
    open job, and jobs are bounded by the arena's slots.

    When the writer dies, every open job is `lost`, one `WriterLost` follows, and the client is of no more use: open a
    new one and send everything again. In a forked child of the trainer a client does nothing.

    Attributes:
        news: what `poll` has to give.
    """

    _continues = "continues it"
    """What it does with what is missing when the trainer waits no more."""

    _url: str
    news: deque[Message] = field(default_factory=deque, init=False)
    _open: dict[int, PersistJob] = field(default_factory=dict, init=False)
    _lost: ErrorRecord | None = field(default=None, init=False)
    """Why nothing more will come, if so."""
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _life: WriterLife = field(default=WriterLife.SERVING, init=False)
    _close_by: float = field(default=0.0, init=False)
    _owner: int = field(default_factory=os.getpid, init=False)
    _told: tuple[Collection[int], Layout | None, Mapping[str, Any]] = field(default=((), None, {}), init=False)
    """The slots, the layout and the skeletons that the writer knows."""
    _answer: Started | CkptError | None = field(default=None, init=False)
    """What it said when it started, or why it has not; None: it has not answered yet."""
    _closed: threading.Event = field(default_factory=threading.Event, init=False)
    """Nothing more comes that the trainer waits for."""

    @property
    def started(self) -> Started:
        """What the writer said when it started."""
        assert isinstance(self._answer, Started)
        return self._answer

    @property
    def died(self) -> bool:
        """Whether the writer has ended unasked; `poll` has given the `WriterLost`, or gives it next time."""
        return self._life is WriterLife.DIED

    @property
    @abc.abstractmethod
    def _who(self) -> str:
        """How it is called in messages."""

    @property
    def _takes_care(self) -> str:
        """Who does what further tiers lack when the trainer waits no more."""
        return f"{self._who} {self._continues}, and then the next run does"

    def _reached(self, life: WriterLife) -> None:
        with self._changed:
            self._life = max(self._life, life)

    def _begin(self, config: WriterConfig, emit: Callable[[Event], object] | None) -> None:
        """Wait until the writer has started; what it says meanwhile goes to `emit` at once. Raises as `open_client`."""
        timeout = config.lease_wait_seconds + ANSWER_SECONDS
        deadline = time.monotonic() + timeout
        with said_if_slow(f"opening {self._url} for writing, up to {duration(timeout)}"):
            while self._answer is None:
                left = deadline - time.monotonic()
                if left <= 0.0:
                    raise WriterError(f"{self._who} does not answer after {timeout:.0f} s; storage: {config.url}")
                with self._changed:
                    self._changed.wait_for(lambda: self._answer or (emit is not None and self.news), left)
                for message in self.poll() if emit is not None else ():
                    if isinstance(message, Event) and not isinstance(message, WriterLost) and emit is not None:
                        emit(message)  # that it is lost is raised
        if isinstance(self._answer, CkptError):
            self._closed.wait(REAP_SECONDS)
            raise self._answer

    def _hear(self, body: Body) -> None:
        """Take what the writer says, on the thread that hears it."""
        if body["kind"] == Kind.COPYING:
            self._copies_remain(body)
            return
        with self._changed:
            match body["kind"]:
                case Kind.STARTED:
                    self._answer = msgspec.convert(body, Started)
                case Kind.REFUSED:
                    self._reached(WriterLife.CLOSING)
                    self._answer = ErrorRecord(body["code"], body["message"], body["hint"]).exception()
                case Kind.CLOSED:
                    if body["left"]:
                        left = f"{body['left']}; {self._care_of(body)}"
                        self.news.append(Notice("INFO" if body["said"] else "WARNING", left))
                        self._reached(WriterLife.ALONE)
                        self._closed.set()
                case Kind.EVENT:
                    self.news.append(events.from_json(body["event"]))
                case Kind.DONE:
                    done = msgspec.convert(body["done"], JobDone)
                    self._open.pop(done.job, None)
                    self.news.append(done)
                case Kind.FREED:
                    self.news.append(SlotFreed(body["slot"]))
                case Kind.MIRRORED:
                    self.news.append(Mirrored(body["snapshot"]))
                case Kind.REQUEST:
                    request = Requested(body["what"], body["who"])
                    if request not in self.news:  # one that waits to be taken in is not kept twice
                        self.news.append(request)
            self._changed.notify_all()

    def _no_more(self, message: str, early: CkptError, *, expected: bool) -> None:
        """The writer has ended. `early`: what that means if it has not answered yet."""
        self._answer = self._answer or early
        self._lose(ErrorRecord(WriterError.code, message), expected=expected)

    def _lose(self, why: ErrorRecord, *, expected: bool) -> None:
        """No more messages will come. Open jobs fail with `why`; once, and with `WriterLost` unless `expected`."""
        with self._changed:
            if self._lost is None:
                self._lost = why
                if not expected:
                    self._reached(WriterLife.DIED)
                for job in self._open.values():
                    if expected:
                        self.news.append(
                            SnapshotFailed("", job.step, self._url, why.code, why.message, hint=why.hint or "")
                        )
                    self.news.append(JobDone(job.job, None, why, lost=not expected))
                if not expected or self._open:
                    self.news.append(WriterLost(why.message))
                self._open.clear()
            self._changed.notify_all()

    def _wait_for_the_end(self, timeout: float, hurries: Callable[[bool], bool]) -> bool:
        """Wait at most `timeout` seconds until the writer has nothing more to do; `hurries`: see `close`."""
        began = time.monotonic()
        self._close_by = began + timeout
        try:
            # In short waits: a signal that comes right before one is heard after it.
            while not self._closed.wait(min(_LOOK_SECONDS, max(0.0, self._close_by - time.monotonic()))):
                now = time.monotonic()
                if now >= self._close_by or (self._life < WriterLife.COPYING and hurries(False)):
                    self._say_left()
                    return False
                if self._life >= WriterLife.COPYING and now >= began + TELL_SECONDS and hurries(True):
                    self._say_left()
                    self._reached(WriterLife.ALONE)
                    return True
        except KeyboardInterrupt:
            if self._life < WriterLife.ANNOUNCED:
                raise
            self._reached(WriterLife.ALONE)  # the user does not want to wait for further tiers
        return True

    def unwritten(self, timeout: float) -> str | None:
        """The line about a wait of at most `timeout` seconds; None: only copies are missing, which `copying` says."""
        if self._life >= WriterLife.COPYING:
            return None
        return f"waiting for the last snapshots to be written to {self._url}, up to {duration(timeout)}"

    def _say_left(self) -> None:
        """Say that the trainer waits for copies no more, once."""
        if self._life is WriterLife.COPYING:
            text = f"not everything is on the further tiers yet; {self._takes_care}"
            self._hear(channel.event(Notice("WARNING", text)))

    def _copies_remain(self, body: Body) -> None:
        """Take a `copying`, on the thread that hears it."""
        self._reached(WriterLife.ANNOUNCED if body["waits"] else WriterLife.COPYING)
        if not body["waits"]:
            return
        wait = duration(max(0.0, min(body["seconds"], self._close_by - time.monotonic())))
        announce(
            LOG,
            f"waiting for {body['waits']}, up to {wait} (wait_at_end) or until Ctrl-C; "
            f"what is missing then: {self._care_of(body)}",
        )

    def _care_of(self, body: Body) -> str:
        """Who does what the trainer does not wait for: the next run copies as well, and runs no hooks of this one."""
        return self._takes_care if body["copies"] else f"{self._who} continues it"

    @property
    @abc.abstractmethod
    def flushed(self) -> bool:
        """Whether the writer will read everything sent so far even if the trainer is killed now.

        True as well if the writer is lost.
        """

    def close(
        self,
        timeout: float,
        *,
        why: str | None = None,
        failed: bool = False,
        keeps: bool = False,
        hurries: Callable[[bool], bool] = never,
    ) -> bool:
        """Let the writer finish everything and give back the lease; whether it has ended within `timeout` seconds.

        Until it has, the slots of open jobs and of the newest one in memory MUST NOT change.

        If not, open jobs count as failed here, while the writer continues for at most `drain_seconds`. Idempotent;
        works with a dead writer.

        Args:
            why: training ends with it, for `on`; empty if there is nothing to say. None: it does not end here.
            failed: training has ended because of an error.
            keeps: what is in memory only stays there, for the process that restarts it.
            hurries: asked again and again: whether to wait no more; True: for what further tiers still lack.
        """
        if self._foreign:
            return True
        self._reached(WriterLife.CLOSING)
        began = time.monotonic()
        self._finish(why, failed=failed, keeps=keeps)
        closed = self._wait_for_the_end(timeout, hurries)
        if not closed or self._life is WriterLife.ALONE:
            late = "" if closed else f"not durable {time.monotonic() - began:.0f} s after closing; "
            self._lose(ErrorRecord(WaitTimeoutError.code, f"{late}{self._who} continues alone"), expected=True)
        return closed

    @abc.abstractmethod
    def _finish(self, why: str | None, *, failed: bool, keeps: bool) -> None:
        """Tell the writer that the trainer ends, see `close`."""

    @abc.abstractmethod
    def _send(self, body: Body, fds: Sequence[int] = ()) -> None:
        """Send a message; to a dead writer: do nothing."""

    @property
    def _foreign(self) -> bool:
        # A fork shares our socket but none of our threads, and may have copied a lock in its locked state.
        return os.getpid() != self._owner

    @property
    def alive(self) -> bool:
        """Whether jobs are still taken."""
        return not self._foreign and self._lost is None

    def describe(
        self, slot: tuple[int, int, int], known: Collection[int], layout: Layout, trees: Mapping[str, Any]
    ) -> None:
        """Say what the jobs from here on refer to, as far as the writer does not know it. Others are not affected.

        Sent to a dead writer this does nothing. What is the same object as last time is the same.

        Args:
            slot: number, descriptor and bytes of that of the next job; the writer keeps its memory alive.
            known: the numbers of all slots that later jobs may name.
            layout: of the bytes in the slot.
            trees: the skeletons of the top-level keys, in the state's order.
        """
        number, fd, nbytes = slot
        slots, before, old = self._told
        gone = set(slots).difference(known)
        is_new = number not in slots
        if not (gone or is_new or layout is not before or trees is not old):
            return
        body: Body = {"kind": Kind.ARENA, "slot": [number, nbytes] if is_new else None, "gone": sorted(gone)}
        body["layout"] = None if layout is before else to_json(layout)
        body["keys"] = () if trees is old else tuple(trees)
        body["trees"] = {key: tree for key, tree in trees.items() if old.get(key) is not tree}
        self._tell(body, [fd] if is_new else [])
        self._told = ({*slots, number} - gone, layout, trees)

    def submit(self, job: PersistJob) -> None:
        """Queue a job; its `JobDone` will come.

        Raises:
            WriterError: the writer is lost, or the job has something that is not JSON; no `JobDone` comes.
        """
        self._send_job(Kind.PERSIST, job)

    def hold(self, job: PersistJob) -> None:
        """Let the writer keep a job in memory instead of the one before; no `JobDone` will come. Never waits.

        With `WriterConfig.memory` every `submit` keeps its job as well. The slot of the newest kept job MUST NOT change
        before a newer one is kept or submitted and `flushed` is true, even if the job is durable.

        Raises:
            WriterError: as `submit`.
        """
        self._send_job(Kind.HOLD, job)

    def _send_job(self, kind: str, job: PersistJob) -> None:
        if self._foreign:
            raise WriterError("the writer belongs to the trainer, not to its forked child")
        with self._changed:
            if self._lost is not None:
                raise WriterError(self._lost.message)
            if kind == Kind.PERSIST:
                self._open[job.job] = job
        try:
            self._send({"kind": kind, "job": to_json(job)})
        except Exception as err:
            with self._changed:
                self._open.pop(job.job, None)
            if not isinstance(err, TypeError | ValueError):
                raise
            raise WriterError(
                f"the snapshot of step {job.step} has values, metrics or notes that are not JSON: {err}"
            ) from err

    def cancel(self, snapshot: str, why: str) -> None:
        """Tell that this rank has no part in a snapshot of all ranks. Sent to a dead writer this does nothing."""
        self._tell({"kind": Kind.CANCEL, "snapshot": snapshot, "why": why})

    def meet(self, others: Mapping[str, Any]) -> None:
        """Say where the writers of other machines are, see `peers.Peers.meet`."""
        self._tell({"kind": Kind.PARTNER, **others})

    def attach_pulse(self, fd: int) -> None:
        """Share where the trainer says how far it is, see `HeartbeatPage`. Sent to a dead writer this does nothing."""
        self._tell({"kind": Kind.PULSE}, [fd])

    def attach_rows(self, name: str, about: Mapping[str, Any], fd: int) -> None:
        """Share where the trainer records its steps, see `RowFile`. Sent to a dead writer this does nothing."""
        self._tell({"kind": Kind.ROWS, "name": name, "about": about}, [fd])

    def _tell(self, body: Body, fds: Sequence[int] = ()) -> None:
        if self.alive:
            self._send(body, fds)

    def poll(self) -> list[Message]:
        """Outcomes and events since the last call, in order. Never waits."""
        if self._foreign:
            return []
        with self._changed:
            found = list(self.news)
            self.news.clear()
            return found

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for something to `poll`; whether there is. A lost writer ends the wait."""
        if self._foreign:
            return False
        with self._changed:
            self._changed.wait_for(lambda: self.news or self._lost is not None, timeout)
            return bool(self.news)
