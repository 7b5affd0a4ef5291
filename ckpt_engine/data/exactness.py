"""How exactly a loader's position is recorded or put back, and what a difference between two loaders means for that.

The comparison loads nothing: it asks for no sample, and of what lies in memory it reads some values only. It compares
floating-point samples with a tolerance, as another machine may have computed them with other last bits.
"""

from __future__ import annotations

import itertools
import math
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

from ckpt_engine.data import native, streams
from ckpt_engine.data.private_names import is_of_datasets
from ckpt_engine.data.walk import walk

Samples = dict[str, Any]
"""By path: `{"length": …, "checksum": …}`, of floats `{"length": …, "floats": bytes}`.

Of float64; earlier versions have written a list."""

_NODES = 16
_PICKED = 256
_ROWS, _ROW = 64, 8
_BYTES = 1 << 20
_RELATIVE, _ABSOLUTE = 1e-3, 1e-6
_PLAIN = (str, int, float, bool, bytes, PurePath, np.generic, type(None))
_LISTS = (list, tuple, range, array, deque)


def samples_of(dataset: Any) -> Samples:
    """Which samples a dataset has, as far as its attributes tell.

    Read are the indices of a `Subset`, and attributes with one entry per sample (file names, labels, tensors), here and
    in the datasets inside. Of iterable ones: the streams that shuffle them.
    """
    if isinstance(dataset, IterableDataset):
        return native.orders(dataset)
    columns = (row for path, node in walk(("dataset", dataset), _inner, _NODES) for row in _columns(path, node))
    described = ((name, _described(value)) for name, value in columns)
    return {name: one for name, one in described if one is not None}


def differing(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The paths that both know and that show other values; not those whose length changed."""
    return [
        path
        for path, then in saved.items()
        if (now := current.get(path)) is not None and then["length"] == now["length"] and not _alike(then, now)
    ]


def checksum(value: Any) -> int | None:
    """Of the values in a tensor, an array, a container or a count; None for anything else. Of large ones a part."""
    if isinstance(value, itertools.count):
        return zlib.crc32(repr(value).encode())
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            return None
        flat = value.detach().reshape(-1)
        step = max(1, flat.numel() * flat.element_size() // _BYTES)
        return zlib.crc32(flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return checksum(value.reshape(-1)[:: max(1, value.size // _PICKED)].tolist())
        flat_array = value.reshape(-1)
        return zlib.crc32(np.ascontiguousarray(flat_array[:: max(1, value.nbytes // _BYTES)]).tobytes())
    if isinstance(value, Mapping):
        value = [list(value.keys()), list(value.values())]
    elif isinstance(value, set | frozenset):
        value = sorted(map(repr, value))
    if not isinstance(value, _LISTS):
        return None
    numbers = value if len(value) <= _BYTES // 8 else [value[i] for i in _spread(len(value), _BYTES // 8)]
    try:
        kind = "d" if any(isinstance(one, float) for one in numbers) else "q"
        return zlib.crc32(array(kind, numbers))
    except (TypeError, OverflowError):
        text = "\n".join(_text(value[i]) for i in _spread(len(value), _PICKED))
        return zlib.crc32(f"{len(value)}\n{text}".encode())


def _columns(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """What has one entry per sample of `node`."""
    if isinstance(node, (*_LISTS, np.ndarray, torch.Tensor)):
        yield path, node
        return
    length = length_of(node)
    if length is None:
        return
    if (rows := _arrow_rows(node, length)) is not None:
        yield path, rows
        return
    for name, value in list(getattr(node, "__dict__", {}).items()):
        is_column = isinstance(value, (*_LISTS, np.ndarray, torch.Tensor)) or hasattr(value, "iloc")
        if is_column and length_of(value) == length:
            yield f"{path}.{name}", value
        elif isinstance(value, list | tuple) and len(value) <= _NODES:
            for index, one in enumerate(value):
                if isinstance(one, np.ndarray | torch.Tensor) and length_of(one) == length:
                    yield f"{path}.{name}[{index}]", one


def _inner(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Datasets inside of a dataset."""
    if isinstance(node, Subset):
        yield f"{path}.dataset", node.dataset
    elif isinstance(node, ConcatDataset):
        yield from ((f"{path}.datasets[{index}]", one) for index, one in enumerate(node.datasets))
    elif not isinstance(node, (*_LISTS, np.ndarray, torch.Tensor)):
        for name, value in list(getattr(node, "__dict__", {}).items()):
            if isinstance(value, torch.utils.data.Dataset) or _arrow_rows(value, length_of(value)) is not None:
                yield f"{path}.{name}", value


def _described(value: Any) -> dict[str, Any] | None:
    length = length_of(value)
    if length is None:
        return None
    if hasattr(value, "iloc"):  # pandas
        value = [str(value.iloc[i].tolist())[:1000] for i in _spread(length, _ROWS)]
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            return None
        rows = value.detach()[torch.tensor(_spread(length, _ROWS), dtype=torch.int64, device=value.device)]
        rows = rows.reshape(len(rows), math.prod(value.shape[1:]))[:, :_ROW].cpu()
        value = rows.to(torch.float64).numpy() if rows.is_floating_point() else rows.numpy()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        value = np.stack([value[i].reshape(-1)[:_ROW] for i in _spread(length, _ROWS)]) if length else value
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
        return {"length": length, "floats": value.astype("<f8").tobytes()}
    if isinstance(value, range):
        value = [value.start, value.stop, value.step]
    elif not isinstance(value, np.ndarray):
        value = [_text(value[i]) for i in _spread(length, _PICKED)] if len(value) == length else value
    return {"length": length, "checksum": checksum(value)}


def _arrow_rows(node: Any, length: int | None) -> list[str] | None:
    """Some rows of a dataset of the package `datasets`, as they are stored: nothing is decoded."""
    if not is_of_datasets(node) or not hasattr(node, "with_format") or length is None:
        return None
    stored = node.with_format("arrow")
    return [str(stored[i].to_pydict())[:1000] for i in _spread(length, _ROW)]


def _alike(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if "floats" not in then or "floats" not in now:
        return bool(then.get("checksum") == now.get("checksum"))
    one, other = (np.frombuffer(x, "<f8") if isinstance(x, bytes) else x for x in (then["floats"], now["floats"]))
    return len(one) == len(other) and np.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True)


def _text(value: Any) -> str:
    """A value as text that does not change from process to process: what has no such text is named by its type."""
    if isinstance(value, float | np.floating):
        return format(float(value), ".4g")
    if isinstance(value, _PLAIN):
        return str(value)[:1000]
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{tuple(value.shape)}{value.dtype}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(_text(one) for one in value[:_ROW]) + ")"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_text(value[name])}" for name in list(value)[:_ROW]) + "}"
    return type(value).__qualname__


def _spread(length: int, most: int) -> list[int]:
    """Indices that are spread evenly, the first and the last among them."""
    if length <= most:
        return list(range(length))
    return [number * (length - 1) // (most - 1) for number in range(most)]


class Level(StrEnum):
    """How much of the uninterrupted run's data stream a resumed run repeats."""

    EXACT = "exact"
    """The same samples in the same order with the same augmentation, bit for bit."""
    ORDER_ONLY = "order only"
    """The same samples in the same order; what was drawn at random per sample may differ."""
    NOT_RESTORED = "not restored"
    """Not even the order of samples is promised."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """A level and why it is not higher; `reasons` is empty if and only if the level is exact."""

    level: Level = Level.EXACT
    reasons: tuple[str, ...] = ()

    def lowered(self, level: Level, reason: str) -> Exactness:
        """This with one more reason; the level never rises."""
        return Exactness(max(self.level, level, key=list(Level).index), (*self.reasons, reason))

    def also(self, other: Exactness) -> Exactness:
        """The lower level of the two with the reasons of both, none twice."""
        reasons = self.reasons + tuple(r for r in other.reasons if r not in self.reasons)
        return Exactness(max(self.level, other.level, key=list(Level).index), reasons)


class Effect(StrEnum):
    """What a difference between the saved and the current loader does to a resume."""

    HARMLESS = "harmless"
    AUGMENTATION = "order exact, augmentation not"
    REFUSED = "refused"
    OTHER_SAMPLES = "other samples"


class OnChange(StrEnum):
    """What becomes of an epoch that is resumed in its middle with a changed loader: the option `data`."""

    REFUSE = "refuse"
    RESTART_EPOCH = "restart_epoch"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of the fingerprint that changed since the snapshot; values are shown, never compared again."""

    field: str
    saved: object
    current: object
    effect: Effect

    def __str__(self) -> str:
        return f"{self.change} ({self.effect})"

    @property
    def change(self) -> str:
        """What was, and what is."""
        if self.effect is Effect.OTHER_SAMPLES:
            return f"{self.field} has other values"
        if self.field == "dataset_length" and isinstance(self.saved, int) and isinstance(self.current, int):
            return f"{self.saved:,} samples then, {self.current:,} now"
        return f"{self.field} was {self.saved!r}, now {self.current!r}"


@dataclass(frozen=True, slots=True)
class Restoration:
    """What loading a state achieved, for the resume report.

    `exactness` is final once the first batch was fetched: the replayed sample order is verified on the way there.
    """

    exactness: Exactness
    differences: tuple[Difference, ...]
    mode: str
    phase: str
    batches: int
    """Batches of the epoch that were trained before the snapshot and are not delivered again."""
    restarted: bool = False
    """The epoch starts again at its first batch, because the loader has changed."""
    again: str = ""
    """Where the data set's own state is of no use: a sentence that says what is done instead, and why."""


def fingerprint(loader: DataLoader[Any], samples: Samples) -> dict[str, Any]:
    """The fields a resume compares. Never calls `len(loader)` on an iterable dataset: torch would warn.

    Args:
        samples: of the dataset before training, which may change attributes of it.
    """
    iterable = isinstance(loader.dataset, IterableDataset)
    counters = streams.counters(loader)
    context = loader.multiprocessing_context
    return {
        "dataset_kind": "iterable" if iterable else "map",
        "dataset_type": type_name(loader.dataset),
        "dataset_length": None if iterable else length_of(loader.dataset),
        "batch_size": _named(counters, "batch_size") if loader.batch_size is None else loader.batch_size,
        "batches": known_length(loader),
        "samplers": [] if iterable else [type_name(one) for _, one in streams.holders(loader) if one is not loader],
        "num_replicas": _named(counters, "num_replicas"),
        "rank": _named(counters, "rank"),
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
        "persistent_workers": loader.persistent_workers,
        "in_order": getattr(loader, "in_order", True),
        "loader_type": type_name(loader),
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
    others = differing(saved.get("samples", {}), current.get("samples", {}))
    found += [Difference(path, None, None, Effect.OTHER_SAMPLES) for path in others]
    return tuple(sorted(found, key=lambda d: list(Effect).index(d.effect), reverse=True))


def _named(counters: Mapping[str, Any], name: str) -> Any:
    return next((value for path, value in counters.items() if path.rpartition(".")[2] == name), None)


def length_of(sized: Any) -> int | None:
    """How many it has, where it knows that."""
    if isinstance(sized, torch.Tensor) and sized.dim() == 0:
        return None
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError, RuntimeError):
        return None


def type_name(value: object) -> str:
    """The class of a value, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


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
