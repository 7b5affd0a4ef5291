"""With a memory tier the newest snapshot the writer knows of is never overwritten, whatever else happens."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ckpt_engine.copy import memory_limits
from ckpt_engine.copy.job import ErrorRecord, JobDone, Layout, PersistJob, Started
from ckpt_engine.copy.memory_limits import MemoryLimit
from ckpt_engine.errors import CkptError, LeaseHeldError, StorageError, WriterError
from ckpt_engine.observe.events import Event, Notice, SnapshotSkipped, WriterLost
from ckpt_engine.snapshot import pipeline
from ckpt_engine.snapshot.pipeline import Pipeline
from ckpt_engine.snapshot.save_request import Request, SaveHandle
from ckpt_engine.writer.client import Message, never

NUMBERS = 2000
PATIENCE_SECONDS = 60.0


class FakeWriter:
    """A client whose messages reach the kernel, and whose jobs end, when the test says so."""

    started = Started(1, None)

    def __init__(self, memory: bool = True) -> None:
        self.memory = memory
        self.alive = True
        self.died = False
        self.slots: dict[int, int] = {}
        self.sent: list[tuple[PersistJob, bytes]] = []  # what the kernel does not have yet
        self.newest: tuple[PersistJob, bytes] | None = None  # as a writer would know it after a kill
        self.open: list[tuple[PersistJob, bytes]] = []
        self.mail: list[Message] = []
        self.delayed = False
        self.closed = False
        self.lock = threading.RLock()
        """Jobs come from the copier's threads: a writer has one or has not when it dies."""

    def describe(self, slot: tuple[int, int, int], known: object, layout: Layout, trees: object) -> None:
        number, fd, _ = slot
        if number not in self.slots:
            self.slots[number] = os.dup(fd)
        self.nbytes = layout.nbytes

    def attach_pulse(self, fd: int) -> None: ...

    def content(self, slot: int) -> bytes:
        return os.pread(self.slots[slot], self.nbytes, 0)

    def hold(self, job: PersistJob) -> None:
        with self.lock:
            if not self.alive:
                raise WriterError("lost")
            self.sent.append((job, self.content(job.slot)))
            if not self.delayed:
                self.flush()

    def submit(self, job: PersistJob) -> None:
        with self.lock:
            self.hold(job)
            self.open.append((job, self.content(job.slot)))

    def flush(self) -> None:
        with self.lock:
            if self.sent:
                self.newest = self.sent[-1]
                self.sent.clear()

    @property
    def flushed(self) -> bool:
        return not self.sent

    @property
    def news(self) -> list[Message]:
        return self.mail

    def finish(self) -> None:
        job, content = self.open.pop(0)
        assert self.content(job.slot) == content, "overwritten while it was written"
        self.mail.append(JobDone(job.job, f"{job.job:08d}"))

    def die(self) -> None:
        with self.lock:
            self.alive, self.died = False, True
            record = ErrorRecord("CKPT600", "killed")
            self.mail += [JobDone(job.job, None, record, lost=True) for job, _ in self.open]
            self.mail.append(WriterLost("killed"))
            self.newest, self.open, self.sent = None, [], []

    def poll(self) -> list[Message]:
        found, self.mail = self.mail, []
        return found

    def wait(self, timeout: float) -> bool:
        self.flush()
        while self.open:
            self.finish()
        return True

    def drain(self, timeout: float) -> bool:
        return True

    def close(
        self, timeout: float, *, failed: bool = False, keeps: bool = False, hurries: Callable[[bool], bool] = never
    ) -> bool:
        self.closed = True
        for fd in self.slots.values():
            os.close(fd)
        self.slots.clear()
        return True


class Arena:
    """A pipeline with a memory tier and the writers it has had."""

    def __init__(self, slots: int = 3) -> None:
        self.writers: list[FakeWriter] = []
        self.events: list[Event] = []
        self.state = {"w": torch.zeros(NUMBERS), "step": 0}
        self.step = 0
        self.lease: threading.Event | None = None
        self.refused: CkptError | None = None
        self.pipeline = Pipeline(self._open, slots, self.events.append, memory=True)

    def _open(self, memory: bool, emit: Callable[[Event], None]) -> FakeWriter:
        if self.lease is not None:
            assert self.lease.wait(PATIENCE_SECONDS)
            emit(Notice("INFO", "had to wait"))
        if self.refused is not None:
            raise self.refused
        self.writers.append(FakeWriter(memory))
        return self.writers[-1]

    @property
    def writer(self) -> FakeWriter:
        return self.writers[-1]

    def arrive(self) -> None:
        """Let the writer that takes the place of a lost one be there, if one is coming."""
        if self.lease is not None:
            self.lease.set()
        if self.pipeline._writer is not None and self.pipeline._writer.client is None:
            self.pipeline._writer.wait(PATIENCE_SECONDS)
        self.pipeline.poll()

    def save(self, durable: bool = False, lazy: bool = False) -> SaveHandle:
        self.step += 1
        self.pipeline.stager.fence()
        self.state["w"].fill_(self.step)
        self.state["step"] = self.step
        wanted = Request(self.step, {}, None, "test", _everything if lazy else None, {}, durable)
        return self.pipeline.save(self.state, wanted)


def _everything(path: tuple[object, ...]) -> bool:
    return True


class Rotation(RuleBasedStateMachine):
    """Any order of snapshots of both kinds, slow messages, slow disks and dead writers."""

    @initialize(slots=st.integers(2, 5))
    def begin(self, slots: int) -> None:
        self.arena = Arena(slots)
        self.count = slots
        self.durable: list[SaveHandle] = []
        self.arena.pipeline.start()

    @rule(durable=st.booleans(), lazy=st.booleans())
    def save(self, durable: bool, lazy: bool) -> None:
        handle = self.arena.save(durable, lazy)
        if durable:
            self.durable.append(handle)

    @rule(slow=st.booleans())
    def messages(self, slow: bool) -> None:
        self.arena.writer.delayed = slow

    @rule()
    def flush(self) -> None:
        self.arena.writer.flush()

    @rule()
    def finish(self) -> None:
        if self.arena.writer.open:
            self.arena.writer.finish()

    @rule()
    def poll(self) -> None:
        self.arena.pipeline.poll()

    @rule()
    def die(self) -> None:
        if self.arena.writer.alive:
            self.arena.lease = threading.Event()  # the next one comes when a rule says so
            self.arena.writer.die()

    @rule()
    def arrive(self) -> None:
        self.arena.arrive()

    @invariant()
    def what_the_writer_would_rescue_is_whole(self) -> None:
        if not hasattr(self, "arena"):
            return
        writer = self.arena.writer
        for job, content in [*([writer.newest] if writer.newest else []), *writer.open]:
            assert writer.content(job.slot) == content

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        pipeline = self.arena.pipeline
        pipeline.stager.fence()
        pipeline.poll()
        pipeline.start()
        self.arena.arrive()
        self.arena.writer.delayed = False
        self.arena.writer.wait(0.0)
        assert all(handle.done() for handle in self.durable)
        assert self.arena.save().wait(PATIENCE_SECONDS) == "", (
            "slots have leaked: nothing is in flight, and still none is free"
        )
        assert len(self.arena.pipeline.slots.known()) <= self.count
        pipeline.close(PATIENCE_SECONDS)
        for writer in self.arena.writers:
            writer.close(0.0)


Rotation.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRotation = Rotation.TestCase


def test_a_snapshot_in_memory_is_done_when_the_message_is_with_the_kernel() -> None:
    """The handle is not done before: a trainer that is killed then would lose the message."""
    arena = Arena()
    arena.pipeline.start()
    arena.writer.delayed = True
    handle = arena.save()
    assert not handle.done()
    arena.writer.flush()
    assert handle.done()
    assert handle.wait() == ""
    assert "in memory" in repr(handle)
    arena.pipeline.close(PATIENCE_SECONDS)


def test_a_writer_that_dies_before_it_knows_leaves_no_snapshot_in_memory() -> None:
    """The handle fails instead of promising a snapshot that no process has."""
    arena = Arena()
    arena.pipeline.start()
    arena.writer.delayed = True
    handle = arena.save()
    arena.writer.die()
    assert handle.done()
    assert isinstance(handle.error, WriterError)
    arena.pipeline.close(PATIENCE_SECONDS)


def test_what_a_lost_writer_knew_is_not_taken_for_what_the_next_one_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has sent a snapshot may be late to say so: the writer has died meanwhile, and that was noticed."""
    arena = Arena()
    arena.pipeline.start()
    newest = arena.pipeline.in_flight.newest
    tell = newest.tell

    def late(*sent: Any) -> None:
        arena.writer.die()
        arena.pipeline.poll()
        tell(*sent)

    with monkeypatch.context() as patch:
        patch.setattr(newest, "tell", late)
        handle = arena.save()
    assert not arena.save().skipped
    arena.arrive()
    assert handle.done()
    assert isinstance(handle.error, WriterError)
    assert not handle.held
    assert len(arena.writers) == 2
    arena.pipeline.close(PATIENCE_SECONDS)


def test_every_step_goes_on_while_a_durable_one_is_written() -> None:
    """Three slots: one written, one kept, one filled; a second durable one has to wait."""
    arena = Arena()
    assert not arena.save(durable=True).skipped
    for _ in range(20):
        assert not arena.save().skipped
    assert not arena.pipeline.ready()
    assert arena.pipeline.ready(durable=False)
    assert arena.save(durable=True).skipped
    arena.writer.finish()
    assert arena.pipeline.ready()
    assert not arena.save(durable=True).skipped
    arena.pipeline.close(PATIENCE_SECONDS)


def test_with_two_slots_those_in_memory_pause_for_the_durable_one() -> None:
    """One is being written, the other one is the newest: the next one is skipped, and training goes on."""
    arena = Arena(2)
    arena.save(durable=True)
    assert not arena.save().skipped
    assert arena.save().skipped
    assert isinstance(arena.events[-1], SnapshotSkipped)
    arena.writer.finish()
    assert not arena.save().skipped
    arena.pipeline.close(PATIENCE_SECONDS)


def test_a_dead_writer_costs_nothing_but_what_was_only_in_its_memory() -> None:
    """The slots of those that were only in memory are free for the next writer."""
    arena = Arena()
    arena.save(durable=True)
    arena.save()
    arena.writer.die()
    for _ in range(5):
        assert not arena.save().skipped
        arena.arrive()
    assert len(arena.writers) == 2
    arena.pipeline.close(PATIENCE_SECONDS)


def test_training_does_not_wait_for_the_writer_that_takes_the_place_of_a_lost_one() -> None:
    """Its snapshots are staged meanwhile, and the new writer gets them in their order, each with what it names."""
    arena = Arena(4)
    first = arena.save(durable=True)
    arena.lease = threading.Event()
    arena.writer.die()
    durable, _, kept = arena.save(durable=True), arena.save(), arena.save()
    assert durable.skipped is kept.skipped is None
    assert len(arena.writers) == 1 and not (first.done() or durable.done() or kept.done())
    assert arena.save().skipped, "the arena is full, and training does not wait for it"
    arena.arrive()
    assert len(arena.writers) == 2
    assert [job.step for job, _ in arena.writer.open] == [first.step, durable.step]
    assert arena.writer.newest is not None and arena.writer.newest[0].step == kept.step
    assert kept.wait(PATIENCE_SECONDS) == ""
    arena.writer.finish()
    arena.writer.finish()
    assert first.wait(PATIENCE_SECONDS) and durable.wait(PATIENCE_SECONDS)
    assert not arena.save().skipped
    arena.pipeline.close(PATIENCE_SECONDS)


@pytest.mark.parametrize("durable", [True, False])
def test_snapshots_that_wait_for_a_writer_that_does_not_start_fail(durable: bool) -> None:
    """They say why, their slots are free, and the next snapshot tries another one."""
    arena = Arena()
    arena.save()
    arena.lease, arena.refused = threading.Event(), StorageError("the disk is gone")
    arena.writer.die()
    handle = arena.save(durable=durable)
    arena.arrive()
    assert handle.done() and handle.error is not None
    assert not durable or "the disk is gone" in handle.error.message
    lost = [event.message for event in arena.events if isinstance(event, WriterLost)]
    assert lost[-1] == "no other writer starts: the disk is gone"
    arena.refused = None
    assert not arena.save(durable=durable).skipped
    arena.arrive()
    assert len(arena.writers) == 2
    arena.pipeline.close(PATIENCE_SECONDS)


def test_a_run_that_another_job_has_taken_meanwhile_ends() -> None:
    """The writer died, and another trainer has the lease by now: that is raised, whatever becomes of snapshots."""
    arena = Arena()
    arena.save()
    arena.lease, arena.refused = threading.Event(), LeaseHeldError("somebody else was faster")
    arena.writer.die()
    handle = arena.save(durable=True)
    with pytest.raises(LeaseHeldError, match="faster"):
        arena.arrive()
    assert handle.done() and handle.error is not None
    arena.pipeline.close(PATIENCE_SECONDS)


def test_a_snapshot_that_cannot_be_handed_over_fails_and_frees_its_slot() -> None:
    """Ten of them in a row use up none."""
    arena = Arena()
    arena.save()
    for _ in range(10):
        arena.writer.alive = False
        handle = arena.save()
        assert handle.done()
        assert isinstance(handle.error, WriterError)
        arena.writer.alive = True
        assert not arena.save().skipped
    arena.pipeline.close(PATIENCE_SECONDS)


@pytest.mark.parametrize(("slots", "memory"), [(2, True), (1, False)])
def test_too_little_host_memory_means_fewer_slots_then_no_memory_tier(
    slots: int, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning; a writer that was started with a memory tier is replaced by one without."""
    room = MemoryLimit(int((slots + 0.9) * (4 * NUMBERS + 4096)), "limit of x")
    monkeypatch.setattr(memory_limits, "look", lambda: room)
    arena = Arena()
    arena.pipeline.start()
    handle = arena.save()
    assert arena.pipeline.memory is memory
    assert (handle.skipped is None) == memory
    assert not arena.save(durable=True).skipped
    warnings = [event.message for event in arena.events if isinstance(event, Notice)]
    assert len(warnings) == 1
    assert "too little host memory for the arena" in warnings[0]
    assert [writer.memory for writer in arena.writers] == [True] + ([] if memory else [False])
    arena.writer.finish()
    for _ in range(3):
        arena.save(durable=True)
        arena.writer.wait(0.0)
    assert len(arena.pipeline.slots.known()) <= slots
    arena.pipeline.close(PATIENCE_SECONDS)


def test_training_goes_on_while_the_writer_waits_for_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rescue may keep the lease for long: snapshots are skipped, and `drain` waits."""
    monkeypatch.setattr(pipeline, "BEHIND_SECONDS", 0.0)
    arena = Arena()
    arena.lease = threading.Event()
    arena.pipeline.behind = True
    arena.pipeline.start()
    assert not arena.pipeline.ready()
    assert "waits for the one before it" in str(arena.save().skipped)
    assert not arena.pipeline.drain(0.0)
    arena.lease.set()
    assert arena.pipeline.drain(PATIENCE_SECONDS)
    assert [event.message for event in arena.events if isinstance(event, Notice)] == ["had to wait"]
    assert arena.pipeline.ready()
    assert not arena.save().skipped
    arena.pipeline.close(PATIENCE_SECONDS)


def test_too_little_host_memory_does_not_wait_for_a_writer_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues without the memory tier, and nothing waits for the lease."""
    monkeypatch.setattr(pipeline, "BEHIND_SECONDS", 0.0)
    room = MemoryLimit(int(1.9 * (4 * NUMBERS + 4096)), "limit of x")
    monkeypatch.setattr(memory_limits, "look", lambda: room)
    arena = Arena()
    arena.lease = threading.Event()
    arena.pipeline.behind = True
    arena.pipeline.start()
    with monkeypatch.context() as patched:
        patched.setattr(pipeline.Handover, "close", lambda *_: pytest.fail("it waits for the writer"))
        assert "waits for the one before it" in str(arena.save().skipped)
    assert not arena.pipeline.memory
    arena.lease.set()
    arena.pipeline.close(PATIENCE_SECONDS)


def test_what_went_wrong_behind_a_writer_is_raised_by_the_next_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another restart of the same run was faster."""
    monkeypatch.setattr(pipeline, "BEHIND_SECONDS", 0.0)
    arena = Arena()
    arena.lease, arena.refused = threading.Event(), LeaseHeldError("somebody else was faster")
    arena.pipeline.behind = True
    arena.pipeline.start()
    assert arena.save().skipped
    arena.lease.set()
    with pytest.raises(LeaseHeldError, match="faster"):
        arena.pipeline.drain(PATIENCE_SECONDS)
