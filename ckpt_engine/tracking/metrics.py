"""The states of torchmetrics objects in a module, which a `state_dict` leaves out unless they are made persistent.

Besides what a metric declares with `add_state`, wrappers keep tensors and private numbers of their own: the place in a
window, a minimum, the groups of a collection. A `MetricTracker` gets a metric more at each `increment()`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpt_engine.audit.attributes import is_metric
from ckpt_engine.observe.resume_report import NotRestored
from ckpt_engine.snapshot.flatten import Flattener, problems
from ckpt_engine.tracking.weights import own_copy

_LIBRARY = "torchmetrics"
PRIVATE_NAMES = _COUNT, _CACHE, _COMPUTED = "_update_count", "_forward_cache", "_computed"
"""Of the library; a test fails where it does not have them."""
States = dict[str, Any]


def found_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The metrics in a module by path, those inside of others too."""
    return ((path, one) for path, one in module.named_modules() if is_metric(one))


def topmost(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The metrics that are not inside of another one: others come and go."""
    found: list[tuple[str, nn.Module]] = []
    for path, one in found_in(module):
        if not any(path == top or path.startswith(f"{top}." if top else "") for top, _ in found):
            found.append((path, one))
    return found


def those_with(objects: Mapping[str, Any]) -> list[tuple[str, nn.Module]]:
    """The modules among the components that have a metric."""
    found = ((name, one) for name, one in objects.items() if isinstance(one, nn.Module))
    return [(name, one) for name, one in found if any(True for _ in found_in(one))]


def dump_all(objects: Mapping[str, Any]) -> dict[str, States]:
    """See `dump`, by component."""
    return {name: dump(module) for name, module in those_with(objects)}


def dump(module: nn.Module) -> States:
    """All metrics in a module and their states, live, by the path to them; "" is the module itself."""
    return dump_below(found_in(module), deeper=False)


def dump_below(metrics: Iterable[tuple[str, nn.Module]], *, deeper: bool = True, own: bool = False) -> States:
    """The same of metrics that were found before.

    Args:
        deeper: those that are inside of them too, as of `topmost`.
        own: in memory of its own; tensors in lists are only ever added to and replaced.
    """
    found: States = {}
    flattener = Flattener()
    for path, metric in (row for top in metrics for row in (_below(*top) if deeper else [top])):
        state = _state(metric)
        cache = getattr(metric, _CACHE, None)
        entry = {
            "state": state,
            "update_count": getattr(metric, _COUNT, 0),
            "cache": cache if isinstance(cache, torch.Tensor) else None,
            "attributes": {
                name: value
                for name, value in _attributes(metric, state)
                if problems(value, (path, name), flattener) is None
            },
        }
        found[path] = _copied(entry) if own else entry
    return found


def grow(module: nn.Module, paths: Iterable[str]) -> None:
    """Give each `MetricTracker` as many metrics as the saved one had: `load_state_dict` and `restore` find theirs."""
    found: list[tuple[str, Any]] = [
        (path, one) for path, one in found_in(module) if isinstance(one, nn.ModuleList) and hasattr(one, "increment")
    ]
    for path, tracker in found:
        prefix = f"{path}." if path else ""
        inside = {one.removeprefix(prefix).partition(".")[0] for one in paths if one.startswith(prefix) and one != path}
        if not inside:
            continue
        size = 1 + max((int(one) for one in inside if one.isdigit()), default=0)  # the first is the one it copies
        while len(tracker) < size:
            tracker.increment()
        while len(tracker) > size:
            delattr(tracker, [name for name, _ in tracker.named_children()][-1])


def restore(module: nn.Module, saved: Mapping[str, Any], name: str = "") -> list[NotRestored]:
    """Put the states back.

    Args:
        saved: what `dump` gave.
        name: of the component, for the report.
    """
    grow(module, saved)
    live, missing = dict(found_in(module)), []
    for path in [*saved, *(one for one in live if one not in saved)]:
        metric, entry = live.get(path), saved.get(path)
        called = f"metric object {'.'.join(filter(None, (name, path)))!r}"
        if metric is None or (entry is not None and set(_state(metric)) != set(entry["state"])):
            missing.append(NotRestored(called, "there is no such metric now, or it has other states"))
        elif entry is None:
            missing.append(NotRestored(called, "the snapshot does not have it: it is as the script made it"))
        else:
            _put_back(metric, entry)
    return missing


def without_metrics(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of what a `state_dict` has besides metrics: theirs may be of another shape each time."""
    prefixes = tuple(f"{path}." if path else "" for path, _ in found_in(module))
    return {key: shape for key, shape in shapes.items() if not (prefixes and key.startswith(prefixes))}


def _below(path: str, metric: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((".".join(filter(None, (path, inner))), one) for inner, one in found_in(metric))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return list(value) if type(value) is list else value


def _state(metric: Any) -> dict[str, Any]:
    """What it declares with `add_state`; a collection has only what its metrics have."""
    return dict(metric.metric_state) if hasattr(metric, "add_state") else {}


def _attributes(metric: Any, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors, and private values that not every metric has: what is public and plain is how the script sets it up."""
    for name, value in list(vars(metric).items()):
        if name in state or name in _of_every():
            continue
        if isinstance(value, torch.Tensor) or (name.startswith("_") and isinstance(value, bool | int | float | dict)):
            yield name, value


@functools.cache
def _of_every() -> frozenset[str]:
    """Attributes that each metric has."""
    library: Any = sys.modules[_LIBRARY]
    return frozenset(vars(library.SumMetric()))


def _put_back(metric: Any, entry: Mapping[str, Any]) -> None:
    device = getattr(metric, "device", None)
    for field, value in {**entry["state"], **entry.get("attributes", {})}.items():
        # Assigned, never copied into: metrics share tensors with each other and with their defaults.
        setattr(metric, field, _to(own_copy(value), device))
    if hasattr(metric, _COUNT):
        setattr(metric, _COUNT, entry["update_count"])
        setattr(metric, _CACHE, _to(own_copy(entry["cache"]), device))
        setattr(metric, _COMPUTED, None)


def _to(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value if device is None else value.to(device)
    return [_to(item, device) for item in value] if isinstance(value, list) else value
