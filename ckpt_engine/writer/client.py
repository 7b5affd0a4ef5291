"""The trainer's side of the writer: what a client promises, and what all clients share.

What the writer has said and the trainer has not yet taken in, and which jobs are still open.
"""

from __future__ import annotations

import abc
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ckpt_engine.copy.job import (
    ArenaNews,
    ErrorRecord,
    History,
    JobDone,
    Mirrored,
    PersistJob,
    SlotFreed,
    WriterConfig,
    done_from_json,
    job_to_json,
    layout_to_json,
)
from ckpt_engine.errors import CkptError, WriterError
from ckpt_engine.observe import events
from ckpt_engine.observe.events import (
    LOGGER_NAME,
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
from ckpt_engine.writer.channel import Body

ANSWER_SECONDS = 60.0
"""How long a writer may take to start and answer, on top of waiting for the lease."""
REAP_SECONDS = 10.0
_LOOK_SECONDS = 0.25


def never(_copies: bool) -> bool:
    """There is no hurry."""
    return False


class WriterClient(abc.ABC):
    """A started writer. What jobs refer to MUST be sent before the first of them.

    Sending never waits for storage and may be done by one thread at a time; the rest belongs to the training thread.
    When the writer dies, every open job fails, one `WriterLost` follows, and the client is of no more use: open a new
    one and send everything again. In a forked child of the trainer a client does nothing.

    Attributes:
        first_seq: the lowest number that a snapshot may get, as the writer saw it when it started.
        history: what earlier writers have left at the nearest tier, as the writer saw it when it had the lease.
        peer_port: where the writers of other machines reach this one; 0: nowhere.
        news: empty where `poll` has nothing to give.
    """

    def __init__(self, url: str) -> None:
        self._mailbox = Mailbox(url)
        self.news: Collection[Message | None] = self._mailbox.messages
        self._url = url
        self._only_copies = self._said_copies = False
        """Nothing is missing at the nearest tier any more; that further tiers are waited for was said."""
        self._close_by = 0.0
        self._owner = os.getpid()
        self.first_seq = self.peer_port = 0
        self.history: History | None = None
        self._refused: CkptError | None = None
        """Why it has not started."""
        self._answered = threading.Event()
        self._news = threading.Event()
        """Set whenever the writer says something before it has answered."""
        self._closing = self._goes_on = False
        self._closed = threading.Event()
        """Nothing more comes that the trainer waits for; `_goes_on`: although the writer has not ended."""

    def _begin(self, config: WriterConfig, emit: Callable[[Event], None] | None, kind: str) -> None:
        """Wait until the writer has started; what it says meanwhile goes to `emit` at once. Raises as `open_client`."""
        timeout = config.lease_wait_seconds + ANSWER_SECONDS
        deadline = time.monotonic() + timeout
        with said_if_slow(f"opening {self._url} for writing, up to {duration(timeout)}"):
            while True:
                left = deadline - time.monotonic()
                self._news.wait(max(0.0, left))
                self._news.clear()
                for message in self._mailbox.poll() if emit is not None else ():
                    if isinstance(message, Event) and not isinstance(message, WriterLost) and emit is not None:
                        emit(message)  # that it is lost is raised
                if self._answered.is_set():
                    break
                if left <= 0.0:
                    raise WriterError(f"the writer {kind} does not answer after {timeout:.0f} s; storage: {config.url}")
        if self._refused is not None:
            self._closed.wait(REAP_SECONDS)
            raise self._refused

    def _hear(self, body: Body) -> None:
        """Take what the writer says, on the thread that hears it."""
        match body["kind"]:
            case channel.STARTED:
                self.first_seq, self.peer_port = body["first_seq"], body["port"]
                self.history = None if body["history"] is None else History(**body["history"])
                self._answered.set()
            case channel.REFUSED:
                self._closing = True
                self._refused = ErrorRecord(body["code"], body["message"], body["hint"]).exception()
                self._answered.set()
            case channel.COPYING:
                self._copies_remain(body)
            case channel.CLOSED:
                if body["unfinished"]:
                    left = f"not everything is on {'; nor on '.join(body['unfinished'])}; {self._goes_on_with_copies}"
                    self._mailbox.hear(channel.event(Notice("INFO" if body["said"] else "WARNING", left)))
                    self._goes_on = True
                    self._closed.set()
            case _:
                self._mailbox.hear(body)
        self._news.set()

    def _no_more(self, message: str, early: CkptError, *, expected: bool) -> None:
        """The writer has ended. `early`: what that means if it has not answered yet."""
        if not self._answered.is_set():
            self._refused = early
        self._mailbox.lose(ErrorRecord(WriterError.code, message), expected=expected)
        self._answered.set()
        self._news.set()

    def _wait_for_the_end(self, timeout: float, hurries: Callable[[bool], bool]) -> bool:
        """Wait at most `timeout` seconds until the writer has nothing more to do; `hurries`: see `close`."""
        began = time.monotonic()
        self._close_by = began + timeout
        try:
            # In short waits: a signal that comes right before one is heard after it.
            while not self._closed.wait(min(_LOOK_SECONDS, max(0.0, self._close_by - time.monotonic()))):
                now = time.monotonic()
                if now >= self._close_by or (not self._only_copies and hurries(False)):
                    self._say_left()
                    return False
                if self._only_copies and now >= began + TELL_SECONDS and hurries(True):
                    self._say_left()
                    self._goes_on = True
                    return True
        except KeyboardInterrupt:
            if not self._said_copies:
                raise
            self._goes_on = True  # the user does not want to wait for further tiers
        return True

    def unwritten(self, timeout: float) -> str | None:
        """The line about a wait of at most `timeout` seconds; None: only copies are missing, which `copying` says."""
        if self._only_copies:
            return None
        return f"waiting for the last snapshots to be written to {self._url}, up to {duration(timeout)}"

    @property
    @abc.abstractmethod
    def _goes_on_with_copies(self) -> str:
        """Who takes care of what further tiers lack when the trainer waits no more."""

    def _say_left(self) -> None:
        """Say that the trainer waits for copies no more, once."""
        if self._only_copies and not self._said_copies:
            text = f"not everything is on the further tiers yet; {self._goes_on_with_copies}"
            self._mailbox.hear(channel.event(Notice("WARNING", text)))

    def _copies_remain(self, body: Body) -> None:
        """Take a `copying`, on the thread that hears it."""
        self._only_copies = True
        if not body["lack"]:
            return
        self._said_copies = True
        wait = duration(max(0.0, min(body["seconds"], self._close_by - time.monotonic())))
        line = (
            f"waiting for the last copies to {' and '.join(body['lack'])}, up to {wait} (wait_at_end) or until Ctrl-C; "
            f"what is missing then: {self._goes_on_with_copies}"
        )
        announce(logging.getLogger(LOGGER_NAME), line)

    @property
    @abc.abstractmethod
    def flushed(self) -> bool:
        """Whether the writer will read everything sent so far even if the trainer is killed now.

        True as well if the writer is lost.
        """

    @abc.abstractmethod
    def close(
        self, timeout: float, *, failed: bool = False, keeps: bool = False, hurries: Callable[[bool], bool] = never
    ) -> bool:
        """Let the writer finish everything and give back the lease; whether it has ended within `timeout` seconds.

        Until it has, the slots of open jobs and of the newest one in memory MUST NOT change.

        If not, open jobs count as failed here, while the writer goes on for at most `drain_seconds`. Idempotent; works
        with a dead writer.

        Args:
            failed: training has ended because of an error.
            keeps: what is in memory only stays there, for the process that restarts it.
            hurries: asked again and again: whether to wait no more; True: for what further tiers still lack.
        """

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
        return not self._foreign and self._mailbox.lost is None

    def describe(self, news: ArenaNews) -> None:
        """Say what the jobs from here on refer to; the writer keeps the memory of slots alive.

        Jobs submitted before are not affected. Sent to a dead writer this does nothing.
        """
        body: Body = {"kind": channel.ARENA, "slot": None, "gone": news.gone, "keys": news.keys, "trees": news.trees}
        body["layout"] = None if news.layout is None else layout_to_json(news.layout)
        if news.slot is None:
            self._tell(body)
            return
        number, fd, nbytes = news.slot
        self._tell({**body, "slot": [number, nbytes]}, [fd])

    def submit(self, job: PersistJob) -> None:
        """Queue a job; its `JobDone` will come.

        Raises:
            WriterError: the writer is lost, or the job has something that is not JSON; no `JobDone` comes.
        """
        self._require_own()
        if not self._mailbox.expect(job):
            raise self._lost()
        try:
            self._send_job(channel.PERSIST, job)
        except WriterError:
            self._mailbox.withdraw(job)
            raise

    def take_over(self, jobs: Iterable[PersistJob], later: Iterable[tuple[Body, Sequence[int]]]) -> None:
        """Send what was to be sent before this writer had started; the outcome of these jobs will come."""
        for job in jobs:
            if not self._mailbox.expect(job):
                self._mailbox.fail(job)
        for body, fds in later:
            self._send(body, fds)

    def cancel(self, snapshot: str, why: str) -> None:
        """Tell that this rank has no part in a snapshot of all ranks. Sent to a dead writer this does nothing."""
        self._tell({"kind": channel.CANCEL, "snapshot": snapshot, "why": why})

    def meet(self, others: Mapping[str, Any]) -> None:
        """Say where the writers of other machines are, see `peers.Peers.meet`."""
        self._tell({"kind": channel.PARTNER, **others})

    def hold(self, job: PersistJob) -> None:
        """Let the writer keep a job in memory instead of the one before; no `JobDone` will come. Never waits.

        With `WriterConfig.memory` every `submit` keeps its job as well. The slot of the newest kept job MUST NOT change
        before a newer one is kept or submitted and `flushed` is true, even if the job is durable.

        Raises:
            WriterError: as `submit`.
        """
        self._require_own()
        if self._mailbox.lost is not None:
            raise self._lost()
        self._send_job(channel.HOLD, job)

    def attach_pulse(self, fd: int) -> None:
        """Share where the trainer says how far it is, see `channel.Pulse`. Sent to a dead writer this does nothing."""
        self._tell({"kind": channel.PULSE}, [fd])

    def poll(self) -> list[Message]:
        """Outcomes and events since the last call, in order. Never waits."""
        return [] if self._foreign else self._mailbox.poll()

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for something to `poll`; whether there is."""
        return False if self._foreign else self._mailbox.wait(timeout)

    def drain(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until all jobs, and retention after them, are done; whether they are."""
        return True if self._foreign else self._mailbox.drain(timeout)

    def _tell(self, body: Body, fds: Sequence[int] = ()) -> None:
        if self.alive:
            self._send(body, fds)

    def _send_job(self, kind: str, job: PersistJob) -> None:
        try:
            self._send({"kind": kind, "job": job_to_json(job)})
        except (TypeError, ValueError) as err:
            raise WriterError(
                f"the snapshot of step {job.step} has values, metrics or notes that are not JSON: {err}"
            ) from err

    def _require_own(self) -> None:
        if self._foreign:
            raise WriterError("the writer belongs to the trainer, not to its forked child")

    def _lost(self) -> WriterError:
        lost = self._mailbox.lost
        return WriterError(lost.message if lost else "the writer is closed")


Message = JobDone | SlotFreed | Mirrored | Event


class Mailbox:
    """Collects messages on whatever thread hears them; the training thread takes them in order. Thread safe.

    It never holds more than a few messages per open job, and jobs are bounded by the arena's slots. A request that
    waits to be taken in is not kept twice.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self.messages: deque[Message] = deque()
        """Those that wait to be taken in."""
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
                case channel.EVENT:
                    self.messages.append(events.from_json(body["event"]))
                case channel.DONE:
                    done = done_from_json(body["done"])
                    self._open.pop(done.job, None)
                    self.messages.append(done)
                case channel.FREED:
                    self.messages.append(SlotFreed(body["slot"]))
                case channel.MIRRORED:
                    self.messages.append(Mirrored(body["snapshot"]))
                case channel.SETTLED:
                    self._unsettled.discard(body["job"])
                case channel.REQUEST:
                    request = Requested(body["what"], body["who"])
                    if request not in self.messages:
                        self.messages.append(request)
            self._changed.notify_all()

    def given_up(self) -> list[PersistJob]:
        """The open jobs, whose outcome does not come from here any more."""
        with self._changed:
            found = list(self._open.values())
            self._open.clear()
            self._unsettled.clear()
            return found

    def fail(self, job: PersistJob) -> None:
        """The writer is lost, and was not sent this job."""
        with self._changed:
            if self._lost is not None:
                self._fail(job, self._lost)

    def _fail(self, job: PersistJob, why: ErrorRecord) -> None:
        failed = SnapshotFailed("", job.step, self._tier, why.code, why.message, hint=why.hint or "")
        self.messages += (failed, JobDone(job.job, None, why))

    def lose(self, why: ErrorRecord, *, expected: bool, text: str | None = None) -> None:
        """No more messages will come. Open jobs fail with `why`; once, and with `WriterLost` unless `expected`.

        Args:
            text: of that; None: as of `why`.
        """
        with self._changed:
            if self._lost is not None:
                return
            self._lost = why
            for job in self._open.values():
                self._fail(job, why)
            if not expected or self._open:
                self.messages.append(WriterLost(text or why.message))
            self._open.clear()
            self._unsettled.clear()
            self._changed.notify_all()

    def poll(self) -> list[Message]:
        """All messages since the last call, in order. Never waits."""
        with self._changed:
            found = list(self.messages)
            self.messages.clear()
            return found

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for something to `poll`; whether there is. A lost writer ends the wait."""
        with self._changed:
            self._changed.wait_for(lambda: self.messages or self._lost is not None, timeout)
            return bool(self.messages)

    def drain(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until every job is done and retention after it too; whether that is so."""
        deadline = time.monotonic() + timeout
        with self._changed:
            return self._changed.wait_for(lambda: not self._unsettled, max(0.0, deadline - time.monotonic()))
