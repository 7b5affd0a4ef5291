"""The objects of a run whose states are the components of its snapshots, and their state beyond `state_dict`.

That is: frozen parameters and eval modes (flags), options that a script sets again, metrics, and gradients that wait
for an optimizer step. A metric keeps tensors and private numbers besides what it declares with `add_state`: the place
in a window, a minimum, the groups of a collection; a `MetricTracker` gets one more metric at each `increment()`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ckpt_engine.audit.source import is_metric
from ckpt_engine.errors import ConfigError, MismatchError
from ckpt_engine.grouping import grouped
from ckpt_engine.loop.distributed_models import FlatModels, flat_models
from ckpt_engine.observe.curves import Curves
from ckpt_engine.observe.resume_report import NotRestored, Restored
from ckpt_engine.restore.match import ANY_SHAPE, tensor_shapes
from ckpt_engine.snapshot import arguments
from ckpt_engine.state.flatten import Flattener, problems, shapes_of
from ckpt_engine.state.module_names import canonical, for_live, renamed, stored_name
from ckpt_engine.state.optimizers import Parts, load_exactly, own_copy
from ckpt_engine.state.sharding import divided_like, here, parts_of
from ckpt_engine.state.wrapped import in_place, kinds_of, mapped, with_made
from ckpt_engine.store.manifest import OWN_KEY, Manifest

_EXTRA_STATE = "_extra_state"
_LAZY = frozenset({nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer})
_SHOWN = 8
Shapes = dict[str, tuple[int, ...]]
_T = TypeVar("_T")
_LIBRARY = "torchmetrics"
PRIVATE_NAMES = _COUNT, _CACHE, _COMPUTED = "_update_count", "_forward_cache", "_computed"
"""Of the library; a test fails where it does not have them."""
States = dict[str, Any]


class Components(Parts, Protocol):
    """What a snapshot of a run consists of, besides the run's position."""

    @property
    def objects(self) -> Mapping[str, Any]:
        """Whatever takes part in training, by the names that users know it by."""

    @property
    def flat(self) -> FlatModels | None:
        """What of the models FSDP1 divides."""

    def state(self) -> dict[str, Any]:
        """The components, with references to live tensors."""

    def owner(self, path: tuple[Any, ...]) -> nn.Module | torch.optim.Optimizer | None:
        """The model whose weight or buffer this leaf of `state` is by its name, or the optimizer whose `state` has it.

        Such a leaf of an optimizer changes in its steps only.
        """


class NamedParts:
    """Objects with `state_dict` and `load_state_dict`, each a component of its own.

    Args:
        objects: by component.

        flat: what FSDP1 divides of models that are not among them; None: what it divides of those that are.

    Raises:
        ConfigError: an object has no state to save, its name is taken, or a model is divided in ways that are not
            supported.
    """

    def __init__(self, objects: Mapping[str, Any], flat: FlatModels | None = None) -> None:
        for name, value in objects.items():
            methods = (getattr(value, method, None) for method in ("state_dict", "load_state_dict"))
            kind = value if isinstance(value, type) else type(value)
            rows = (
                (
                    name == OWN_KEY,
                    f"{name!r} is reserved for a component of the engine",
                    "track it by another name",
                ),
                (
                    isinstance(value, type),
                    f"{name!r} is the class {kind.__name__}, which has no state",
                    "give an object of it",
                ),
                (
                    not all(map(callable, methods)),
                    f"{name!r}, a {kind.__name__}, has no state_dict() and load_state_dict()",
                    "track modules, optimizers, schedulers, scalers, loaders, or give the class these two methods",
                ),
                (
                    hasattr(value, "consolidate_state_dict"),
                    f"{name!r}, a {kind.__name__}, has a part of its state on each rank",
                    "an optimizer that each rank has whole, or FSDP2 (fully_shard), which divides its state too",
                ),
            )
            for holds, why, hint in rows:
                if holds:
                    raise ConfigError(why, hint=hint)
        self.objects: Mapping[str, Any] = dict(objects)
        self.modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
        self.optimizers = {
            name: unwrapped(value) for name, value in objects.items() if isinstance(value, torch.optim.Optimizer)
        }
        self.flat = flat or flat_models(self.modules.values())
        if self.flat is not None:
            for optimizer in self.optimizers.values():
                self.flat.require_trained(optimizer)

    def state(self) -> dict[str, Any]:
        return {name: state_of(value, self.flat) for name, value in self.objects.items()}

    def owner(self, path: tuple[Any, ...]) -> nn.Module | torch.optim.Optimizer | None:
        if path[0] in self.optimizers:
            return self.optimizers[path[0]] if path[1:2] == ("state",) else None
        return self.modules.get(path[0]) if len(path) == 2 else None

    def shapes(self) -> dict[str, Shapes]:
        """Shapes of the weights that a snapshot must have to fit, by component."""
        return {name: weight_shapes(module, self.flat) for name, module in self.modules.items()}

    def load(self, saved: Mapping[str, Any]) -> tuple[list[Restored], list[NotRestored]]:
        """Put the components back.

        Raises:
            MismatchError: a component is of another model or optimizer.
        """
        restored: list[Restored] = []
        missing: list[NotRestored] = []
        for name, value in self.objects.items():
            if name not in saved:
                missing.append(NotRestored(name, "the snapshot has no such component: it is as the script made it"))
                continue
            put_back(name, value, saved[name], self.flat)
            restored.append(Restored(name, type(value).__name__))
        gone = [name for name in saved if name not in self.objects]
        missing += [NotRestored(name, "nothing of that name is tracked now") for name in gone]
        return restored, missing


def state_of(value: Any, flat: FlatModels | None) -> Any:
    """`value.state_dict()`; what FSDP1 divides as the parts that are here."""
    if flat is not None and isinstance(value, nn.Module):
        return flat.state(value)
    if flat is not None and isinstance(value, torch.optim.Optimizer):
        return flat.optimizer_state(unwrapped(value))
    state = value.state_dict()
    return renamed(without_lazy(state), canonical(value)) if isinstance(value, nn.Module) else state


def without_lazy(state: Any) -> Any:
    """The `state_dict` of a model without the weights that its first forward is to make."""
    if not _LAZY.isdisjoint(map(type, state.values())):
        for key in [key for key, value in state.items() if type(value) in _LAZY]:
            del state[key]
    return state


def put_back(name: str, value: Any, saved: Any, flat: FlatModels | None = None) -> None:
    """`value.load_state_dict(saved)`, the inverse of `state_of`; `name` is for the message.

    Raises:
        MismatchError: the object refuses the state.
    """
    try:
        if flat is not None and isinstance(value, nn.Module):
            flat.load(value, own_extra_state(saved))
        elif flat is not None and isinstance(value, torch.optim.Optimizer):
            flat.load_optimizer(unwrapped(value), saved)
        elif isinstance(value, torch.optim.Optimizer):
            load_exactly(unwrapped(value), saved, value.load_state_dict)
        elif isinstance(value, nn.Module):
            lazy = any(nn.parameter.is_lazy(one) for key, one in value.state_dict().items() if key not in saved)
            with in_place(value, for_live(value, own_extra_state(saved))) as rest:
                value.load_state_dict(rest, strict=not lazy)
        else:
            value.load_state_dict(with_made(own_copy(saved), kinds_of()))
    except (ValueError, KeyError) as err:
        raise MismatchError(
            f"component {name!r} of the snapshot does not fit this {type(value).__name__}: {err}",
            hint="use the objects this run was started with, or another folder for the new run",
        ) from err


def own_extra_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A model's state where modules may keep what `set_extra_state` gets: torch hands it on as it is."""
    return {key: own_copy(value) if key.endswith(_EXTRA_STATE) else value for key, value in state.items()}


def weight_shapes(module: nn.Module, flat: FlatModels | None = None) -> Shapes:
    """Shapes of the tensors of a model's state; lazy ones have none yet."""
    whole = {} if flat is not None else module.state_dict()  # FSDP1 would wait for the other ranks, which do not ask
    lazy = renamed({key: ANY_SHAPE for key, value in whole.items() if nn.parameter.is_lazy(value)}, canonical(module))
    return _without_extra_state(without_metrics(module, {**shapes_of(state_of(module, flat)), **lazy}))


def saved_shapes(manifest: Manifest, component: str) -> Shapes:
    """The same of a model in a snapshot."""
    return _without_extra_state(tensor_shapes(manifest, (component,)))


def shapes_in(state: Any) -> Shapes:
    """The same of a state."""
    return _without_extra_state(shapes_of(state))


def _without_extra_state(shapes: Shapes) -> Shapes:
    """What `get_extra_state` returns may be of another shape each time; `set_extra_state` decides what fits."""
    return {key: shape for key, shape in shapes.items() if not key.split("/")[0].endswith(_EXTRA_STATE)}


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside of the wrappers of Accelerate and Lightning Fabric, whose hooks run."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def managed(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    """The parameters that optimizers manage, as far as they are made: lazy ones are when a forward needs them."""
    every = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return (p for p in every if not nn.parameter.is_lazy(p))


def device_of(parts: Components) -> torch.device:
    """Where training computes."""
    parameters = (p for module in parts.modules.values() for p in module.parameters())
    return next((p.device for p in parameters), torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of what runs a loop, as they were at one moment.

    Args:
        dump: makes the values that a snapshot stores.
        notes: makes JSON values that a manifest keeps, to be read before a snapshot is loaded.
    """

    dump: Callable[[], dict[str, Any]] = dict
    notes: Callable[[], dict[str, Any]] = dict


class Surroundings:
    """What runs the loop, as far as a snapshot has to know it; as it is here: nothing does."""

    IMPORTED, COUNTERS, FILES, STREAMS = "imported", "trainer_state", "files", "rng"
    """Of a checkpoint of another program: the note of its snapshot, and the components that have what its trainer has
    counted, files of the model, and random streams."""
    plain_number, whole_number = staticmethod(arguments.plain_number), staticmethod(arguments.whole_number)
    """Take what a trainer counts for a number of Python, whatever makes it."""
    curves = Curves("", [])
    """Its loggers, once they have begun."""

    def accumulating(self) -> bool:
        """Gradients of the last batch wait for those of the next one."""
        return False

    def now(self) -> Counters:
        """Its counters; cheap, as it is called at every boundary."""
        return Counters(notes=self.curves.note)

    def restore(self, saved: Mapping[str, Any]) -> list[NotRestored]:  # noqa: ARG002
        """Put back what `Counters.dump` gave; called when the run resumes, and again right before its first batch."""
        return []

    def adopt(self, state: dict[str, Any]) -> tuple[list[Restored], list[NotRestored]]:  # noqa: ARG002
        """Take out of the state of an imported checkpoint what belongs to the surroundings, and put it back."""
        return [], []

    def audited(self) -> Mapping[str, Any]:
        """The user's objects that it calls while it trains, by name: what they remember may be hidden state."""
        return {}


def with_tied(module: torch.nn.Module, values: Mapping[str, _T]) -> dict[str, _T]:
    """Values by name, those of tied weights under all of their names: other programs store them under one."""
    names = grouped(
        ((next(parts_of(tensor)).data_ptr(), tensor.shape), name)
        for name, tensor in renamed(module.state_dict(), canonical(module)).items()
        if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor) and tensor.numel()
    )
    found = dict(renamed(values, stored_name(module)))
    values = dict(found)
    for tied in names.values():
        stored = next((name for name in tied if name in values), None)
        if stored is not None:
            found |= {name: found[stored] for name in tied if name not in values}
    return found


def options_of(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Any]:
    """Numbers in the groups of optimizers, such as the learning rate, by path."""
    return {
        f"{name}.param_groups[{number}][{key!r}]": value
        for name, optimizer in optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if all(isinstance(one, int | float) for one in (value if isinstance(value, tuple) else (value,)))
    }


def options_set(saved: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> list[NotRestored]:
    """What the script has set since `saved` was put back: code at the start of an epoch has run once more."""
    return [
        NotRestored(
            "the loop",
            f"{path} was {value}, and the script has set {now} before its first step: set it from run.epoch, or "
            "from what track(…, carry=Carry(…)) keeps",
        )
        for path, value, now in _changed(saved, options_of(optimizers))
    ]


def made_by_script(optimizers: Mapping[str, torch.optim.Optimizer], others: Mapping[str, Any]) -> str:
    """The class of each optimizer and scheduler, and the options of optimizers that have not trained, before anything
    is put back.

    JSON: a snapshot has one text sooner than a thousand values.

    Args:
        others: the schedulers, wrapped ones too, among any other objects.
    """
    classes = {name: type(optimizer).__name__ for name, optimizer in optimizers.items()}
    fresh = {name: optimizer for name, optimizer in optimizers.items() if not optimizer.state}
    inner = {name: getattr(one, "scheduler", one) for name, one in others.items()}
    kinds = {name: type(one).__name__ for name, one in inner.items() if isinstance(one, LRScheduler)}
    return json.dumps({"classes": classes, "options": options_of(fresh), "schedulers": kinds})


def made_otherwise(
    saved: str | None, optimizers: Mapping[str, torch.optim.Optimizer], others: Mapping[str, Any]
) -> list[NotRestored]:
    """Options that the script gives its optimizers now, where it gave others: those of the snapshot hold; and
    schedulers of another class.

    Args:
        saved: what `made_by_script` gave in the saved run; None: an older version has written it.
        optimizers, others: as they are before anything is put back.

    Raises:
        MismatchError: an optimizer is of another class.
    """
    now = json.loads(made_by_script(optimizers, others))
    was = now if saved is None else json.loads(saved)
    for name, kind, other in _changed(was["classes"], now["classes"]):
        raise MismatchError(
            f"the snapshot has the state of the optimizer {name!r} of the class {kind}, and the script now has {other}",
            hint=f"use {kind}, or start in another folder: the state of one optimizer is not that of another",
        )
    rows = _changed(was["options"], now["options"])
    found = [f"{path} is {value} as in the snapshot, not {other}" for path, value, other in rows[:_SHOWN]]
    found += [f"{len(rows) - _SHOWN} more"] * (len(rows) > _SHOWN)
    kinds = _changed(was.get("schedulers", {}), now["schedulers"])
    found += [f"{name} is a {other} now, and has what the snapshot has of a {kind}" for name, kind, other in kinds]
    return [NotRestored("changed options of optimizers", "; ".join(found))] if found else []


def _changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What both have, and not equally."""
    return [(path, value, now[path]) for path, value in saved.items() if now.get(path, value) != value]


def dump_flags(module: torch.nn.Module) -> dict[str, list[str]]:
    """Names of frozen parameters and of modules in eval mode."""
    name = canonical(module)
    training = {name(key): m.training for key, m in module.named_modules()}  # a wrapper comes before what it wraps
    return {
        "frozen": [name(key) for key, p in module.named_parameters() if not p.requires_grad],
        "eval": [key for key, trains in training.items() if not trains],
    }


def restore_flags(module: torch.nn.Module, saved: Mapping[str, list[str]]) -> None:
    """Freeze, unfreeze and switch modes as saved."""
    name, known = canonical(module), stored_name(module)
    frozen, evaluating = (set(map(known, saved[key])) for key in ("frozen", "eval"))
    for key, parameter in module.named_parameters():
        if parameter.requires_grad == (name(key) in frozen):
            parameter.requires_grad_(name(key) not in frozen)
    for key, submodule in module.named_modules():
        submodule.training = name(key) not in evaluating


def found_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The metrics in a module by path, those inside of others too."""
    name = canonical(module)
    return ((name(path), one) for path, one in module.named_modules() if is_metric(one))


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
    return [(name, one) for name, one in found if any(map(is_metric, one.modules()))]


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
        found[path] = copied(entry) if own else entry
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
    saved = renamed(saved, stored_name(module))
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
    """Shapes of what a `state_dict` has besides metrics, under canonical names: theirs may be of another shape each
    time."""
    prefixes = tuple(f"{path}." if path else "" for path, _ in found_in(module))
    rows = renamed(shapes, stored_name(module)).items()
    return {key: shape for key, shape in rows if not (prefixes and key.startswith(prefixes))}


def _below(path: str, metric: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((".".join(filter(None, (path, inner))), one) for inner, one in found_in(metric))


def copied(value: Any) -> Any:
    """With tensors of its own. Those in a list are only ever added to and replaced."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
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
    for name, value in {**entry["state"], **entry.get("attributes", {})}.items():
        # Assigned, never copied into: metrics share tensors with each other and with their defaults.
        setattr(metric, name, _on_device(own_copy(value), device))
    if hasattr(metric, _COUNT):
        setattr(metric, _COUNT, entry["update_count"])
        setattr(metric, _CACHE, _on_device(own_copy(entry["cache"]), device))
        setattr(metric, _COMPUTED, None)


def _on_device(value: Any, device: torch.device | None) -> Any:
    """With its tensors there."""
    return mapped(value, lambda one: one.to(device=device) if isinstance(one, torch.Tensor) else one)


def stored(gradient: torch.Tensor) -> Any:
    """A gradient as a tensor that a snapshot can hold, or the parts of a sparse one; of a DTensor what is here."""
    tensor = here(gradient)
    if tensor.layout is not torch.sparse_coo:
        return tensor
    # Values of the same place are not added up here: that would round in another order. torch documents these two
    # methods for tensors that are not coalesced.
    return {"indices": tensor._indices(), "values": tensor._values(), "coalesced": tensor.is_coalesced()}


def gradients_of(module: nn.Module, parameters: Container[int] | None = None) -> dict[str, Any]:
    """The gradients there are, by the name of their parameter; `parameters`: only of those of these ids."""
    name, named = canonical(module), module.named_parameters()
    kept = ((name(key), p.grad) for key, p in named if parameters is None or id(p) in parameters)
    return {key: stored(grad) for key, grad in kept if grad is not None}


def waiting_gradients(parts: Components, stepped: Container[int]) -> dict[str, dict[str, Any]]:
    """Gradients that wait for an optimizer step, by component.

    Args:
        stepped: ids of optimizers that have used up theirs.
    """
    waiting = [optimizer for optimizer in parts.optimizers.values() if id(optimizer) not in stepped]
    ids = {id(parameter) for parameter in managed(waiting) if parameter.grad is not None}
    found = {name: gradients_of(module, ids) for name, module in parts.modules.items()} if ids else {}
    return {name: one for name, one in found.items() if one}


def put_back_gradients(module: nn.Module | None, saved: Mapping[str, Any]) -> list[NotRestored]:
    """The inverse of `stored`, for the parameters of a model by name. What zeroes gradients MUST have run before."""
    live = {} if module is None else renamed(dict(module.named_parameters()), canonical(module))
    saved = saved if module is None else renamed(saved, stored_name(module))
    for name in live.keys() & saved.keys():
        _put_back_gradient(live[name], saved[name])
    why = "the model has no such parameter now"
    return [NotRestored(f"gradient of {name!r}", why) for name in saved if name not in live]


def put_back_waiting(parts: Components, own: Mapping[str, Any]) -> list[NotRestored]:
    """The inverse of `waiting_gradients`."""
    rows = own["gradients"].items()
    return [one for name, saved in rows for one in put_back_gradients(parts.modules.get(name), saved)]


def _put_back_gradient(parameter: torch.nn.Parameter, saved: Any) -> None:
    if isinstance(saved, Mapping):
        indices, values = (saved[name].to(parameter.device, copy=True) for name in ("indices", "values"))
        shape = tuple(parameter.shape)
        parameter.grad = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=saved["coalesced"])
    else:
        parameter.grad = divided_like(parameter, saved.to(parameter.device, copy=True))


def watch_gradients(parts: Components, arrived: Callable[[], None], hooks: ExitStack) -> None:
    """Call `arrived` with every gradient of the parameters that optimizers manage, maybe on one of autograd's threads.

    Args:
        hooks: gets what ends this. Not from within a hook: autograd walks through them then.
    """
    parameters: Any = managed(parts.optimizers.values())
    for parameter in parameters:
        if parameter.requires_grad:
            hooks.callback(parameter.register_post_accumulate_grad_hook(lambda _: arrived()).remove)
