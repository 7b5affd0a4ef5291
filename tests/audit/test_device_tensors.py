"""What no `state_dict` has and a GPU keeps: read seldom, as each read waits for the device."""

from __future__ import annotations

from typing import Any

import torch

from ckpt_engine.audit.audit import HiddenState


class OnDevice(torch.Tensor):
    """A tensor that says that a GPU has it, and counts who reads it."""

    is_cuda = True
    reads = 0

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        OnDevice.reads += 1
        return super().cpu(*args, **kwargs)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept, self.counts = (torch.zeros(4).as_subclass(OnDevice) for _ in range(2))


def test_a_tensor_of_a_device_is_read_at_few_looks() -> None:
    """The version tells in between: what changes is there at each look, and what does not is at none."""
    model, hidden = Model(), HiddenState("auto")
    hidden.note("batch", {"model": model})
    OnDevice.reads = 0
    for look in range(1, 17):
        model.counts.add_(1)
        assert list(hidden.state()) == ["model.counts"], look
    assert OnDevice.reads <= 2 * 5  # two tensors, at the looks 1, 2, 4, 8 and 16


def test_what_is_written_without_a_trace_is_found_at_the_next_reading_look() -> None:
    """As the replay of a CUDA graph does it; it stays found."""
    model, hidden = Model(), HiddenState("auto")
    hidden.note("batch", {"model": model})
    for _ in range(5):
        assert not hidden.state()
    model.kept.data.fill_(7)
    assert [list(hidden.state()) for _ in range(5)] == [[], [], *[["model.kept"]] * 3]
