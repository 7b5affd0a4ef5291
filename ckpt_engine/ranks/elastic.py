"""Deals the rest of an epoch to another number of ranks, so that each remaining sample is seen exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from ckpt_engine.errors import ConfigError


class Tail(StrEnum):
    """What becomes of samples at the end that are too few for all ranks. Stored in snapshots: values never change."""

    UNEVEN = "uneven"
    """Some ranks have one sample less in their last batch."""
    PADDED = "padded"
    """The first samples come again, so that the last batches are of one size (`DistributedSampler`)."""
    TRIMMED = "trimmed"
    """They are left out (`DistributedSampler(drop_last=True)`)."""


def remaining(order: Sequence[int], size: int, taken: int) -> list[int]:
    """The samples of an epoch that no rank has seen, in the order of the epoch.

    Args:
        order: all samples of the epoch as they were dealt: rank r has every `size`-th one from the r-th on, as
            `DistributedSampler` deals them. Padding (samples that come again at its end) is not part of it.
        size: ranks that dealt them.
        taken: samples that each of them has seen.
    """
    return list(order[min(len(order), taken * size) :])


def deal(
    samples: Sequence[int], size: int, batch_size: int, tail: Tail = Tail.UNEVEN, *, drop_last: bool = False
) -> list[list[list[int]]]:
    """The batches of each of `size` ranks: every sample once, and the same number of batches for every rank.

    All batches are of `batch_size` samples but those of the last step. With `Tail.UNEVEN`, where the samples of that
    step are fewer than the ranks, they go into the step before, so that no rank has an empty batch while others train.

    Args:
        tail: what becomes of samples that do not make a whole row of ranks.
        drop_last: leave out a last step of smaller batches, unless there is no other.

    Raises:
        ConfigError: fewer samples than ranks are left, and they are not padded.
    """
    return [[group[rank::size] for group in _steps(samples, size, batch_size, tail, drop_last)] for rank in range(size)]


def deal_to(
    rank: int, samples: Sequence[int], size: int, batch_size: int, tail: Tail = Tail.UNEVEN, *, drop_last: bool = False
) -> list[list[int]]:
    """The batches that `deal` has for `rank`."""
    return [group[rank::size] for group in _steps(samples, size, batch_size, tail, drop_last)]


def given(count: int, size: int, batch_size: int, tail: Tail = Tail.UNEVEN, *, drop_last: bool = False) -> int:
    """Samples that `deal` gives to all ranks of `count`: more where some come again, fewer where some do not come."""
    if tail is Tail.TRIMMED:
        count = count // size * size or count
    step = size * batch_size
    if drop_last and count > step:
        return count // step * step
    return count + (-count % size if tail is Tail.PADDED else 0)


def _steps(samples: Sequence[int], size: int, batch_size: int, tail: Tail, drop_last: bool) -> list[list[int]]:
    """The samples of each step, those of all ranks."""
    if tail is Tail.TRIMMED:
        samples = samples[: len(samples) // size * size] or samples
    if samples and len(samples) < size and tail is not Tail.PADDED:
        raise ConfigError(
            f"{len(samples)} samples are left of the epoch, fewer than the {size} ranks",
            hint="resume with fewer ranks, or at the next epoch",
        )
    step = size * batch_size
    steps = [list(samples[at : at + step]) for at in range(0, len(samples), step)]
    if drop_last and len(steps) > 1 and len(steps[-1]) < step:
        steps.pop()
    if tail is Tail.PADDED and steps:
        missing = -len(steps[-1]) % size
        again = list(samples[:missing])
        steps[-1] += (again * -(-missing // max(1, len(again))))[:missing]
    elif len(steps) > 1 and len(steps[-1]) < size:
        last = steps.pop()
        steps[-1] += last
    return steps
