"""A snapshot of device tensors is one instant, whatever the streams of training and of the copies do in between."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import Event as EngineEvent
from ckpt_engine.observe.events import Notice
from ckpt_engine.restore import array_regions, device_copies, load_in_place, read
from ckpt_engine.snapshot import cuda, transfers
from ckpt_engine.snapshot.arena import SharedSlot, Slots, slot_bytes
from ckpt_engine.snapshot.cuda import DeviceCopies, TornCopyError
from ckpt_engine.snapshot.proof import vector_bytes
from ckpt_engine.snapshot.stage import Copier, Staging
from ckpt_engine.state import layout
from ckpt_engine.state.flatten import Flattener
from ckpt_engine.state.layout import Planner
from ckpt_engine.store.tree import TreePath
from tests.snapshot.streams import DEVICES, FakeDevices, Stream, on_devices, pumped

BUFFER, DIRECT, PIECE = 4096, 1024, 4096


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """Sizes at which small tensors take every way that large ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "BUFFER_BYTES", BUFFER)
        patch.setattr(transfers, "DIRECT_BYTES", DIRECT)
        patch.setattr(cuda, "PIECE_BYTES", PIECE)
        for module in (read, array_regions, device_copies):
            patch.setattr(module, "READ_BYTES", 3000)
        patch.setattr(device_copies, "_STRIP_UNIT", 64)
        yield


def lazily(path: TreePath) -> bool:
    return path[0] == "lazy"


def device_state(devices: FakeDevices) -> dict[str, dict[str, torch.Tensor]]:
    """Lazy and eager tensors of many kinds on two devices, and some host tensors."""
    draw = torch.Generator().manual_seed(3)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.rand(shape, generator=draw) * 9).to(dtype)

    lazy = {
        "large": new(3000),
        "one piece": new(PIECE // 4),
        **{f"small {i}": new(i % 7) for i in range(20)},
        "transposed": new(30, 40).t(),
        "transposed, long": new(90, 60).t(),
        "long rows": new(1300, 2).t(),
        "half": new(77, dtype=torch.bfloat16),
        "eight": new(33, dtype=torch.float8_e4m3fn),
        "bool": new(5, dtype=torch.bool),
        "complex": torch.complex(new(600), new(600)).conj(),
        "double": new(700, dtype=torch.float64),
        "scalar": new(),
    }
    eager = {
        **{f"stat {i}": new(16) for i in range(6)},
        "table": new(900),
        "huge": new(2000),
        "count": new(3, dtype=torch.int64),
        "transposed": new(12, 20).t(),
    }
    for number, tensor in enumerate([*lazy.values(), *eager.values()]):
        devices.put(tensor, DEVICES[number % 5 == 4])
    return {"lazy": {**lazy, "on the host": new(64)}, "eager": {**eager, "on the host": new(64)}}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(flat[0], flat[1])


@dataclass
class Training:
    """A loop whose kernels change every tensor at every step, in streams that wait for each other as torch asks for."""

    devices: FakeDevices
    monkeypatch: pytest.MonkeyPatch
    lazy: bool = True
    planner: Planner = field(default_factory=lambda: Planner(Flattener()))
    torn: list[str] = field(default_factory=list)
    refused: list[TornCopyError] = field(default_factory=list)

    def __post_init__(self) -> None:
        on_devices(self.devices, self.monkeypatch)
        self.state = device_state(self.devices)
        self.copier = Copier(1, DeviceCopies(self.devices))
        self.update = {device: Stream(f"update {device}") for device in DEVICES}
        self.devices.streams += self.update.values()

    def mutate(self, part: str) -> None:
        """Kernels for device tensors; host tensors change at once."""
        for tensor in self.state[part].values():
            home = self.devices.home(tensor)
            if home is None:
                tensor.add_(1)
            else:
                self.devices.launch(lambda t=tensor: t.copy_(torch.rand(t.shape).to(t.dtype)), home)

    def join(self, waiting: dict[torch.device, Stream], on: dict[torch.device, Stream]) -> None:
        for device in DEVICES:
            event = self.devices.mark(on[device])
            waiting[device].work.append(event)

    def step(self, pumps: list[int]) -> None:
        """A snapshot, and the step after it; compared when it has landed."""
        devices, lazy = self.devices, lazily if self.lazy else None
        self.mutate("lazy")  # the update before, which the device has not done yet
        self.mutate("eager")
        capture = self.planner.capture(self.state, lazy)
        slot = SharedSlot(0, slot_bytes(capture.plan), devices)
        assert slot.pinned.pin(DEVICES[0]) is None
        views = slot.views(capture.plan)
        names = ["/".join(map(str, source.path)) for source in capture.plan.sources]
        expected: dict[str, torch.Tensor] = {}
        for source, name in zip(capture.plan.sources, names, strict=True):
            keep = lambda n=name, s=source: expected.update({n: s.tensor(capture.arrays).clone()})  # noqa: E731
            home = devices.home(capture.arrays[source.array])
            keep() if home is None else devices.launch(keep, home)
        done: list[BaseException | None] = []
        staging = Staging(capture, views, done.append, slot=slot.memory)
        with devices.saving():
            staging.begin(self.copier)
        devices.pump(pumps[0])
        self.mutate("eager")
        if not self.lazy:
            self.mutate("lazy")
        devices.pump(pumps[1])
        self.join(self.update, devices.main)
        with devices.stream(self.update[DEVICES[0]], DEVICES[0]), devices.stream(self.update[DEVICES[1]], DEVICES[1]):
            staging.fence()
            self.mutate("lazy")
            self.mutate("eager")
        devices.pump(pumps[2])
        self.join(devices.main, self.update)
        devices.pump()
        assert staging.wait(30.0)
        if isinstance(done[0], TornCopyError):
            self.refused.append(done[0])
        else:
            assert done == [None]
            self.torn += [n for n, view in zip(names, views, strict=True) if not same_bytes(view, expected[n])]
        slot.close()

    def close(self) -> None:
        self.devices.pump()
        self.copier.close(30.0)


def trained(devices: FakeDevices, pumps: list[list[int]], *, lazy: bool = True) -> Training:
    """A run of as many snapshots as there are `pumps`."""
    with pytest.MonkeyPatch.context() as patch:
        training = Training(devices, patch, lazy)
        try:
            for three in pumps:
                training.step(three)
        finally:
            training.close()
    return training


def torn_in(devices: FakeDevices, pumps: list[list[int]], *, lazy: bool = True) -> list[str]:
    """What is torn in a run; no snapshot of it is refused."""
    training = trained(devices, pumps, lazy=lazy)
    assert not training.refused
    return training.torn


PUMPS = st.lists(st.lists(st.integers(0, 60), min_size=3, max_size=3), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), pumps=PUMPS, lazy=st.booleans())
def test_no_order_of_streams_tears_a_snapshot(seed: int, pumps: list[list[int]], lazy: bool) -> None:
    """Eager tensors change right after `save`, lazy ones in another stream after the fence, on two devices."""
    assert torn_in(FakeDevices(seed), pumps, lazy=lazy) == []


@pytest.mark.parametrize("count", [1, 5])
def test_sums_are_those_of_the_instant_where_nothing_is_packed(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream that makes them waits for the update before, which the device has not done yet."""
    monkeypatch.setattr(cuda, "DIRECT_SUMS", 2)
    for seed in range(20):
        devices, done = FakeDevices(seed), list[BaseException | None]()
        on_devices(devices, monkeypatch)
        state = {f"{i}": devices.put(torch.zeros(DIRECT)) for i in range(count)}
        copier, capture = Copier(1, DeviceCopies(devices)), Planner(Flattener()).capture(state, lambda _: True)
        slot = SharedSlot(0, slot_bytes(capture.plan), devices)
        for tensor in state.values():
            devices.launch(lambda t=tensor: t.fill_(7))
        staging = Staging(capture, slot.views(capture.plan), done.append, slot=slot.memory)
        staging.begin(copier)
        staging.fence()
        devices.pump()
        assert staging.wait(30.0) and done == [None]
        assert all(bool((view == 7).all()) for view in slot.views(capture.plan))
        copier.close(30.0)
        slot.close()


@pytest.mark.cells(1)
@pytest.mark.parametrize("dropped", ["instant", "eager", "fence"])
def test_every_wait_is_needed(dropped: str) -> None:
    """Without any one of the three kinds of waits some order of streams tears a snapshot."""
    runs = [trained(FakeDevices(seed, [dropped]), [[seed % 40, 10, 60]]) for seed in range(30)]
    assert any(run.torn or run.refused for run in runs)


def test_without_a_fence_each_torn_snapshot_is_refused_and_names_what_changed() -> None:
    """Lazy tensors change before they are copied: the sums of the instant are not those of what was copied."""
    runs = [trained(FakeDevices(seed, ["fence"]), [[seed % 40, 10, 60]] * 2) for seed in range(30)]
    assert [name for run in runs for name in run.torn] == []
    refused = [error for run in runs for error in run.refused]
    assert len(refused) >= 10
    assert all(error.code == "CKPT200" and error.message.startswith("lazy/") for error in refused)


def test_without_the_proof_the_same_runs_are_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    monkeypatch.setattr(cuda.Flight, "_find_torn", lambda flight: None)
    runs = [trained(FakeDevices(seed, ["fence"]), [[seed % 40, 10, 60]] * 2) for seed in range(30)]
    assert sum(bool(run.torn) for run in runs) >= 10


@pytest.mark.parametrize("lazy", [True, False])
def test_small_tensors_of_one_entry_cross_as_they_are_when_the_device_gets_there(
    lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of small tensors have one entry; they are packed in the buffer of the snapshot and nowhere else."""
    monkeypatch.setattr(layout, "LEAST_ARRAYS", 6)
    for seed in range(10):
        devices = FakeDevices(seed)
        assert torn_in(devices, [[seed, 10, 40]] * 2, lazy=lazy) == []


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), pumps=PUMPS, lazy=st.booleans())
def test_no_order_tears_a_snapshot_whose_copies_are_queued_in_parts(
    seed: int, pumps: list[list[int]], lazy: bool
) -> None:
    """The later parts are queued behind training; the fence waits until the last one is."""
    devices = FakeDevices(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "FIRST_COPIES", 5)
        patch.setattr(cuda, "LATER_COPIES", 2)
        with pumped(devices):
            assert torn_in(devices, pumps, lazy=lazy) == []


def test_few_copies_wait_in_a_stream_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that has too many makes the thread that queues the next one wait, and that thread is training's."""
    monkeypatch.setattr(cuda, "FIRST_COPIES", 9)
    monkeypatch.setattr(cuda, "LATER_COPIES", 5)
    devices = FakeDevices()
    devices.idle_until_waited_for = True
    training = Training(devices, monkeypatch)
    capture = training.planner.capture({f"{i}": devices.put(torch.rand(DIRECT)) for i in range(100)}, lambda _: True)
    slot = SharedSlot(0, slot_bytes(capture.plan), devices)
    staging = Staging(capture, slot.views(capture.plan), lambda _: None, slot=slot.memory)
    staging.begin(training.copier)
    staging.fence()
    assert staging.wait(30.0)
    assert 9 <= devices.most_copies <= 9 + 5 + 2, "a step may have two"
    training.close()


def test_the_device_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer for packing per device, no larger than the limit or the longest row that is not in order, and sums."""
    devices = FakeDevices()
    sums: list[int] = []
    monkeypatch.setattr(cuda, "vector_bytes", lambda of: sums.append(vector_bytes(of)) or sums[-1])
    assert torn_in(devices, [[5, 5, 5]] * 3) == []
    longest = 1300 * 4
    assert sum(devices.allocated.values()) <= 2 * (max(BUFFER, longest) + 64) + sum(sums)


def test_the_writer_gets_the_job_when_the_copies_have_landed_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """`begin` and `fence` return at once, with nothing in the arena yet."""
    devices = FakeDevices()
    training = Training(devices, monkeypatch)
    capture = training.planner.capture(training.state, lazily)
    slot = SharedSlot(0, slot_bytes(capture.plan), devices)
    done: list[BaseException | None] = []
    staging = Staging(capture, slot.views(capture.plan), done.append, slot=slot.memory)
    staging.begin(training.copier)
    staging.fence()
    assert not staging.wait(0.3) and done == [] and not staging.over
    devices.pump()
    assert staging.wait(30.0) and done == [None] and staging.over
    training.close()


def test_a_tensor_that_training_lets_go_of_stays_until_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory would be used again under the copy."""
    devices = FakeDevices()
    on_devices(devices, monkeypatch)
    copier = Copier(1, DeviceCopies(devices))
    state = {"t": devices.put(torch.rand(5000))}
    gone = weakref.ref(state["t"])
    planner = Planner(Flattener())
    capture = planner.capture(state)
    slot = SharedSlot(0, slot_bytes(capture.plan), devices)
    staging = Staging(capture, slot.views(capture.plan), lambda _: None, slot=slot.memory)
    staging.begin(copier)
    del state, capture
    assert gone() is not None
    devices.pump()
    assert staging.wait(30.0)
    copier.close(30.0)
    assert gone() is None


def test_a_refused_copy_fails_the_snapshot_and_not_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is reported once all queued copies are over, because they still write into the slot."""
    devices = FakeDevices()
    training = Training(devices, monkeypatch)
    capture = training.planner.capture(training.state, lazily)
    slot = SharedSlot(0, slot_bytes(capture.plan), devices)
    done: list[BaseException | None] = []
    staging = Staging(capture, slot.views(capture.plan), done.append, slot=slot.memory)
    devices.fail_next_copy = True
    with pytest.raises(Exception, match="a copy was refused"):
        staging.begin(training.copier)
    assert done == []
    devices.pump()
    assert staging.wait(30.0)
    assert len(done) == 1 and "a copy was refused" in str(done[0])
    training.step([3, 3, 3])
    assert training.torn == []
    training.close()


def test_a_state_that_moves_to_a_device_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else about it changes."""
    devices = FakeDevices()
    on_devices(devices, monkeypatch)
    planner = Planner(Flattener())
    here = torch.zeros(10)  # which stays, so that the next one has another address
    before = planner.capture({"t": here}).plan
    after = planner.capture({"t": devices.put(torch.zeros(10))}).plan
    assert before.devices == () and after.devices == (DEVICES[0],)


def test_step_counts_on_the_host_do_not_cut_up_what_crosses_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam keeps a host scalar between the two moments of every parameter: thousands of copies if they crossed so."""
    devices = FakeDevices()
    on_devices(devices, monkeypatch)
    state = {
        i: {
            "step": torch.tensor(1.0),
            "exp_avg": devices.put(torch.zeros(2)),
            "exp_avg_sq": devices.put(torch.zeros(2)),
        }
        for i in range(100)
    }
    entries = Planner(Flattener()).capture(state, lambda _: True).plan.layout.entries
    names = [entry.name.rpartition("/")[2] for entry in entries]
    assert names == ["step"] * 100 + ["exp_avg", "exp_avg_sq"] * 100


def test_slots_for_devices_are_page_locked_in_pieces_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long call would stop every process on the machine that uses a GPU."""
    devices = FakeDevices()
    on_devices(devices, monkeypatch)
    on_host = Planner(Flattener()).capture({"a": torch.zeros(4000)}).plan
    plan_ = Planner(Flattener()).capture({"a": devices.put(torch.zeros(4000))}).plan
    slots = Slots(2, devices)
    assert slots.take(on_host) is not None and not devices.registered
    slots.close()
    slots.warm_up(plan_)
    slot = slots.take(plan_)
    assert slot is not None and slots.pin_problem is None
    assert sum(devices.registered.values()) >= slot.nbytes and max(devices.registered.values()) == PIECE
    slots.close()
    assert not devices.registered


def test_memory_that_cannot_be_page_locked_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is page-locked as a whole or not at all: half of it would be of no use."""
    devices = FakeDevices(lockable=2)
    on_devices(devices, monkeypatch)
    plan_ = Planner(Flattener()).capture({"a": devices.put(torch.zeros(4000))}).plan
    slots = Slots(1, devices)
    assert slots.take(plan_) is not None
    assert slots.pin_problem == "out of memory" and not devices.registered and devices.unregistered == 2
    slots.close()


def checkpointer_on(devices: FakeDevices, folder: object, **options: object) -> Checkpointer:
    """A real one, whose copies from devices go through `devices`."""
    ckpt = Checkpointer(str(folder), writer="thread", **options)
    ckpt.engine._pipeline.stager.copier = Copier(1, DeviceCopies(devices))
    ckpt.engine._pipeline.slots = ckpt.engine._pipeline.in_flight._slots = Slots(2, devices)
    return ckpt


def test_snapshots_in_a_row_are_each_one_instant_and_come_back_onto_the_device(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part is real but the device: save without waiting, restore into device tensors."""
    devices = FakeDevices(7)
    on_devices(devices, monkeypatch)
    state = {"lazy": {"w": devices.put(torch.zeros(5000)), "b": devices.put(torch.zeros(9))}, "step": 0}
    target = {"lazy": {"w": devices.put(torch.ones(5000)), "b": devices.put(torch.ones(9))}, "step": 0}
    handles = []
    with pumped(devices), checkpointer_on(devices, tmp_path, keep={"last": 2}) as ckpt:
        for step in range(1, 6):
            ckpt.before_update()
            for tensor in (state["lazy"]["w"], state["lazy"]["b"]):
                devices.launch(lambda t=tensor: t.add_(1))
            state["step"] = step
            while not ckpt.engine.ready():
                next((h for h in handles if not h.done()), handles[-1]).wait(30.0)
            handles.append(ckpt.save(state, step=step, lazy=lazily))
        handles[-1].wait(30.0)
    assert not devices.registered, "nothing stays page-locked"
    monkeypatch.setattr(load_in_place, "_takes_bytes", lambda live, entry: isinstance(live, torch.Tensor))
    fill = device_copies.fill
    monkeypatch.setattr("ckpt_engine.restore.load_in_place.fill", lambda *rest: fill(*rest, runtime=devices))
    for step in (4, 5):
        with pumped(devices), Checkpointer(str(tmp_path)) as ckpt:
            ckpt.load(step, into=target)
        assert torch.equal(target["lazy"]["w"], torch.full((5000,), float(step)))
        assert torch.equal(target["lazy"]["b"], torch.full((9,), float(step)))
    assert not devices.registered


def test_the_next_snapshot_waits_until_the_one_before_has_landed(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer gets the snapshots in their order, and what they refer to in between."""
    devices = FakeDevices()
    on_devices(devices, monkeypatch)
    state = {"lazy": {"w": devices.put(torch.rand(500))}}
    landing_begins, over = threading.Event(), threading.Event()

    def land() -> None:
        landing_begins.wait(0.5)
        landing_begins.set()
        while not over.wait(0.001):
            devices.pump()

    thread = threading.Thread(target=land)
    try:
        with checkpointer_on(devices, tmp_path) as ckpt:
            ckpt.save(state, step=1, lazy=lazily)
            ckpt.before_update()
            assert not ckpt.engine.ready()
            thread.start()
            second = ckpt.save(state, step=2, lazy=lazily)
            assert landing_begins.is_set()
            second.wait(30.0)
    finally:
        over.set()
        thread.join(30.0)


def test_a_device_that_is_late_gets_every_restored_byte(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No strip is used again before it was copied from, and all has arrived when `load` returns."""
    monkeypatch.setattr("ckpt_engine.restore.ask_tiers.READS_ON_MACHINE", 1)  # one thread has two strips
    state = {f"t{i}": torch.rand(100 + 37 * i) for i in range(12)}
    with Checkpointer(str(tmp_path), writer="thread") as ckpt:
        ckpt.save(state, step=1).wait(30.0)
    devices = FakeDevices()
    devices.idle_until_waited_for = True
    fill = device_copies.fill
    monkeypatch.setattr("ckpt_engine.restore.load_in_place.fill", lambda *rest: fill(*rest, runtime=devices))
    target = {name: devices.put(torch.zeros_like(tensor)) for name, tensor in state.items()}
    with Checkpointer(str(tmp_path)) as ckpt:
        ckpt.load(into=target)
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
    assert not devices.registered


def test_one_notice_says_that_memory_cannot_be_page_locked(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots go on, but slower."""
    devices = FakeDevices(lockable=0)
    on_devices(devices, monkeypatch)
    events: list[EngineEvent] = []
    with pumped(devices), checkpointer_on(devices, tmp_path) as ckpt:
        ckpt.engine.events = type("Sink", (), {"emit": staticmethod(events.append)})()
        for step in (1, 2):
            ckpt.save({"w": devices.put(torch.rand(50))}, step=step).wait(30.0)
    messages = [event.message for event in events if isinstance(event, Notice)]
    assert len(messages) == 1 and "cannot be page-locked (out of memory)" in messages[0]
