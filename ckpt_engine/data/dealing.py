"""How the samples of one epoch are ordered and go to the batches of one rank: values that any number of ranks can read.

Whatever shuffles (torch's samplers, Accelerate's) makes the order from one seed or one generator. Whatever divides it
among ranks gives each step of training the next samples of that order. So what all ranks together have seen is always a
beginning of the order, and one number says how much of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils.data import RandomSampler

from ckpt_engine.data.sampling import extend_digest
from ckpt_engine.ranks import elastic
from ckpt_engine.ranks.elastic import Tail

__all__ = ["Dealing", "Origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """What the order of an epoch is made from.

    Args:
        length: samples of the dataset.
        samples: of the epoch; another number if the sampler was told so.
        replacement: a sample may come several times by chance.
        seed: of the shuffle.
        generator: or the state of a torch generator that shuffles; with neither the order is that of the dataset.
    """

    length: int
    samples: int
    replacement: bool = False
    seed: int | None = None
    generator: bytes | None = None

    def order(self) -> list[int]:
        """The samples of the epoch, each as often as it comes."""
        if self.seed is None and self.generator is None:
            return list(range(self.samples))
        generator = torch.Generator()
        if self.generator is not None:
            generator.set_state(torch.frombuffer(bytearray(self.generator), dtype=torch.uint8))
        else:
            assert self.seed is not None
            generator.manual_seed(self.seed)
        return list(RandomSampler(range(self.length), self.replacement, self.samples, generator))


@dataclass(frozen=True, slots=True)
class Dealing:
    """Who of the ranks gets what of an epoch, from some sample of its order on.

    Args:
        origin: of the order.
        rank, size: which of how many ranks.
        batch_size: of one rank.
        seen: samples of the order that were seen before.
        first: number of the batch that comes then: each rank has had so many before.
        batched: the sampler gives lists; False: single samples.
        interleaved: of each step rank r gets every `size`-th sample; False: the r-th batch.
        tail, drop_last: see `elastic.deal`.
    """

    origin: Origin
    rank: int
    size: int
    batch_size: int
    seen: int = 0
    first: int = 0
    batched: bool = True
    interleaved: bool = True
    tail: Tail = Tail.UNEVEN
    drop_last: bool = False

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `to_state`."""
        return cls(**{**state, "origin": Origin(**state["origin"]), "tail": Tail(state["tail"])})

    def to_state(self) -> dict[str, Any]:
        """A tree that a snapshot stores."""
        return {**dataclasses.asdict(self), "tail": str(self.tail)}

    def seen_before(self, batch: int) -> int:
        """Samples of the order that all ranks together have seen when each has had `batch` batches."""
        return min(self.origin.samples, self.seen + (batch - self.first) * self.size * self.batch_size)

    def digest(self, order: Sequence[int], batch: int) -> int | None:
        """The checksum of what the sampler of this rank gives from `first` on, up to `batch`; steps before the last."""
        digest: int | None = 0
        for block in self._blocks(order, batch):
            digest = extend_digest(digest, block if self.batched else block[0])
        return digest

    def rest(self, order: Sequence[int]) -> list[Any]:
        """What the sampler of this rank gives from `first` on, for a dealing that is `interleaved`."""
        left = order[self.seen :]
        batches = elastic.deal_to(self.rank, left, self.size, self.batch_size, self.tail, drop_last=self.drop_last)
        return batches if self.batched else [sample for batch in batches for sample in batch]

    def _blocks(self, order: Sequence[int], batch: int) -> Iterator[Sequence[int]]:
        step = self.size * self.batch_size
        for number in range(batch - self.first):
            at = self.seen + number * step
            if self.interleaved:
                yield order[at + self.rank : at + step : self.size]
            else:
                yield order[at + self.rank * self.batch_size : at + (self.rank + 1) * self.batch_size]
