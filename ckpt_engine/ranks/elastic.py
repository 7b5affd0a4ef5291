"""Deals the rest of an epoch to another number of ranks, so that each remaining sample is seen exactly once."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.errors import ConfigError


def remaining(order: Sequence[int], size: int, taken: int) -> list[int]:
    """The samples of an epoch that no rank has seen, in the order of the epoch.

    Args:
        order: all samples of the epoch as they were dealt: rank r has every `size`-th one from the r-th on, as
            `DistributedSampler` deals them. Padding (samples that come again at its end) is not part of it.
        size: ranks that dealt them.
        taken: samples that each of them has seen.
    """
    return list(order[min(len(order), taken * size) :])


def deal(samples: Sequence[int], size: int, batch_size: int) -> list[list[list[int]]]:
    """The batches of each of `size` ranks: every sample once, and the same number of batches for every rank.

    All batches are of `batch_size` samples but those of the last step. Where its samples are fewer than the ranks they
    go into the step before, so that no rank has an empty batch while others train.

    Raises:
        ConfigError: fewer samples than ranks are left.
    """
    if samples and len(samples) < size:
        raise ConfigError(
            f"{len(samples)} samples are left of the epoch, fewer than the {size} ranks",
            hint="resume with fewer ranks, or at the next epoch",
        )
    step = size * batch_size
    groups = [list(samples[at : at + step]) for at in range(0, len(samples), step)]
    if len(groups) > 1 and len(groups[-1]) < size:
        last = groups.pop()
        groups[-1] += last
    return [[group[rank::size] for group in groups] for rank in range(size)]
