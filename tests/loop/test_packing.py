"""Packing small values never waits for torch's team of threads, which waits for a core that something else uses."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_engine.loop.capture import Packer, unpack

SHARED_ELEMENTS = 32_768
"""From so many on torch shares an operation out over its team."""


class Operations(TorchDispatchMode):
    """Keeps the names of operations that make or fill a tensor of so many elements; views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        writes = func._schema.is_mutable or not any(one.alias_info for one in func._schema.returns)
        if writes and isinstance(found, torch.Tensor) and found.numel() > SHARED_ELEMENTS:
            self.shared.append(str(func))
        return found


def test_values_of_a_host_are_joined_without_the_team_of_torch() -> None:
    """However much is packed; and it comes back."""
    tree = {"numbers": list(range(100)), "array": torch.arange(100_000), "more": torch.ones(7, dtype=torch.bfloat16)}
    with Operations() as seen:
        packed = Packer("own").pack(tree)
    assert packed.numel() > SHARED_ELEMENTS
    assert not seen.shared
    found, _ = unpack(packed)
    assert found["numbers"] == tree["numbers"]
    assert all(torch.equal(found[name], tree[name]) for name in ("array", "more"))
