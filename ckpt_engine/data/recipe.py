"""Reads off a loader's samplers how they order an epoch and divide it among ranks.

Only samplers whose every index is known to follow from a seed are read; of any other one the recipe says why it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ckpt_engine.data import fingerprint, streams
from ckpt_engine.data.dealing import Dealing, Origin
from ckpt_engine.ranks.elastic import Tail

__all__ = ["Recipe", "dealing_of", "recipe_of"]

Recipe = dict[str, Any]
"""A tree that a snapshot stores: `{"unreadable": why}`, or what `dealing_of` reads."""

_SHARD = "accelerate.data_loader.BatchSamplerShard"
_SEEDABLE = "accelerate.data_loader.SeedableRandomSampler"


def recipe_of(loader: DataLoader[Any]) -> Recipe:
    """How this loader's samplers make an epoch; what changes from epoch to epoch is left to `dealing_of`."""
    if isinstance(loader.dataset, IterableDataset):
        return _unreadable(f"its dataset, a {type(loader.dataset).__name__}, is iterable")
    batches: Any = _real(loader.batch_sampler)
    shared: Recipe = {"rank": 0, "size": 1, "interleaved": True, "tail": str(Tail.PADDED)}
    if _name(batches) == _SHARD:
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
        return _unreadable(f"a {type(batches).__name__} makes its batches")
    found = _order(loader, sampler)
    if isinstance(found, str):
        return _unreadable(found)
    if "size" in found and shared["size"] > 1:
        return _unreadable("two samplers divide it among the ranks")
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
    shuffles = type(sampler) is RandomSampler or _name(sampler) == _SEEDABLE
    if not shuffles and type(sampler) not in (SequentialSampler, DistributedSampler):
        return f"a {type(sampler).__name__} orders its samples"
    length = fingerprint.length_of(sampler.dataset if type(sampler) is DistributedSampler else sampler.data_source)
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


def _origin(recipe: Mapping[str, Any], at_first: Mapping[str, Any]) -> Origin:
    common = {key: recipe[key] for key in ("length", "samples", "replacement")}
    path, counters = recipe["path"], at_first["counters"]
    match recipe["order"]:
        case "sequential":
            return Origin(**common)
        case "distributed":
            return Origin(**common, seed=counters[f"{path}.seed"] + counters[f"{path}.epoch"])
        case "seedable":
            return Origin(**common, seed=counters[f"{path}.initial_seed"] + counters[f"{path}.epoch"])
    if recipe["generator"] is not None:
        return Origin(**common, generator=at_first["generators"][recipe["generator"]]["state"])
    # `RandomSampler` draws the seed of its shuffle from the global stream.
    stream = torch.Generator()
    stream.set_state(torch.frombuffer(bytearray(at_first["rng"]["torch"]), dtype=torch.uint8))
    return Origin(**common, seed=int(torch.empty((), dtype=torch.int64).random_(generator=stream).item()))


def _real(sampler: Any) -> Any:
    return sampler.inner if isinstance(sampler, streams.StandIn) else sampler


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _unreadable(why: str) -> Recipe:
    return {"unreadable": why}
