"""A snapshot is one instant of the state, however it is copied."""

from __future__ import annotations

import pathlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.engine import Engine
from ckpt_engine.errors import LeaseHeldError, StateError
from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.snapshot import pipeline
from ckpt_engine.snapshot.arena import SharedSlot, Slots, slot_bytes
from ckpt_engine.snapshot.copying import COLD_CHUNK_BYTES, CopyTasks, chunks_of
from ckpt_engine.snapshot.stage import Copier, Staging
from ckpt_engine.state import layout
from ckpt_engine.state.flatten import Flattener
from ckpt_engine.state.layout import Planner
from ckpt_engine.store.tree import TreePath
from tests.restore.peers.writers import until
from tests.writer.staged import WAIT_SECONDS

PATIENCE_SECONDS = 60.0


def everything(_: TreePath) -> bool:
    return True


def big_state() -> dict[str, torch.Tensor]:
    small = {f"s{i}": torch.full((7,), float(i)) for i in range(600)}
    return {"w": torch.randn(3_000_000), "t": torch.randn(64, 32).t(), "e": torch.empty(0), **small}


def stage(state: dict, lazy=None, *, copier: Copier | None = None):
    capture = Planner(Flattener()).capture(state, lazy)
    slot = SharedSlot(0, slot_bytes(capture.plan))
    done: list[BaseException | None] = []
    staging = Staging(capture, slot.views(capture.plan), done.append, slot=slot.memory)
    staging.begin(copier or Copier(0))
    names = [e.name for e in capture.plan.layout.entries]
    return staging, dict(zip(names, slot.views(capture.plan), strict=True)), done


@pytest.mark.parametrize("lazy", [None, everything], ids=["eager", "lazy"])
def test_host_memory_is_complete_when_it_returns(lazy: Callable[[TreePath], bool] | None) -> None:
    """Live tensors in host memory may change at once, also those that are declared lazy."""
    state = big_state()
    expected = {k: v.clone() for k, v in state.items()}
    staging, views, done = stage(state, lazy)
    for tensor in state.values():
        tensor.add_(1)
    assert staging.complete and done == [None]
    assert all(torch.equal(views[k], expected[k]) for k in state)


class InPairs(Staging):
    """Two copies that wait for each other: one thread alone never ends them."""

    def __init__(self) -> None:
        both = threading.Barrier(2)

        class Task:
            def run(self) -> None:
                both.wait(PATIENCE_SECONDS)

        self.host = CopyTasks([Task(), Task()])  # type: ignore[list-item]


def test_the_thread_that_helps_always_finds_what_is_copied() -> None:
    """The training thread does not copy everything alone."""
    copier = Copier()
    copier._count = 1
    try:
        for _ in range(40):
            staging = InPairs()
            copier.submit(staging)
            staging.host.finish()
            assert staging.host.error is None
    finally:
        copier.close(PATIENCE_SECONDS)


def test_threads_that_wait_do_not_keep_a_snapshot_alive() -> None:
    """The tensors of the last snapshot are gone as soon as their owner lets go of them."""
    copier = Copier()
    try:
        staging = InPairs()
        gone = threading.Event()
        weakref.finalize(staging, gone.set)
        copier._count = 1
        copier.submit(staging)
        staging.host.finish()
        del staging
        assert gone.wait(PATIENCE_SECONDS)
    finally:
        copier.close(PATIENCE_SECONDS)


@pytest.mark.parametrize("lazy", [None, everything], ids=["eager", "lazy"])
@pytest.mark.parametrize("least", [10, 10_000], ids=["packed", "apart"])
def test_small_tensors_in_a_slot_of_before_are_those_of_now(
    monkeypatch: pytest.MonkeyPatch, least: int, lazy: Callable[[TreePath], bool] | None
) -> None:
    """Other shapes and other orders of the same bytes have no use for the views that a slot was filled by."""
    monkeypatch.setattr(layout, "LEAST_ARRAYS", least)
    planner, slot = Planner(Flattener()), None
    for shapes in [((64, 60), (5000,)), ((64, 60), (5000,)), ((60, 64), (50, 100)), ((5000,), (1, 3840))]:
        for dtype in (torch.float32, torch.float64):
            state = {f"w{i}": torch.randn(shapes[i % 2], dtype=dtype) for i in range(40)}
            state |= {f"n{i}": torch.randint(9, (9000,)) for i in range(3)}
            capture = planner.capture(state, lazy)
            if slot is None:
                slot = SharedSlot(0, 2 * slot_bytes(capture.plan))
                slot.prefault()
            views = slot.views(capture.plan)
            staging = Staging(capture, views, lambda _: None, slot=slot.memory)
            staging.begin(Copier(0))
            staging.fence()
            expected = [source.tensor(capture.arrays).view(-1) for source in capture.plan.sources]
            assert all(torch.equal(view.view(-1), e) for view, e in zip(views, expected, strict=True))


def test_a_failed_copy_is_raised_and_names_the_cause() -> None:
    """The caller has the error; it is not reported a second time."""
    capture = Planner(Flattener()).capture({"a": torch.zeros(70_000), "b": torch.zeros(3, 2).t()})
    slot = SharedSlot(0, slot_bytes(capture.plan))
    views = [torch.zeros(4) if entry.name == "b" else torch.zeros(70_000) for entry in capture.plan.layout.entries]
    done: list[BaseException | None] = []
    staging = Staging(capture, views, done.append, slot=slot.memory)
    with pytest.raises(StateError, match="staging failed"):
        staging.begin(Copier(1))
    assert done == [] and staging.complete


def test_slots_are_taken_released_and_grown() -> None:
    """At most `count` slots are in use; a larger structure gets larger memory and old numbers are not reused."""
    planner = Planner(Flattener())
    small, large = planner.capture({"a": torch.zeros(10)}).plan, planner.capture({"a": torch.zeros(100_000)}).plan
    slots = Slots(2)
    first, second = slots.take(small), slots.take(small)
    assert first is not None and second is not None and not slots.ready()
    assert slots.take(small) is None
    slots.release(first.index)
    assert slots.ready()
    third = slots.take(large)
    assert third is not None and third.index not in (first.index, second.index) and third.nbytes >= large.layout.nbytes
    slots.release(second.index)
    slots.release(third.index)
    assert slots.take(large) is third
    slots.close()


def test_warm_up_makes_all_slots_in_the_background() -> None:
    """An announced state finds its slots ready; the arena is at most 5 % larger than the state."""
    plan = Planner(Flattener()).capture({"a": torch.zeros(2_000_000)}).plan
    slots = Slots(2)
    slots.warm_up(plan)
    deadline = time.monotonic() + PATIENCE_SECONDS  # its thread gives way to everybody on the machine
    while not slots.ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert slots.nbytes() <= 2 * 1.05 * plan.layout.nbytes
    slot = slots.take(plan)
    assert slot is not None
    slots.close()


def test_a_snapshot_that_is_taken_before_the_arena_is_ready_gets_a_cold_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a slot away from the warm-up, which leaves it alone from then on; there are never more than wanted."""
    starve(monkeypatch, idle := threading.Event())
    plan = Planner(Flattener()).capture({"a": torch.zeros(8_000_000)}).plan
    slots = Slots(2)
    slots.warm_up(plan)
    first, second = slots.take(plan), slots.take(plan)
    assert first is not None and second is not None and first is not second
    assert first.is_cold and second.is_cold and slots.take(plan) is None and len(slots.known()) == 2
    idle.set()
    slots.close()
    assert first.is_cold


def test_a_slot_that_is_to_be_page_locked_is_never_taken_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that locks it would meet the one that takes it."""
    starve(monkeypatch, idle := threading.Event())
    slots = Slots(2)
    slots.warm_up(Planner(Flattener()).capture({"a": torch.zeros(8_000_000)}).plan)
    assert slots._warm_up is not None and slots.ready(cold=True) and not slots.ready()
    slots._warm_up.devices = (torch.device("cuda"),)
    assert not slots.ready(cold=True)
    slots._warm_up.devices = ()
    idle.set()
    slots.close()


def test_a_cold_slot_is_filled_through_its_file_and_mapped_once_it_is_free() -> None:
    """Every copy into it, cold or warm, while its pages are being mapped or not, is the state of that instant."""
    planner, slots = Planner(Flattener()), Slots(1)
    state = {"w": torch.randn(40_000_000), "t": torch.randn(64, 3000).t(), "s": torch.ones(7), "e": torch.empty(0)}
    found = []
    for _ in range(3):
        capture = planner.capture(state)
        slot = slots.take(capture.plan)
        assert slot is not None
        found.append(slot.is_cold)
        views = slot.views(capture.plan)
        Staging(capture, views, lambda _: None, slot=slot.memory).begin(Copier(0))
        for entry, view in zip(capture.plan.layout.entries, views, strict=True):
            assert torch.equal(view, state[entry.name]), entry.name
        slots.release(slot.index)
        if len(found) == 2:
            until(lambda: not slots.known()[0].is_cold)
        for tensor in state.values():
            tensor.add_(1)
    assert found[0] and not found[2] and slots.touched_seconds > 0
    slots.close()


@pytest.mark.long
def test_no_thread_keeps_a_slot_that_is_closed() -> None:
    """One that lets go of the last view while the interpreter ends would end the process with SIGABRT."""
    planner, slots = Planner(Flattener()), Slots(1)
    capture = planner.capture({"w": torch.ones(100_000_000)})
    slot = slots.take(capture.plan)
    assert slot is not None
    Staging(capture, slot.views(capture.plan), lambda _: None, slot=slot.memory).begin(Copier(0))
    slots.release(slot.index)
    slots.close()
    assert not [one.name for one in threading.enumerate() if one.name == "ckpt-map"]


def test_huge_pages_are_made_without_touching_what_is_there() -> None:
    """A snapshot may be copied into a slot while another thread still touches it."""
    slot = SharedSlot(0, 200_000_000)
    slot._bytes[::4096] = 7
    slot.prefault()
    assert bool((slot._bytes[::4096] == 7).all()) and not slot.is_cold
    slot.close()


def starve(monkeypatch: pytest.MonkeyPatch, idle: threading.Event) -> None:
    """The thread of the lowest priority gets no processor before `idle` is set."""
    prefault = SharedSlot.prefault

    def starved(self: SharedSlot, go_on: Callable[[], bool] = lambda: True) -> bool:
        if threading.current_thread().name == "ckpt-prefault":
            idle.wait(WAIT_SECONDS)
        return prefault(self, go_on)

    monkeypatch.setattr(SharedSlot, "prefault", starved)


def test_a_snapshot_that_is_due_does_not_wait_until_cores_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up runs at the lowest priority; where `ready` has been asked, another thread helps."""
    plan = Planner(Flattener()).capture({"a": torch.zeros(2_000_000)}).plan
    starve(monkeypatch, idle := threading.Event())
    slots = Slots(2)
    slots.warm_up(plan)
    taken = []
    for _ in range(2):
        until(slots.ready)
        taken.append(slots.take(plan))
    assert not any(slot.is_cold for slot in taken if slot is not None)
    assert len({slot.index for slot in taken if slot is not None}) == 2
    slots.discard_busy()  # the writer was lost
    assert slots.take(plan) is not None
    idle.set()
    slots.close()


def test_a_warm_up_for_a_state_that_has_grown_starts_again() -> None:
    """Optimizers have no state before their first step."""
    small, large = (Planner(Flattener()).capture({"a": torch.zeros(count)}).plan for count in (8_000_000, 24_000_000))
    slots = Slots(2)
    slots.warm_up(small)
    slots.warm_up(large)
    assert all(slot.nbytes >= large.layout.nbytes for slot in slots.known())
    assert len(slots.known()) == 2
    assert slots.take(large) is not None
    slots.close()


def test_closing_at_once_lets_the_threads_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in flight, so a second Ctrl-C, which waits for nothing, has no error to tell."""
    run = Copier._run

    def slowly(self: Copier) -> None:
        run(self)
        threading.Event().wait(0.1)  # as on a machine whose cores are busy

    monkeypatch.setattr(Copier, "_run", slowly)
    monkeypatch.setattr(pipeline, "_CHUNK_SECONDS", PATIENCE_SECONDS)  # a second is short where cores are busy
    ckpt = Checkpointer(tmp_path, writer="thread")
    ckpt.save(big_state(), step=1).wait(60.0)
    ckpt.close(0.0)


def test_threads_that_fill_a_cold_slot_do_not_wait_for_each_other() -> None:
    """The kernel lets one thread write to a file at a time: another one copies through the mapping."""
    state = {"w": torch.randn(COLD_CHUNK_BYTES // 2)}
    capture = Planner(Flattener()).capture(state)
    slot = SharedSlot(0, slot_bytes(capture.plan))
    (view,), memory = slot.views(capture.plan), slot.memory
    first, second = chunks_of(view, state["w"], memory)
    with memory.writes:
        thread = threading.Thread(target=first.run, daemon=True)
        thread.start()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    second.run()
    assert torch.equal(view, state["w"])
    slot.close()


def test_the_first_writer_starts_while_the_first_snapshot_is_copied(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it does not start before the copy has begun. `save` waits for it, and raises what keeps it from starting."""
    copying, (begin, open_writer) = threading.Event(), (Staging.begin, Engine._open_writer)
    refusals = [LeaseHeldError("another process writes this run")]

    def began(self: Staging, copier: Copier) -> None:
        copying.set()
        begin(self, copier)

    def late(self: Engine, *how: Any) -> Any:
        assert copying.wait(WAIT_SECONDS), "nothing is copied before the writer has started"
        if refusals:
            raise refusals.pop()
        return open_writer(self, *how)

    monkeypatch.setattr(Staging, "begin", began)
    monkeypatch.setattr(Engine, "_open_writer", late)
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        with pytest.raises(LeaseHeldError, match="another"):
            ckpt.save(big_state(), step=1)
        assert not ckpt.engine._pipeline.started and not ckpt.engine._pipeline.slots.known()
        assert ckpt.save(big_state(), step=2).wait(WAIT_SECONDS)


def test_what_the_first_writer_waits_for_is_said_while_it_waits(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here another process has the lease until the notice of that is heard."""
    said, open_writer = threading.Event(), Engine._open_writer

    def waits(self: Engine, memory: bool, emit: Callable[[Event], None]) -> Any:
        emit(Notice("INFO", "waiting for the lease"))
        assert said.wait(WAIT_SECONDS), "`save` is silent while it waits"
        return open_writer(self, memory, emit)

    class Ears:
        def emit(self, event: Event) -> None:
            if isinstance(event, Notice) and "the lease" in event.message:
                said.set()

    monkeypatch.setattr(Engine, "_open_writer", waits)
    monkeypatch.setattr("tests.snapshot.test_stage.WAIT_SECONDS", 20.0)
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        ckpt.engine.events = Ears()
        assert ckpt.save(big_state(), step=1).wait(WAIT_SECONDS)
