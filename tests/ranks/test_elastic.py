"""The rest of an epoch is dealt to another number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from ckpt_engine.data.sample_assignment import Tail, deal_to
from ckpt_engine.data.sample_assignment import given as dealt
from ckpt_engine.errors import ConfigError


def deal(
    samples: list[int], size: int, batch_size: int, tail: Tail = Tail.UNEVEN, *, drop_last: bool = False
) -> list[list[list[int]]]:
    """The batches of each rank."""
    return [deal_to(rank, samples, size, batch_size, tail, drop_last=drop_last) for rank in range(size)]


@given(
    st.integers(0, 300), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), st.data()
)
def test_every_sample_is_seen_exactly_once(
    count: int, size: int, batch_size: int, new_size: int, data: st.DataObject
) -> None:
    """However many ranks there were and are: seen before and seen after make the epoch, without a sample twice."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
    taken = data.draw(st.integers(0, -(-count // size)))
    before = order[: taken * size]
    left = order[taken * size :]
    if 0 < len(left) < new_size:
        with pytest.raises(ConfigError, match="fewer than"):
            deal(left, new_size, batch_size)
        return
    dealt = deal(left, new_size, batch_size)
    after = [sample for batches in dealt for batch in batches for sample in batch]
    assert sorted(before + after) == list(range(count))
    assert len({len(batches) for batches in dealt}) == 1
    assert all(batch for batches in dealt for batch in batches)


def test_it_is_the_order_of_torchs_sampler() -> None:
    """What four ranks of `DistributedSampler` have not given after three samples each, two ranks get."""
    data = list(range(40))
    samplers = [DistributedSampler(data, 4, rank, shuffle=True, seed=5) for rank in range(4)]
    given = [list(sampler) for sampler in samplers]
    order = [given[at % 4][at // 4] for at in range(40)]
    left = order[3 * 4 :]
    assert sorted(left) == sorted(sample for one in given for sample in one[3:])
    first, second = deal(left, 2, 4)
    assert first[0] == left[0:8:2]
    assert second[0] == left[1:8:2]


@given(st.integers(1, 100), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 9), st.sampled_from(Tail), st.booleans())
def test_the_tail_is_as_the_loader_wants_it(
    count: int, size: int, batch_size: int, tail: Tail, drop_last: bool
) -> None:
    """Padded and trimmed rows give all ranks batches of one size; without small batches at the end only where asked."""
    samples = list(range(count))
    if count < size and tail is not Tail.PADDED:
        with pytest.raises(ConfigError, match="fewer than"):
            deal(samples, size, batch_size, tail, drop_last=drop_last)
        return
    found = deal(samples, size, batch_size, tail, drop_last=drop_last)
    everything = [sample for batches in found for batch in batches for sample in batch]
    assert len(everything) == dealt(count, size, batch_size, tail, drop_last=drop_last)
    if tail is Tail.PADDED and not drop_last:
        assert set(everything) == set(samples)
        assert len(everything) - count < size
    else:
        assert len(everything) == len(set(everything)) or tail is Tail.PADDED
    if tail is not Tail.UNEVEN:
        assert all(len({len(batch) for batch in step}) == 1 for step in zip(*found, strict=True))
    if drop_last and count >= size * batch_size:
        assert {len(batch) for batches in found for batch in batches} == {batch_size}
    assert all(batch for batches in found for batch in batches)
