"""The parts of the memory tier: what arrives is resolved at once, numbered once, kept until something newer comes."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.copy.job import RankConfig, WriterConfig, to_json
from ckpt_engine.copy.transfer import RunText
from ckpt_engine.errors import WriterError
from ckpt_engine.observe.events import GONE, Requested
from ckpt_engine.store import manifest_codec
from ckpt_engine.store.names import parse_id, session_id
from ckpt_engine.writer import control, part_records
from ckpt_engine.writer.control import ControlHandlers
from ckpt_engine.writer.job_queue import JobQueue
from ckpt_engine.writer.launch import ThreadWriter
from ckpt_engine.writer.memory_snapshots import Ids, MemorySnapshots, MessageDecoder, StagedJob
from ckpt_engine.writer.messages import Kind, Reply, nothing
from ckpt_engine.writer.persister import Persister
from ckpt_engine.writer.pulse import HeartbeatPage, read_pulse
from tests.writer.staged import NONE, WAIT_SECONDS, Stage, check_all, weight_bytes

RUN = RunText("0" * 32, b"{}")


class Trainer:
    """Sends to an intake what a trainer sends, and owns what comes of it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.intake = MessageDecoder()
        self.orders: list[StagedJob] = []
        self.intake.take(*stage.message())

    def say(self, fds: Sequence[int] = (), **changes: Any) -> None:
        """What is new of the arena: nothing but these changes."""
        same: dict[str, Any] = {"slot": None, "gone": [], "layout": None, "keys": [], "trees": {}}
        self.intake.take({"kind": Kind.ARENA, **same, **changes}, fds)

    def hold(self, step: int, **changes: Any) -> StagedJob:
        job = dataclasses.replace(self.stage.job(step), **changes)
        order = self.intake.take({"kind": Kind.HOLD, "job": to_json(job)})
        assert order is not None
        self.orders.append(order)
        return order

    def close(self) -> None:
        self.orders.clear()
        self.intake.close()


@pytest.fixture
def sending(stage: Stage) -> Iterator[Trainer]:
    made = Trainer(stage)
    yield made
    made.close()


@pytest.fixture
def ids() -> Ids:
    made = Ids()
    made.begin(5)
    return made


@pytest.fixture
def snapshots(ids: Ids) -> Iterator[MemorySnapshots]:
    made = MemorySnapshots(ids, lambda: None)
    yield made
    made.close()


def files() -> int:
    """Open descriptors."""
    return len(list(Path("/proc/self/fd").iterdir()))


def offered(snapshots: MemorySnapshots) -> Reply:
    assert snapshots.sealed.wait(WAIT_SECONDS)
    offer = snapshots.offer()
    assert offer is not None and offer.body["snapshot"] is not None
    return offer


def test_an_order_keeps_what_it_was_sent_with(sending: Trainer) -> None:
    """Slots, layouts and keys that are replaced or forgotten later do not change an order."""
    order = sending.hold(3)
    layout = {"header_nbytes": 0, "nbytes": 0, "entries": [], "structure": ""}
    sending.say([os.memfd_create("other")], slot=[0, 1], layout=layout, keys=["x"], trees={"x": {"$": "v", "i": 0}})
    sending.say(gone=[0])
    staged = order.staged("00000001-s0000000003-00000000")
    assert list(staged.manifest("run", staged.timed_digest()[0]).entries) == ["model.weight", "step", "model.none"]
    with staged.slot.image(staged.data.nbytes) as image:
        assert bytes(image[-16:-8]) == weight_bytes(3, 8)


def test_what_is_not_sent_again_is_as_before(sending: Trainer) -> None:
    """A key that is new, in the order that is said; the skeletons of the others stay, and so does the layout."""
    sending.say(keys=["loop", "more", "model"], trees={"more": [NONE]})
    staged = sending.hold(30, values={"loop": [3]}).staged("00000001-s0000000030-00000000")
    manifest = staged.manifest("run", staged.timed_digest()[0])
    assert list(manifest.tree) == ["loop", "more", "model"]
    assert (manifest.tree["loop"]["epoch"], manifest.tree["more"]) == (3, [NONE])
    sending.say(keys=["loop"])
    assert list(sending.hold(40).staged("00000002-s0000000040-00000000").skeletons) == ["loop"]


def test_an_order_that_names_nothing_says_so(sending: Trainer, stage: Stage) -> None:
    """A slot that was not sent, or the slot alone: neither becomes a snapshot."""
    order = sending.hold(1, slot=9)
    assert order.problem is not None
    with pytest.raises(WriterError, match="9 was never sent"):
        order.staged("x")
    sending.intake.close()
    sending.intake = MessageDecoder()
    sending.say([os.dup(stage.fd)], slot=[0, stage.nbytes])
    with pytest.raises(WriterError, match="no layout was sent"):
        sending.hold(1).staged("x")


def test_the_memory_goes_with_its_last_user(sending: Trainer) -> None:
    """The descriptor of a slot is open as long as an order of it is, and no longer."""
    before = files()
    order = sending.hold(1)
    sending.say(gone=[0])
    assert files() == before
    sending.orders.remove(order)
    assert files() == before
    del order
    assert files() == before - 1


def test_numbers_are_given_once_and_grow(sending: Trainer, ids: Ids) -> None:
    """Numbers grow in the order of the requests, exceed the parent's number, and a failed snapshot gets a new one."""
    first, second, third = sending.hold(1), sending.hold(2), sending.hold(3, parent="00000041-s0000000009-00000000")
    found = [ids.of(order) for order in (first, second, first, third)]
    assert [parsed.seq for name in found if (parsed := parse_id(name))] == [5, 6, 5, 42]
    again = parse_id(ids.renew(first))
    assert again is not None and (again.seq, again.step) == (43, 1)
    assert ids.of(first) == again.id


def test_a_newer_snapshot_replaces_the_one_in_memory(sending: Trainer, snapshots: MemorySnapshots) -> None:
    """The memory of the older snapshot is free then."""
    first, second = sending.hold(1), sending.hold(2)
    slot = weakref.ref(first)
    snapshots.hold(first)
    sending.say(gone=[0])
    sending.orders.remove(first)
    del first
    assert slot() is not None
    snapshots.hold(second)
    assert snapshots.newest is second
    assert slot() is None


def test_nothing_is_offered_while_the_trainer_may_change_it(sending: Trainer, snapshots: MemorySnapshots) -> None:
    """A snapshot is offered only after `seal`, when it is final."""
    snapshots.hold(sending.hold(1))
    assert snapshots.offer() is None
    assert not snapshots.sealed.wait(0.0)
    snapshots.seal(RUN)
    offer = offered(snapshots)
    manifest = manifest_codec.decode(offer.body["manifest"].encode())
    assert (manifest.info.step, manifest.info.id, manifest.run) == (1, offer.body["snapshot"], RUN.run)
    assert os.pread(offer.fds[0], 8, manifest.entries["model.weight"].pieces[0].offset) == weight_bytes(1, 8)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(offer.fds[0], b"x", 0)
    os.close(offer.fds[0])


def test_nothing_is_offered_before_it_has_a_number(sending: Trainer) -> None:
    """Further tiers may still say that they have higher ones."""
    ids = Ids()
    snapshots = MemorySnapshots(ids, lambda: None)
    snapshots.hold(sending.hold(1))
    snapshots.seal(RUN)
    assert snapshots.sealed.wait(WAIT_SECONDS)
    assert snapshots.offer() is None
    ids.begin(100)
    offer = offered(snapshots)
    assert offer.body["snapshot"].startswith("00000100-")
    os.close(offer.fds[0])
    snapshots.close()


def test_the_number_offered_is_the_one_it_becomes_durable_under(
    sending: Trainer, snapshots: MemorySnapshots, ids: Ids
) -> None:
    """The offer gives the snapshot its number, and the writer commits it under the same one."""
    order = sending.hold(1)
    snapshots.hold(order)
    snapshots.seal(RUN)
    offer = offered(snapshots)
    os.close(offer.fds[0])
    assert ids.of(order) == offer.body["snapshot"]


def test_a_slot_that_cannot_be_read_is_not_offered(sending: Trainer, snapshots: MemorySnapshots) -> None:
    """The reason is given instead."""
    order = sending.hold(1)
    os.ftruncate(sending.stage.fd, 0)
    snapshots.hold(order)
    snapshots.seal(RUN)
    assert snapshots.sealed.wait(WAIT_SECONDS)
    refused = snapshots.offer()
    assert refused is not None and "cannot be used: cannot map an arena slot" in refused.body["why"]


def test_no_snapshot_is_an_answer_too(snapshots: MemorySnapshots) -> None:
    """The answer comes at once."""
    snapshots.seal(RUN)
    assert snapshots.offer() == nothing("no snapshot is in memory")


def test_a_snapshot_leaves_memory_once_it_is_durable_and_unused(sending: Trainer, snapshots: MemorySnapshots) -> None:
    """Neither alone is enough. `settle` also gives up a snapshot that cannot become durable."""
    order = sending.hold(1)
    snapshots.hold(order)
    snapshots.let_go()
    assert snapshots.newest is order
    order.durable = True
    snapshots.settle()
    assert snapshots.newest is None and not snapshots.all_held()
    other = sending.hold(2)
    snapshots.hold(other)
    snapshots.settle()
    assert snapshots.newest is None


class Visit:
    """The control handlers of a writer; the test says whether its trainer lives and takes requests."""

    def __init__(self, snapshots: MemorySnapshots) -> None:
        self.lives = self.takes = True
        self.forwarded: list[tuple[str, str]] = []
        self.byes = 0
        queue: Any = SimpleNamespace(held=snapshots, flush=lambda: None, config=SimpleNamespace(ranks=None), peers=None)
        self.handlers = ControlHandlers(queue, self.forward, lambda: self.lives, self.bye)

    def forward(self, what: str, who: str) -> bool:
        self.forwarded.append((what, who))
        return self.takes

    def bye(self) -> None:
        self.byes += 1

    def ask(self, what: str, **rest: Any) -> Any:
        reply = self.handlers.answer({"what": what, **rest})
        return None if reply is None else reply.body


def test_a_trainer_that_has_just_died_makes_answers_wait(sending: Trainer, snapshots: MemorySnapshots) -> None:
    """What it sent last may not have arrived: neither its memory nor the name is given away before."""
    visit = Visit(snapshots)
    snapshots.hold(sending.hold(1))
    visit.lives = False
    assert visit.ask(control.Question.SNAPSHOT) is None
    assert visit.ask(control.Question.BYE) is None
    visit.handlers.leave(serves=True)
    assert visit.ask(control.Question.SNAPSHOT) is None
    snapshots.seal(RUN)
    assert snapshots.sealed.wait(WAIT_SECONDS)
    reply = visit.handlers.answer({"what": control.Question.SNAPSHOT})
    assert reply is not None and reply.body["step"] == 1
    os.close(reply.fds[0])
    assert visit.byes == 0
    assert visit.ask(control.Question.BYE) == {"ok": True}
    assert visit.byes == 1


def test_a_run_that_was_closed_serves_nothing(sending: Trainer, snapshots: MemorySnapshots) -> None:
    """The answer says at once that the run was closed, though its last snapshot is still being written."""
    visit = Visit(snapshots)
    snapshots.hold(sending.hold(1))
    visit.lives = False
    visit.handlers.leave(serves=False)
    assert visit.ask(control.Question.SNAPSHOT) == {"snapshot": None, "why": "the run was closed"}
    assert visit.ask(control.Question.BYE) == {"ok": True}


def test_requests_are_forwarded_to_a_trainer_that_takes_them(snapshots: MemorySnapshots) -> None:
    """A trainer that takes nothing in, or that is gone, gets none; long names are cut."""
    visit = Visit(snapshots)
    assert visit.ask(control.Question.SAVE, who="x" * 9999) == {"trainer": True}
    assert visit.forwarded == [("save", "x" * 200)]
    visit.takes = False
    assert visit.ask(control.Question.STOP) == {"trainer": False}
    visit.lives = False
    assert visit.ask(control.Question.STOP) == {"trainer": False}
    assert len(visit.forwarded) == 2
    assert visit.ask(control.Question.STATUS)["held"] is None


def test_a_request_waits_once(stage: Stage) -> None:
    """A request that is repeated before the trainer reads it is kept once: it cannot fill the trainer's memory."""
    client = ThreadWriter(WriterConfig("tier"))
    for what in ("save", "save", "stop", "save"):
        client._hear({"kind": Kind.REQUEST, "what": what, "who": "me"})
    assert client.poll() == [Requested("save", "me"), Requested("stop", "me")]


def test_the_pulse_is_read_from_its_descriptor() -> None:
    """The last beat; none before the first, and none in what is no pulse."""
    pulse = HeartbeatPage()
    assert read_pulse(pulse.fd) is None
    for step in (1, 2):
        pulse.beat(step)
    beat = read_pulse(pulse.fd)
    assert beat is not None and beat.step == 2 and beat.instant_monotonic > 0
    before = files()
    del pulse
    assert files() == before - 1
    with Path(os.devnull).open() as nothing:
        assert read_pulse(nothing.fileno()) is None
    assert read_pulse(-1) is None


def test_a_new_pulse_replaces_the_old_one(snapshots: MemorySnapshots) -> None:
    """Only the newest descriptor stays open."""
    pulses = [HeartbeatPage(), HeartbeatPage()]
    before = files()
    for step, pulse in enumerate(pulses):
        pulse.beat(step)
        snapshots.take_pulse(os.dup(pulse.fd))
    assert files() == before + 1
    assert snapshots.beat is not None and snapshots.beat.step == 1


def test_the_newest_has_the_highest_number_though_it_overtakes(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is offered before the job at hand, an older one, has got anywhere."""
    at_hand, go_on = threading.Event(), threading.Event()
    persist = Persister.persist

    def late(self: Persister, order: StagedJob) -> None:
        at_hand.set()
        assert go_on.wait(WAIT_SECONDS)
        persist(self, order)

    monkeypatch.setattr(Persister, "persist", late)
    worker = JobQueue(WriterConfig(str(tmp_path / "run"), memory=True), lambda body: None, lambda broken: None)
    worker.start()
    second = Stage(slot=1)
    for each in (stage, second):
        worker.put(*each.message())
    worker.put({"kind": Kind.PERSIST, "job": to_json(stage.job(1))})
    assert at_hand.wait(WAIT_SECONDS)
    worker.put({"kind": Kind.HOLD, "job": to_json(second.job(2))})
    worker.abandon(GONE)
    offer = offered(worker.held)
    os.close(offer.fds[0])
    go_on.set()
    worker.join(WAIT_SECONDS)
    assert not worker.is_alive()
    worker.held.close()
    second.close()
    infos = check_all(tmp_path / "run")
    assert [(info.step, info.seq) for info in infos] == [(1, 1), (2, 2)]
    assert infos[-1].id == offer.body["snapshot"]


@pytest.fixture
def share(ids: Ids) -> Iterator[MemorySnapshots]:
    made = MemorySnapshots(ids, lambda: None, RankConfig(1, 2, "session", None, 1.0))
    yield made
    made.close()


def hold_in(sending: Trainer, share: MemorySnapshots, slot: int, step: int) -> str:
    """Keep a snapshot of `step` in memory, in a slot; returns its id, which the ranks have given it."""
    snapshot = session_id("session", step, step)
    sending.intake.take(*sending.stage.message(slot))
    share.hold(sending.hold(step, slot=slot, job=step, snapshot=snapshot))
    return snapshot


def test_one_of_several_ranks_keeps_three(sending: Trainer, share: MemorySnapshots) -> None:
    """Newest first; what was in the slot of a newer one is gone."""
    found = [hold_in(sending, share, slot, step) for step, slot in ((1, 0), (2, 1), (3, 2), (4, 3))]
    share.seal(RUN)
    assert share.sealed.wait(WAIT_SECONDS)
    assert share.ids() == [found[3], found[2], found[1]]
    again = hold_in(sending, share, 2, 5)
    assert share.ids() == [again, found[3], found[1]]


def test_what_was_being_overwritten_is_not_kept(sending: Trainer, share: MemorySnapshots) -> None:
    """The trainer has said whose slot it fills before it did; one that is complete there again is whole."""
    found = [hold_in(sending, share, slot, step) for step, slot in ((1, 0), (2, 1), (3, 2))]
    pulse = HeartbeatPage()
    pulse.fill(2, 3)
    share.take_pulse(os.dup(pulse.fd))
    share.drop_torn()
    share.seal(RUN)
    assert share.sealed.wait(WAIT_SECONDS)
    assert share.ids() == found[::-1]
    pulse.fill(0, 4)
    share.drop_torn()
    assert share.ids() == found[:0:-1]


def test_a_share_is_offered_by_its_name_with_its_part_record(sending: Trainer, share: MemorySnapshots) -> None:
    """Its digests are worked out when somebody asks; without a name there is no whole snapshot to offer."""
    found = [hold_in(sending, share, slot, step) for step, slot in ((1, 0), (2, 1))]
    share.seal(RUN)
    assert share.sealed.wait(WAIT_SECONDS)
    assert share.offer() == nothing("it is the share of one of several ranks")
    assert share.offer("other") == nothing("other is not kept in memory")
    deadline = time.monotonic() + WAIT_SECONDS
    while (offer := share.offer(found[0])) is None:
        assert time.monotonic() < deadline
    part = part_records.decode(offer.body["manifest"].encode(), "here")
    assert (part.rank, part.size, part.manifest.info.id) == (1, 2, found[0])
    os.close(offer.fds[0])
