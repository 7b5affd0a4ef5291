"""No change of copied bytes keeps the sums of their rows and columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.snapshot.proof import Sums, matrix_of, sums_of, vector_bytes

SLOT_BYTES = 40_000


def vector_of(sums: list[Sums], slot: Any) -> Any:
    """What the device makes of the bytes of the instant."""
    vector = torch.zeros(vector_bytes(sums), dtype=torch.uint8)
    words = vector.view(torch.int64)
    for one in sums:
        source = torch.from_numpy(slot[one.start : one.start + one.nbytes].copy())
        for target, first in one.edges(vector):
            target.copy_(source[first : first + len(target)])
        if one.rows:
            matrix = matrix_of(one, _aligned(source, one.head))
            words[one.at : one.at + one.rows] = matrix.sum(1)
            words[one.at + one.rows : one.at + one.rows + one.columns] = matrix.sum(0)
    return vector.numpy()


def _aligned(source: torch.Tensor, head: int) -> torch.Tensor:
    """The same bytes in memory where those behind the head begin with a whole word, as in a buffer of the device."""
    room = torch.zeros(len(source) + 8, dtype=torch.uint8)
    found = room[-head % 8 :][: len(source)]
    found.copy_(source)
    return found


@st.composite
def transfers(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    found, start = [], draw(st.integers(0, 64))
    for nbytes in draw(st.lists(st.integers(1, 9000), min_size=1, max_size=4)):
        found.append((start, nbytes, draw(st.sampled_from([0, -start % 8]))))
        start += nbytes + draw(st.integers(0, 9))
    return found


@given(transfers(), st.data())
def test_one_changed_byte_is_found_where_it_is(places: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """The transfer is named by the place of the first difference, to the word."""
    slot = np.random.default_rng(1).integers(0, 256, SLOT_BYTES, np.uint8)
    sums = sums_of(places)
    vector = vector_of(sums, slot)
    assert [one.first_difference(slot, vector) for one in sums] == [None] * len(sums)
    at = data.draw(st.integers(0, len(places) - 1))
    byte = places[at][0] + data.draw(st.integers(0, places[at][1] - 1))
    slot[byte] ^= data.draw(st.integers(1, 255))
    found = [one.first_difference(slot, vector) for one in sums]
    assert [place is not None for place in found] == [index == at for index in range(len(sums))]
    assert abs(found[at] - byte) < 8


CHANGES = {
    "a row": lambda t: t.index_add_(0, torch.tensor([3]), torch.ones(1, 96)),
    "a word in the middle": lambda t: t.view(-1).index_fill_(0, torch.tensor([1536]), 7.0).view_as(t),
    "two rows swapped": lambda t: t.index_copy_(0, torch.tensor([1, 7]), t[[7, 1]].clone()),
    "two words swapped": lambda t: t.index_copy_(1, torch.tensor([4, 6]), t[:, [6, 4]].clone()),
    "a mask moved": lambda t: t.view(-1).index_copy_(0, torch.tensor([10, 700]), torch.tensor([0.0, 1.0])).view_as(t),
    "rows sorted": lambda t: t.copy_(t.sort(0).values),
    "a step of an optimizer": lambda t: t.sub_(torch.full_like(t, 1e-3)),
    "the lowest bits": lambda t: t.view(torch.int32).bitwise_xor_(1).view(torch.float32),
    "zero": lambda t: t.zero_(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_change_is_found(change: str, dtype: torch.dtype) -> None:
    """One row, one word, an exchange of equal sums: each changes the sum of some row or column."""
    tensor = torch.rand(32, 96, generator=torch.Generator().manual_seed(2))
    tensor.view(-1)[10], tensor.view(-1)[700] = 1.0, 0.0
    before, after = tensor.clone().to(dtype), CHANGES[change](tensor.clone()).to(dtype)
    slot = before.view(-1).view(torch.uint8).numpy()
    (sums,) = sums_of([(0, slot.nbytes, 0)])
    vector = vector_of([sums], slot)
    changed = after.view(-1).view(torch.uint8).numpy()
    differs = bool((slot != changed).any())
    assert (sums.first_difference(changed, vector) is not None) == differs
    assert differs or dtype is torch.bfloat16


@given(st.integers(1, 1 << 40))
def test_sums_take_little_memory(nbytes: int) -> None:
    """About four square roots of the words: 40 KB for 50 MB."""
    (sums,) = sums_of([(0, nbytes, 0)])
    assert sums.words <= 5 * (nbytes / 8) ** 0.5 + 4
