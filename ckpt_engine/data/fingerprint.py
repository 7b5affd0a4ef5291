"""What a loader's position depends on, and what a difference between two loaders means for a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine.data import identity, streams
from ckpt_engine.data.exactness import Difference, Effect

__all__ = ["Fingerprint", "compare", "fingerprint", "known_length", "length_of"]

Fingerprint = dict[str, Any]

_EFFECTS: Mapping[str, Effect] = {
    "dataset_kind": Effect.REFUSED,
    "dataset_length": Effect.REFUSED,
    "batch_size": Effect.REFUSED,
    "batches": Effect.REFUSED,
    "samplers": Effect.REFUSED,
    "num_replicas": Effect.REFUSED,
    "rank": Effect.REFUSED,
    "drop_last": Effect.REFUSED,
    "num_workers": Effect.AUGMENTATION,
    "persistent_workers": Effect.AUGMENTATION,
    "in_order": Effect.AUGMENTATION,
    "dataset_type": Effect.AUGMENTATION,
    "loader_type": Effect.HARMLESS,
    "prefetch_factor": Effect.HARMLESS,
    "start_method": Effect.HARMLESS,
    "pin_memory": Effect.HARMLESS,
}


def fingerprint(loader: DataLoader[Any], samples: identity.Samples) -> Fingerprint:
    """The fields a resume compares. Never calls `len(loader)` on an iterable dataset: torch would warn.

    Args:
        samples: of the dataset before training, which may change attributes of it.
    """
    iterable = isinstance(loader.dataset, IterableDataset)
    counters = streams.counters(loader)
    context = loader.multiprocessing_context
    return {
        "dataset_kind": "iterable" if iterable else "map",
        "dataset_type": _type_name(loader.dataset),
        "dataset_length": None if iterable else length_of(loader.dataset),
        "batch_size": _named(counters, "batch_size") if loader.batch_size is None else loader.batch_size,
        "batches": known_length(loader),
        "samplers": [] if iterable else streams.sampler_types(loader),
        "num_replicas": _named(counters, "num_replicas"),
        "rank": _named(counters, "rank"),
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
        "persistent_workers": loader.persistent_workers,
        "in_order": getattr(loader, "in_order", True),
        "loader_type": _type_name(loader),
        "prefetch_factor": loader.prefetch_factor,
        "start_method": None if context is None else context.get_start_method(),
        "pin_memory": loader.pin_memory,
        "samples": samples,
    }


def known_length(loader: DataLoader[Any]) -> int | None:
    """Batches in one epoch where a sampler says so, else None."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    return length_of(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)


def compare(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Every field that differs, gravest first. Fields that only one side knows are ignored (older or newer version)."""
    effects = dict(_EFFECTS)
    if saved.get("dataset_kind") == "iterable":
        effects["num_workers"] = Effect.REFUSED  # workers share such a dataset out among themselves
    found = [
        Difference(name, saved[name], current[name], effect)
        for name, effect in effects.items()
        if name in saved
        and name in current
        and saved[name] != current[name]
        # Of loaders with a batch sampler of the user's, earlier versions did not know it.
        and not (name == "batch_size" and saved[name] is None)
    ]
    others = identity.differing(saved.get("samples", {}), current.get("samples", {}))
    found += [Difference(path, None, None, Effect.OTHER_SAMPLES) for path in others]
    order = list(Effect)
    return tuple(sorted(found, key=lambda d: -order.index(d.effect)))


def _named(counters: Mapping[str, Any], name: str) -> Any:
    return next((value for path, value in counters.items() if path.rpartition(".")[2] == name), None)


def length_of(sized: Any) -> int | None:
    """How many it has, where it knows that."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _type_name(value: object) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
