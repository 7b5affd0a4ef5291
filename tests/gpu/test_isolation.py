"""A snapshot of CUDA tensors is one instant, however soon and in whatever stream they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import Notice
from ckpt_engine.snapshot.cuda import Cuda
from ckpt_engine.snapshot.transfers import BUFFER_BYTES
from ckpt_engine.store.tree import TreePath

pytestmark = pytest.mark.gpu

SECONDS = 60.0
CYCLES = 1_000_000_000
"""About half a second of a device that does nothing else."""


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path) as found:
        yield found


def side_stream(ckpt: Checkpointer) -> torch.cuda.Stream:
    """Where the copies are queued, once there was a snapshot."""
    found = ckpt.engine._pipeline.stager.copier.devices._lanes[torch.device("cuda", 0)].stream
    assert isinstance(found, torch.cuda.Stream)
    return found


def delay_copies(ckpt: Checkpointer) -> None:
    """They come long after whatever does not wait for them."""
    with torch.cuda.stream(side_stream(ckpt)):
        torch.cuda._sleep(CYCLES)


def everything(_: TreePath) -> bool:
    return True


def new_state() -> dict[str, Any]:
    """Tensors that go every way: as they are, packed, in rows, and of every kind that is copied differently."""
    draw = torch.Generator(device="cuda").manual_seed(1)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw, device="cuda")

    return {
        "large": rand(40_000_000),
        "middle": rand(1000, 1000),
        "transposed": rand(3000, 900).t(),
        "transposed, large": rand(5000, 5000).t(),
        "channels last": rand(8, 16, 32, 32).to(memory_format=torch.channels_last),
        "every other": rand(1001)[::2],
        "bf16": rand(12_345).bfloat16(),
        "fp8": rand(777).to(torch.float8_e4m3fn),
        "complex": torch.complex(rand(500), rand(500)).conj(),
        "bool": rand(99) > 0.5,
        "scalar": rand(),
        "empty": rand(0),
        "on the host": torch.rand(1000),
        **{f"small {i}": rand(i % 9) for i in range(2000)},
    }


def overwrite(state: dict[str, Any]) -> None:
    """In place, at once, with something else."""
    for tensor in state.values():
        tensor.copy_(torch.ones((), device=tensor.device).to(tensor.dtype)) if tensor.is_cuda else tensor.zero_()


def assert_saved(ckpt: Checkpointer, expected: dict[str, torch.Tensor]) -> None:
    loaded = ckpt.load()
    assert loaded is not None and list(loaded) == list(expected)
    for name, tensor in expected.items():
        found = loaded[name].cpu().resolve_conj().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(found, tensor.cpu().resolve_conj().contiguous().view(-1).view(torch.uint8)), name


def instant(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def test_eager_tensors_may_change_at_once(ckpt: Checkpointer) -> None:
    """The stream waits for the copies; the host does not, not even for kernels that were queued before."""
    state = new_state()
    ckpt.save(state, step=1).wait(SECONDS)  # the arena and the streams are there
    torch.cuda._sleep(CYCLES)
    state["large"].mul_(3)
    expected = instant(state)
    delay_copies(ckpt)
    handle = ckpt.save(state, step=2)
    assert not torch.cuda.current_stream().query(), "the host waited for the device"
    overwrite(state)
    handle.wait(SECONDS)
    assert_saved(ckpt, expected)


def test_lazy_tensors_may_change_after_the_fence(ckpt: Checkpointer) -> None:
    """Forward and backward only read them."""
    state = new_state()
    for step in range(1, 6):
        expected = instant(state)
        if step > 1:
            delay_copies(ckpt)
        handle = ckpt.save(state, step=step, lazy=everything)
        torch.mm(state["middle"], state["middle"])
        ckpt.before_update()
        overwrite(state) if step == 5 else state["large"].add_(step)
        handle.wait(SECONDS)
        assert_saved(ckpt, expected)


def test_an_update_in_another_stream_waits_too(ckpt: Checkpointer) -> None:
    """The fence holds the stream in which it is called."""
    state = new_state()
    ckpt.save(state, step=1, lazy=everything).wait(SECONDS)
    expected = instant(state)
    update = torch.cuda.Stream()
    delay_copies(ckpt)
    handle = ckpt.save(state, step=2, lazy=everything)
    update.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(update):
        ckpt.before_update()
        overwrite(state)
    torch.cuda.current_stream().wait_stream(update)
    handle.wait(SECONDS)
    assert_saved(ckpt, expected)


def test_a_state_that_is_let_go_of_is_not_overwritten_under_the_copy(ckpt: Checkpointer) -> None:
    """The allocator gives freed memory to the next tensor while the copy is still queued."""
    state = {"w": torch.full((30_000_000,), 7.0, device="cuda")}
    ckpt.save(state, step=1).wait(SECONDS)
    delay_copies(ckpt)
    handle = ckpt.save({"w": state["w"] + 1}, step=2)
    for _ in range(4):
        torch.zeros(30_000_000, device="cuda")
    del state
    handle.wait(SECONDS)
    loaded = ckpt.load()
    assert loaded is not None and bool((loaded["w"] == 8).all())


def test_one_snapshot_after_the_other(ckpt: Checkpointer) -> None:
    """At every step, without waiting for any: each one is the instant of its step."""
    weights = torch.zeros(5_000_000, device="cuda")
    handles = []
    for step in range(1, 8):
        ckpt.before_update()
        weights.fill_(step)
        handles.append(ckpt.save({"w": weights}, step=step, lazy=everything))
    taken = [handle for handle in handles if handle.skipped is None]
    taken[-1].wait(SECONDS)
    loaded = ckpt.load()
    assert loaded is not None and bool((loaded["w"] == taken[-1].step).all())


@pytest.mark.parametrize("lazy", [None, everything])
def test_without_the_waits_snapshots_are_torn(
    lazy: Callable[[TreePath], bool] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would say of an engine that forgets them."""
    with Checkpointer(tmp_path) as ckpt:
        state = new_state()
        overwrite(new_state())  # the first use of a kernel waits for the device, and nothing would be torn
        ckpt.save(state, step=1).wait(SECONDS)
        side, hold = side_stream(ckpt), Cuda.hold

        def forget(self: Cuda, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
            if stream == side:
                hold(self, stream, event)

        monkeypatch.setattr(Cuda, "hold", forget)
        expected = instant(state)
        delay_copies(ckpt)
        handle = ckpt.save(state, step=2, lazy=lazy)
        ckpt.before_update()
        overwrite(state)
        handle.wait(SECONDS)
        with pytest.raises(AssertionError, match="large"):
            assert_saved(ckpt, expected)


def test_memory_that_cannot_be_page_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One notice says that memory cannot be page-locked; snapshots are whole all the same."""
    monkeypatch.setattr(Cuda, "register", lambda self, device, address, nbytes: "refused")
    messages: list[str] = []
    with Checkpointer(tmp_path) as ckpt:
        emit = ckpt.engine.events.emit
        sink = lambda event: messages.append(event.message) if isinstance(event, Notice) else emit(event)  # noqa: E731
        ckpt.engine.events = type("Sink", (), {"emit": staticmethod(sink)})()
        for step in (1, 2):
            state = new_state()
            expected = instant(state)
            handle = ckpt.save(state, step=step, lazy=everything)
            ckpt.before_update()
            overwrite(state)
            handle.wait(SECONDS)
            assert_saved(ckpt, expected)
    assert [line for line in messages if "page-locked (refused)" in line] == messages[:1]


def test_the_arena_is_page_locked_and_the_device_memory_bounded(ckpt: Checkpointer) -> None:
    """One buffer of at most 64 MiB, and the sums that prove the copies, are all that a snapshot takes on the device."""
    state = new_state()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    ckpt.prepare(state)
    ckpt.save(state, step=1, lazy=everything)
    taken = torch.cuda.memory_allocated() - before
    ckpt.before_update()
    ckpt.wait(SECONDS)
    assert 0 < taken <= BUFFER_BYTES + (1 << 20)
    assert any(slot._bytes.is_pinned() for slot in ckpt.engine._pipeline.slots.known())


def test_restoring_into_device_tensors(ckpt: Checkpointer) -> None:
    """Tensors are filled in place through page-locked memory, whatever streams read them next."""
    state = new_state()
    expected = instant(state)
    ckpt.save(state, step=1).wait(SECONDS)
    overwrite(state)
    addresses = [tensor.data_ptr() for tensor in state.values()]
    loaded = ckpt.load(into=state)
    assert loaded is not None
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        sums = {name: tensor.clone() for name, tensor in state.items()}
    other.synchronize()
    for name, tensor in expected.items():
        a, b = (t.resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (tensor, sums[name]))
        assert torch.equal(a, b), name
    assert [tensor.data_ptr() for tensor in state.values()] == addresses
