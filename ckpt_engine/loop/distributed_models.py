"""What models of several ranks are to a snapshot: the runs of FSDP1, and the order in which DDP adds up gradients.

FSDP1 lays the parameters of a unit one behind another, and gives each rank an equal run of that row. Its own
`state_dict` gathers them on all ranks at once; `FlatModels` reads and writes the runs where they are, which follows
from the lengths of the parameters.

DDP puts gradients into buckets in the order of the parameters, and after its first backward pass in the order in which
they came. The place of an element in its bucket decides in which order the ranks' values are added, and so its last
bit, from three ranks on. A resumed process would use the first order in its first step; `GradientOrder` puts the
recorded one back.

The names of torch in use that are not public are listed, each with its reason, in tests/ranks/sharded/test_private.py.
"""

from __future__ import annotations

import gc
import sys
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt_engine.engine import Engine
from ckpt_engine.errors import ConfigError, MismatchError, RanksError, StateError
from ckpt_engine.grouping import grouped
from ckpt_engine.observe.resume_report import NotRestored
from ckpt_engine.ranks.boxes import Grid
from ckpt_engine.state.module_names import canonical, renamed
from ckpt_engine.state.optimizers import load_exactly
from ckpt_engine.state.sharding import FlatPart, grid_of_runs

_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_places: weakref.WeakKeyDictionary[nn.Module, tuple[_Place, ...]] = weakref.WeakKeyDictionary()
_ORDER = "rebuilt_per_bucket_param_indices"
_CAME = "prev_iteration_grad_ready_order_indices"
_FEW = 2
"""The sum of so many numbers is the same in any order."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter in a row.

    Args:
        name: within the unit.
        at, count: of its elements in the run of this rank.
    """

    name: str
    parameter: nn.Parameter
    grid: Grid
    at: int
    count: int


def units(module: nn.Module) -> list[tuple[str, Any]]:
    """The modules of FSDP1 in `module`, with their names. Nothing where FSDP1 is not imported."""
    found = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if found is None:
        return []
    kind = found.FullyShardedDataParallel
    return [(name, one) for name, one in module.named_modules() if isinstance(one, kind)]


def is_flat(module: nn.Module) -> bool:
    """Whether FSDP1 divides anything of `module`."""
    return any(_divides(unit) for _, unit in units(module))


class FlatModels:
    """Reads and writes the states of some modules and of the optimizers of their parameters.

    Args:
        modules: of which FSDP1 divides at least one.

    Raises:
        ConfigError: the parts of a parameter are not known, or ranks are divided in a way of their own.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._units = [unit for module in modules for _, unit in units(module)]
        if any(_divides(unit) and unit._handle.flat_param._params is None for unit in self._units):
            raise ConfigError(
                "FSDP1 with use_orig_params=False: its optimizer knows rows of many parameters only",
                hint="FullyShardedDataParallel(..., use_orig_params=True), or FSDP2 (fully_shard)",
            )

    def parts(self) -> dict[int, FlatPart]:
        """What this rank has of each parameter that is divided, by its `id`."""
        return {id(place.parameter): part for unit in self._units for place, part in _parts(unit)}

    def state(self, module: nn.Module) -> dict[str, Any]:
        """`module.state_dict()` under the names that it has without FSDP1; the divided parameters as parts."""
        with _without_hooks(module):
            found = renamed(module.state_dict(), canonical(module))
        return {**found, **_named_parts(module)}

    def require_trained(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise where a rank has nothing of what `optimizer` trains: it cannot tell which states there are.

        Raises:
            ConfigError: names the ranks; the same on all of them.
        """
        parts = self.parts()
        trained = grouped(
            (parameter.dtype, parts[id(parameter)])
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) in parts
        )
        for some in trained.values():
            without = set(some[0].ranks).difference(*(ranks for part in some for ranks in part.grid.holders))
            if without:
                raise ConfigError(
                    f"FSDP1 gives ranks {sorted(without)} nothing of what {type(optimizer).__name__} trains",
                    hint="wrap trained and frozen modules in units of their own (auto_wrap_policy), or FSDP2",
                )

    def load(self, module: nn.Module, saved: Mapping[str, Any]) -> None:
        """Put `state` back, whose parts have been filled in place.

        Raises:
            MismatchError: it lacks something.
        """
        divided, name = _named_parts(module), canonical(module)
        for _, unit in units(module):
            if _divides(unit) and _row(unit).data_ptr() != unit._handle.flat_param.data_ptr():
                unit._handle.reshard(True)  # else the next forward would compute with what was gathered before
        with _without_hooks(module):
            live = module.state_dict()
            missing = [one for one in map(name, live) if one not in saved]
            if missing:
                raise MismatchError(f"the snapshot lacks {missing[0]!r} and {len(missing) - 1} more of this model")
            module.load_state_dict(
                {key: one if name(key) in divided else saved[name(key)] for key, one in live.items()}
            )

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """`optimizer.state_dict()`, with parts; the same on all ranks, whatever each has.

        Raises:
            StateError: it has a state that is not divided as its parameters are.
        """
        found = optimizer.state_dict()
        members = [(index, p) for index, group in enumerate(optimizer.param_groups) for p in group["params"]]
        parts, states, known = self.parts(), {}, {}
        stepped = self._stepped(optimizer)
        for number, (group, parameter) in enumerate(members):
            part, state = parts.get(id(parameter)), found["state"].get(number)
            if part is None:
                if state is not None:
                    states[number] = state
            elif state:
                states[number] = {key: _wrapped(part, value, optimizer) for key, value in state.items()}
            elif not part.box.shape[0] and parameter.requires_grad and id(parameter) in stepped:
                kind = (group, parameter.dtype)
                if kind not in known:
                    known[kind] = _like(optimizer, parameter, parts)
                states[number] = {key: _nothing(part, value) for key, value in known[kind].items()}
        return {**found, "state": states}

    def _stepped(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """By their `id`, the parameters that have a state on the ranks that have something of them.

        Those of a unit get their gradients together, and so their first step: what this rank has of it tells.
        """
        members = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        found: set[int] = set()
        for unit in self._units:
            mine = [place for place, _ in _parts(unit) if id(place.parameter) in members]
            told = [bool(optimizer.state.get(place.parameter)) for place in mine if place.count]
            if any(told) if told else bool(optimizer.state):
                found |= {id(place.parameter) for place in mine}
        return found

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        """Put `optimizer_state` back, whose parts have been filled."""
        parts = self.parts()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states: dict[Any, Any] = {}
        for number, state in saved["state"].items():
            part = parts.get(id(parameters[number])) if number < len(parameters) else None
            if part is None or part.box.shape[0]:
                states[number] = {k: v.part if isinstance(v, FlatPart) else v for k, v in state.items()}
        load_exactly(optimizer, {**saved, "state": states}, optimizer.load_state_dict)


def flat_models(modules: Iterable[nn.Module]) -> FlatModels | None:
    """None: FSDP1 divides nothing of them."""
    found = list(modules)
    return FlatModels(found) if any(map(is_flat, found)) else None


def _divides(unit: Any) -> bool:
    return unit._handle is not None and unit._handle.uses_sharded_strategy


def _row(unit: Any) -> torch.Tensor:
    """The run of this rank; `flat_param` itself may be what was gathered."""
    flat = unit._handle.flat_param
    found: torch.Tensor = getattr(flat, "_local_shard", flat)
    return found.detach()


def _parts(unit: Any) -> Iterator[tuple[_Place, FlatPart]]:
    if not _divides(unit):
        return
    row, everyone, rank = _row(unit), frozenset(range(dist.get_world_size())), dist.get_rank()
    for place in _places_of(unit):
        part = row[place.at : place.at + place.count] if place.count else row.new_empty(0)
        yield place, FlatPart(part, place.grid, everyone, rank)


def _named_parts(module: nn.Module) -> dict[str, FlatPart]:
    name = canonical(module)
    return {
        name(f"{prefix}.{place.name}" if prefix else place.name): part
        for prefix, unit in units(module)
        for place, part in _parts(unit)
    }


def _places_of(unit: Any) -> tuple[_Place, ...]:
    found = _places.get(unit)
    if found is None:
        found = _places[unit] = tuple(_find_places(unit))
    return found


def _find_places(unit: Any) -> Iterator[_Place]:
    flat, length = unit._handle.flat_param, int(unit._handle.flat_param._sharded_size.numel())
    rows, rank = _rows_of(unit._handle.process_group), dist.get_rank()
    numels = flat._numels_with_padding
    starts = [0, *accumulate(numels)]
    spans = [(start, n) for start, n, pads in zip(starts, numels, flat._is_padding_mask, strict=False) if not pads]
    for name, parameter, shape, (start, numel) in zip(flat._fqns, flat._params, flat._shapes, spans, strict=True):
        runs, at, count = [], 0, 0
        for number, holders in enumerate(rows):
            low, high = max(start, number * length), min(start + numel, (number + 1) * length)
            if high > low:
                runs += [(holder, low - start, high - start) for holder in holders]
                if rank in holders:
                    at, count = low - number * length, high - low
        yield _Place(name, parameter, grid_of_runs(tuple(shape), runs), at, count)


def _rows_of(group: Any) -> list[list[int]]:
    """The ranks that have each run: one of every group that divides the row, which are neighbours."""
    mine, everyone = dist.get_process_group_ranks(group), dist.get_world_size()
    size = len(mine)
    if mine != list(range(mine[0], mine[0] + size)) or mine[0] % size or everyone % size:
        raise ConfigError(
            f"FSDP1 divides the model over ranks {mine} of {everyone}, which are no neighbours",
            hint="divide it over all ranks (FULL_SHARD), or over those of one node (HYBRID_SHARD)",
        )
    return [list(range(number, everyone, size)) for number in range(size)]


def _wrapped(part: FlatPart, value: Any, optimizer: torch.optim.Optimizer) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 1 and value.numel() == part.box.shape[0]:
        return part.like(value)
    if value.dim() == 0:
        return part.one(value.view(1))
    raise StateError(
        f"{type(optimizer).__name__} has a state of shape {tuple(value.shape)} for {part.box.shape[0]} elements of a "
        "parameter that FSDP1 divides",
        hint="an optimizer whose states are shaped as the parameters, or FSDP2 (fully_shard)",
    )


def _nothing(part: FlatPart, value: Any) -> Any:
    """What stands for a state of which this rank has nothing."""
    if isinstance(value, torch.Tensor):
        nothing = value.new_empty(0)
        return part.like(nothing) if value.dim() == 1 else part.one(nothing)
    return value


def _like(optimizer: torch.optim.Optimizer, parameter: Any, parts: Mapping[int, FlatPart]) -> Mapping[str, Any]:
    """The state of another parameter, best one of the same group: which states there are is the same."""
    groups = sorted(optimizer.param_groups, key=lambda group: all(one is not parameter for one in group["params"]))
    for group in groups:
        for other in group["params"]:
            state: Mapping[str, Any] = optimizer.state.get(other, {})
            if state and id(other) in parts and other.dtype == parameter.dtype:
                numbers = [key for key, value in state.items() if not isinstance(value, torch.Tensor | None)]
                if numbers:
                    raise StateError(
                        f"{type(optimizer).__name__} counts {numbers[0]!r} as a plain number; this rank lacks it "
                        "for parameters of which FSDP1 gives it no part",
                        hint="an optimizer that keeps tensors (all of torch.optim do), or FSDP2 (fully_shard)",
                    )
                return state
    raise StateError(
        f"FSDP1 gives this rank nothing of any parameter that {type(optimizer).__name__} has a state for",
        hint="larger units (auto_wrap_policy), so that each rank has a part of one, or FSDP2 (fully_shard)",
    )


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """While this lasts `state_dict` and `load_state_dict` gather nothing."""
    taken = [(unit, name, vars(unit)[name]) for _, unit in units(module) for name in _HOOKS]
    for unit, name, hooks in taken:
        vars(unit)[name] = type(hooks)()
    try:
        yield
    finally:
        for unit, name, hooks in taken:
            vars(unit)[name] = hooks


def wrappers_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The DDP objects around modules, which only their owner knows. Looks at all objects there are: once.

    Nothing where there is one process, or a module has several: which one trains is not known.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    if dist.get_world_size() > _FEW:
        gc.collect()  # what is garbage on one rank only must not count
    wrappers = [one for one in gc.get_objects() if type(one) is DistributedDataParallel]
    found = [[one for one in wrappers if one.module is module] for module in modules]
    return [one for (one,) in (some for some in found if len(some) == 1)]


class _Said(TypedDict):
    """What a rank says of a model: why its order cannot be put in force (nothing: it need not), or where it is."""

    why: NotRequired[str]
    later: NotRequired[bool]
    at: NotRequired[list[int]]


class _Agreed(TypedDict):
    """What all ranks do: the numbers of the models whose orders are put in force."""

    orders: list[int]
    why: str
    later: bool


class GradientOrder:
    """Of the models of one run that are wrapped by DDP.

    Args:
        models: wrapped or not.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models: list[Any] = [model for model in models if type(model) is DistributedDataParallel]
        self._known: dict[int, bytes] = {}

    def state(self) -> list[bytes]:
        """The order of each model; empty where it has none yet, or never another one.

        Raises:
            RanksError: the ranks may make other numbers of steps, so that the same step is another moment on each.
        """
        if any(model._join_config.enable for model in self._models):
            raise RanksError(
                "under Join (join_uneven_inputs) the ranks make different numbers of steps, and have no moment for a "
                "snapshot of all",
                hint="give all ranks the same number of batches instead: drop_last, or even_batches of Accelerate",
            )
        return [self._order_of(number, model) for number, model in enumerate(self._models)]

    def syncs(self) -> list[bool]:
        """Whether the next forward pass of each model gives all ranks the buffers of rank 0.

        DDP does so but after a pass without gradients, as in a validation, or without their sum (`no_sync`).
        """
        return [bool(model.require_forward_param_sync) for model in self._models]

    def put_back(
        self, own: Mapping[str, Any], engine: Engine, step: int, *, last: bool, same: bool
    ) -> tuple[list[NotRestored], bool]:
        """As `restore`, with `syncs`: what rank 0 reports of all that is not as it was.

        Args:
            own: what a snapshot has besides the components.
            same: as many ranks have taken it.
        """
        self.restore_syncs(own.get("buffer_syncs", []))
        why, later = self.restore(own.get("gradient_order", []), engine, step, last=last)
        missing = self.lost()
        if why and same:
            why = f"the first step may differ in its last bits: {why}"
            missing.append(NotRestored("order of sums of gradients", why))
        return [] if engine.ranks is not None and engine.ranks.rank else missing, later

    def restore_syncs(self, saved: Sequence[bool]) -> None:
        """What `syncs` was: a new DDP object would put the buffers of rank 0 in place of those that a rank got back."""
        if len(saved) == len(self._models):
            for model, syncs in zip(self._models, saved, strict=True):
                model.require_forward_param_sync = syncs

    def lost(self) -> list[NotRestored]:
        """What communication hooks carry from step to step (PowerSGD its errors), which is in no snapshot."""
        why = "a communication hook of DDP has it, whose state is in no snapshot: the next steps differ"
        return [
            NotRestored(f"state of {hook.__qualname__}", why)
            for model in self._models
            for hook, state in model._comm_hooks
            if not isinstance(state, dist.ProcessGroup | None)
        ]

    def restore(self, saved: Sequence[bytes], engine: Engine, step: int, *, last: bool) -> tuple[str, bool]:
        """Put the orders in force where all ranks can: they tell each other through the store first.

        All ranks MUST call this, whatever they have, before the first step. Gradients are gone where it was done. It is
        not where others would see gradients that are none (hooks), on any rank.

        Args:
            saved: `state` of the snapshot.
            step: of the snapshot.
            last: there is no later moment, at which models may be wrapped that are not yet.

        Returns:
            Why an order that was in force is not, or nothing; and whether to call this again. Both alike on all ranks.
        """
        if engine.ranks is None or engine.ranks.size <= _FEW:
            return "", not last and len(saved) > len(self._models)
        size = engine.ranks.size
        agreed = engine.meet(lambda: self._plan(saved, size, step, last=last), _common)
        for number in agreed["orders"]:
            model = self._models[number]
            parameters = model._build_params_for_reducer()[0]
            _pass(model, [parameters[at] for at in array("i", saved[number])])
        return agreed["why"], agreed["later"]

    def _plan(self, saved: Sequence[bytes], size: int, step: int, *, last: bool) -> list[_Said]:
        if len(self._models) < len(saved):
            why = "DistributedDataParallel is around fewer tracked models than it was" if any(saved) else ""
            return [{"why": why, "later": not last}]
        orders = saved if len(saved) == len(self._models) else [b""] * len(self._models)
        return [_said(model, order, size, step) for model, order in zip(self._models, orders, strict=True)]

    def _order_of(self, number: int, model: Any) -> bytes:
        if number not in self._known:
            data = model._get_ddp_logging_data()
            if _ORDER not in data:  # said two steps late; after the second one it is the order of the first one
                return _packed(data.get(_CAME, "")) if data.get("iteration") == 1 else b""
            self._known[number] = _packed(data[_ORDER])
        return self._known[number]


def _packed(numbers: str) -> bytes:
    return array("i", map(int, numbers.replace(",", " ").split())).tobytes()


def _said(model: Any, order: bytes, size: int, step: int) -> _Said:
    if model.find_unused_parameters or not step:  # then it has its first order
        return {"why": ""}
    if why := _obstacle(model, order, size):
        return {"why": why}
    # A rank that is ahead of others, or behind them, would mix zeros into what they send each other.
    return {"at": [len(order), model.process_group._get_sequence_number_for_group()]}


def _obstacle(model: Any, order: bytes, size: int) -> str:
    parameters, sparse = model._build_params_for_reducer()
    has_others = sorted(array("i", order)) != list(range(len(parameters))) or any(sparse)
    has_more = model.static_graph or model._comm_hooks or getattr(model, "mixed_precision", None) is not None
    has_hooks = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.module.parameters())
    rows = (
        (not order, "the snapshot does not have the order: DDP did not know it yet"),
        (has_others, "the model has other parameters, or sparse gradients"),
        (dist.get_world_size(model.process_group) != size, "the gradients are not those of all ranks"),
        (has_more, "DDP has a static graph, communication hooks or mixed precision"),
        (has_hooks, "the parameters have hooks"),
    )
    return next((why for holds, why in rows if holds), "")


def _common(said: list[list[_Said] | None]) -> _Agreed:
    """What all ranks would do. Of a rank that has not answered nothing is known."""
    answers = [one for one in said if one is not None]
    if len(answers) < len(said) or any(len(one) != len(answers[0]) for one in answers):
        return {"orders": [], "why": "the ranks have other numbers of models, or did not answer", "later": False}
    orders, problems, later = [], [], False
    for number, rows in enumerate(zip(*answers, strict=True)):
        why = [f"{row['why']} (rank {rank})" for rank, row in enumerate(rows) if row.get("why")]
        if any(row.get("later") for row in rows) and all(row.get("later") or not row.get("why") for row in rows):
            later = True
        elif why or any(row != rows[0] for row in rows):
            problems.append(why[0] if why else "the ranks are at other places of the script")
        elif "at" in rows[0]:
            orders.append(number)
    if later:  # one after the other would be two meetings of different models
        orders = []
    return {"orders": orders, "why": "" if later else "; ".join(problems), "later": later}


def _pass(model: Any, parameters: Sequence[torch.Tensor]) -> None:
    """A backward pass in which the gradients, all zero, come in this order."""
    with torch.enable_grad():
        model.reducer.prepare_for_forward()
        model.reducer.prepare_for_backward([])
        for parameter in parameters:
            torch.autograd.backward(parameter.reshape(-1)[:0].sum())
    for parameter in parameters:
        parameter.grad = None
