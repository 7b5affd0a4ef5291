"""How the samples of an epoch are ordered and dealt to the batches of the ranks, for any number of ranks.

Whatever shuffles (torch's samplers, Accelerate's) makes the order from one seed or one generator. Whatever divides it
among ranks gives each step of training the next samples of that order. So what all ranks together have seen is always
a beginning of the order, and one number says how much of it. Only samplers whose every index is known to follow from a
seed are read; of any other one the recipe says why it is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ckpt_engine.data import exactness, streams
from ckpt_engine.data.sampling import extend_digest
from ckpt_engine.errors import ConfigError

Recipe = dict[str, Any]
"""A tree that a snapshot stores: `{"unreadable": why}`, or what `dealing_of` reads."""

_SHARD = "accelerate.data_loader.BatchSamplerShard"
_SEEDABLE = "accelerate.data_loader.SeedableRandomSampler"


def recipe_of(loader: DataLoader[Any]) -> Recipe:
    """How this loader's samplers make an epoch; what changes from epoch to epoch is left to `dealing_of`."""
    if isinstance(loader.dataset, IterableDataset):
        return {"unreadable": f"its dataset, a {type(loader.dataset).__name__}, is iterable"}
    batches: Any = _real(loader.batch_sampler)
    shared: Recipe = {"rank": 0, "size": 1, "interleaved": True, "tail": str(Tail.PADDED)}
    if exactness.type_name(batches) == _SHARD:
        shared = {
            "rank": batches.process_index,
            "size": batches.num_processes,
            "interleaved": False,
            "tail": str(Tail.PADDED if batches.even_batches else Tail.UNEVEN),
        }
        divided_by = batches.num_processes if batches.split_batches else 1
        batches = batches.batch_sampler
    else:
        divided_by = 1
    if batches is None:
        sampler, batch_size, drop_last = _real(loader.sampler), 1, False
    elif type(batches) is BatchSampler:
        sampler, batch_size, drop_last = batches.sampler, batches.batch_size // divided_by, batches.drop_last
    else:
        return {"unreadable": f"a {type(batches).__name__} makes its batches"}
    found = _order(loader, sampler)
    if isinstance(found, str):
        return {"unreadable": found}
    if "size" in found and shared["size"] > 1:
        return {"unreadable": "two samplers divide it among the ranks"}
    return {**shared, "batched": batches is not None, "batch_size": batch_size, "drop_last": drop_last, **found}


def dealing_of(recipe: Mapping[str, Any], at_first: Mapping[str, Any]) -> Dealing:
    """How one epoch is dealt.

    Args:
        recipe: of its loader, readable.
        at_first: `streams.capture` right before the first index of the epoch was drawn.
    """
    keys = ("rank", "size", "batch_size", "batched", "interleaved", "drop_last")
    return Dealing(_origin(recipe, at_first), tail=Tail(recipe["tail"]), **{key: recipe[key] for key in keys})


def _order(loader: DataLoader[Any], sampler: Any) -> Recipe | str:
    """What orders the samples; or why that is not known."""
    shuffles = type(sampler) is RandomSampler or exactness.type_name(sampler) == _SEEDABLE
    if not shuffles and type(sampler) not in (SequentialSampler, DistributedSampler):
        return f"a {type(sampler).__name__} orders its samples"
    length = exactness.length_of(sampler.dataset if type(sampler) is DistributedSampler else sampler.data_source)
    path = next((path for path, holder in streams.holders(loader) if holder is sampler), None)
    if length is None or path is None:
        return "its dataset does not know its length"
    common = {"path": path, "length": length, "samples": length, "replacement": False}
    if type(sampler) is SequentialSampler:
        return {**common, "order": "sequential"}
    if type(sampler) is DistributedSampler:
        return {
            **common,
            "order": "distributed" if sampler.shuffle else "sequential",
            "rank": sampler.rank,
            "size": sampler.num_replicas,
            "tail": str(Tail.TRIMMED if sampler.drop_last else Tail.PADDED),
        }
    return {
        **common,
        "order": "random" if type(sampler) is RandomSampler else "seedable",
        "generator": streams.path_of(loader, sampler.generator),
        "samples": sampler.num_samples,
        "replacement": sampler.replacement,
    }


def _origin(recipe: Mapping[str, Any], at_first: Mapping[str, Any]) -> OrderOrigin:
    common = {key: recipe[key] for key in ("length", "samples", "replacement")}
    path, counters = recipe["path"], at_first["counters"]
    match recipe["order"]:
        case "sequential":
            return OrderOrigin(**common)
        case "distributed":
            return OrderOrigin(**common, seed=counters[f"{path}.seed"] + counters[f"{path}.epoch"])
        case "seedable":
            return OrderOrigin(**common, seed=counters[f"{path}.initial_seed"] + counters[f"{path}.epoch"])
    if recipe["generator"] is not None:
        return OrderOrigin(**common, generator=at_first["generators"][recipe["generator"]]["state"])
    # `RandomSampler` draws the seed of its shuffle from the global stream.
    stream = torch.Generator()
    stream.set_state(torch.frombuffer(bytearray(at_first["rng"]["torch"]), dtype=torch.uint8))
    return OrderOrigin(**common, seed=int(torch.empty((), dtype=torch.int64).random_(generator=stream).item()))


def _real(sampler: Any) -> Any:
    return sampler.inner if isinstance(sampler, streams.StandIn) else sampler


class Tail(StrEnum):
    """What becomes of samples at the end that are too few for all ranks. Stored in snapshots: values never change."""

    UNEVEN = "uneven"
    """Some ranks have one sample less in their last batch."""
    PADDED = "padded"
    """The first samples come again, so that the last batches are of one size (`DistributedSampler`)."""
    TRIMMED = "trimmed"
    """They are left out (`DistributedSampler(drop_last=True)`)."""


def deal_to(
    rank: int, samples: Sequence[int], size: int, batch_size: int, tail: Tail = Tail.UNEVEN, *, drop_last: bool = False
) -> list[list[int]]:
    """The batches of `rank`: of all ranks together every sample once, and as many batches for each.

    All batches are of `batch_size` samples but those of the last step. With `Tail.UNEVEN`, where the samples of that
    step are fewer than the ranks, they go into the step before, so that no rank has an empty batch while others train.

    Args:
        tail: what becomes of samples that do not make a whole row of ranks.
        drop_last: leave out a last step of smaller batches, unless there is no other.

    Raises:
        ConfigError: fewer samples than ranks are left, and they are not padded.
    """
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
    return [group[rank::size] for group in steps]


def given(count: int, size: int, batch_size: int, tail: Tail = Tail.UNEVEN, *, drop_last: bool = False) -> int:
    """Samples that `deal_to` gives to all ranks of `count`: more where some come again, fewer where some do not."""
    if tail is Tail.TRIMMED:
        count = count // size * size or count
    step = size * batch_size
    if drop_last and count > step:
        return count // step * step
    return count + (-count % size if tail is Tail.PADDED else 0)


@dataclass(frozen=True, slots=True)
class OrderOrigin:
    """What the order of an epoch is made from.

    Args:
        length: samples of the dataset.
        samples: of the epoch; another number if the sampler was given it.
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
        tail, drop_last: see `deal_to`.
    """

    origin: OrderOrigin
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
        return cls(**{**state, "origin": OrderOrigin(**state["origin"]), "tail": Tail(state["tail"])})

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
        batches = deal_to(self.rank, left, self.size, self.batch_size, self.tail, drop_last=self.drop_last)
        return batches if self.batched else [sample for batch in batches for sample in batch]

    def _blocks(self, order: Sequence[int], batch: int) -> Iterator[Sequence[int]]:
        step = self.size * self.batch_size
        for number in range(batch - self.first):
            at = self.seen + number * step
            if self.interleaved:
                yield order[at + self.rank : at + step : self.size]
            else:
                yield order[at + self.rank * self.batch_size : at + (self.rank + 1) * self.batch_size]


class DealtEpoch(NamedTuple):
    """An epoch that another number of ranks has begun.

    Args:
        dealing: of its rest.
        total: batches of the whole epoch for this rank: those before it was dealt and those dealt.
    """

    dealing: Dealing
    total: int

    @classmethod
    def of_order(cls, order: Mapping[str, Any]) -> Self | None:
        """From what a state says of the order; None: the ranks that have begun it are as many as now."""
        found = order.get("dealt")
        return None if found is None else cls(Dealing.of_state(found["dealing"]), int(found["total"]))

    def to_state(self) -> dict[str, Any]:
        """A tree that a snapshot stores."""
        return {"dealing": self.dealing.to_state(), "total": self.total}
