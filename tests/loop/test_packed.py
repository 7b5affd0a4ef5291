"""The part of a snapshot whose structure changes all the time: one array, any tree, nothing lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ckpt_engine.errors import CorruptError, UnstorableLeafError
from ckpt_engine.loop.capture import Packer, unpack


def tree(n: int = 3) -> dict[str, Any]:
    return {
        "none": None,
        "numbers": [1, -2.5, float("inf"), True],
        "bytes": bytes(range(200)),
        "tensors": [torch.arange(n), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 2), torch.tensor(True)],
        "array": np.arange(4, dtype=np.int16),
        "tuple": (1, "two"),
        7: "key",
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) and type(a) is type(b)


def test_a_tree_comes_back_as_it_was() -> None:
    """With every kind of leaf that adapters put there."""
    found, notes = unpack(Packer("own").pack(tree()))
    assert same(found, tree())
    assert notes == []


def test_the_shape_stays_while_the_structure_changes() -> None:
    """With a new shape the engine would plan every snapshot again."""
    packer = Packer("own")
    shapes = {packer.pack({"a": ["x" * n], "b": list(range(n))}).shape for n in (0, 10, 500, 3)}
    assert len(shapes) == 1


def test_a_large_tree_makes_room_once() -> None:
    """The size goes up in steps and never down."""
    packer = Packer("own")
    sizes = [packer.pack(torch.zeros(n)).numel() for n in (1, 100_000, 101_000, 1)]
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3]


def test_one_packer_packs_what_changes() -> None:
    """Values, shapes, types of elements, keys, and shapes of arrays that torch has no type for."""
    packer, wide = Packer("own"), np.arange(24, dtype=np.longdouble)
    steps: list[Any] = [tree(), tree(5), tree() | {7: "another"}, tree() | {"none": 3}, tree() | {"more": 1}]
    steps += [{"array": wide.reshape(2, 3, 4)}, {"array": wide.reshape(2, 4, 3)}]
    steps += [{"w": torch.ones(2)}, {"w": torch.ones(2, dtype=torch.float64)}, {"w": torch.nn.Parameter(torch.ones(2))}]
    for step in steps:
        assert same(unpack(packer.pack(step))[0], step)
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert not unpack(packer.pack({"w": frozen}))[0]["w"].requires_grad


def test_packing_copies() -> None:
    """What training changes afterwards does not reach the snapshot."""
    live = torch.zeros(3)
    packed = Packer("own").pack({"a": live})
    live.fill_(9)
    assert same(unpack(packed)[0], {"a": torch.zeros(3)})


def test_what_needs_pickle_is_named() -> None:
    """With the path in the whole state."""
    with pytest.raises(UnstorableLeafError, match="own/a/0"):
        Packer("own").pack({"a": [object()]})


def test_other_bytes_are_an_error() -> None:
    """The error is ours and not one from inside of JSON."""
    with pytest.raises(CorruptError):
        unpack(torch.full((64,), 255, dtype=torch.uint8))
