"""The order in which DistributedDataParallel adds up gradients: recorded, and in force again from the first step on.

DDP puts gradients into buckets in the order of the parameters, and after its first backward pass anew in the order in
which they came. Where an element lies in a bucket decides in which order the ranks' values are added, and so its last
bit, from three ranks on. A resumed process would have the first order once more, in its first step.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt_engine.observe.resume_report import NotRestored
from ckpt_engine.tracking.engine import Engine

PRIVATE = {
    "DistributedDataParallel._get_ddp_logging_data": "the order, once there is one",
    "DistributedDataParallel._build_params_for_reducer": "the parameters in the order of their numbers",
    "DistributedDataParallel._comm_hooks": "what else sees gradients: nothing is done then",
    "DistributedDataParallel.find_unused_parameters": "there is no other order then",
    "DistributedDataParallel.reducer": "a backward pass without a forward",
    "ProcessGroup._get_sequence_number_for_group": "whether all ranks are behind the same collective",
}
"""Every name in use that is not public, and what for."""

_ORDER = "rebuilt_per_bucket_param_indices"
_CAME = "prev_iteration_grad_ready_order_indices"
_FEW = 2
"""The sum of so many numbers is the same in any order."""


def wrappers_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The DDP objects around modules, which nobody but their owner knows. Looks at all objects there are: once.

    Nothing where the order does not matter, or a module has several: which one trains is not known.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() <= _FEW:
        return []
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


def not_restored(why: str) -> list[NotRestored]:
    """The line of the resume report."""
    return [NotRestored("order of sums of gradients", f"the first step may differ in its last bits: {why}")]


class GradientOrder:
    """Of the models of one run that are wrapped by DDP.

    Args:
        models: wrapped or not.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models: list[Any] = [model for model in models if type(model) is DistributedDataParallel]
        self._known: dict[int, bytes] = {}

    def state(self) -> list[bytes]:
        """The order of each model; empty where it has none yet, or never another one."""
        return [self._order_of(number, model) for number, model in enumerate(self._models)]

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
            return "", False
        size = engine.ranks.size
        agreed = engine.meet(lambda: self._plan(saved, size, step, last=last), _common)
        for number in agreed["orders"]:
            model = self._models[number]
            parameters = model._build_params_for_reducer()[0]
            _pass(model, [parameters[at] for at in array("i", saved[number])])
        return agreed["why"], agreed["later"]

    def _plan(self, saved: Sequence[bytes], size: int, step: int, *, last: bool) -> list[_Said]:
        if not self._models:
            why = "DistributedDataParallel is not around the tracked model" if any(saved) else ""
            return [{"why": why, "later": bool(why) and not last}]
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
    if not order:
        return "the snapshot does not have the order, as DDP had not told it yet"
    if sorted(array("i", order)) != list(range(len(parameters))) or any(sparse):
        return "the model has other parameters, or sparse gradients"
    if dist.get_world_size(model.process_group) != size:
        return "the gradients are not those of all ranks"
    if model.static_graph or model._comm_hooks or getattr(model, "mixed_precision", None) is not None:
        return "DDP has a static graph, communication hooks or mixed precision"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.module.parameters()):
        return "the parameters have hooks"
    return ""


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
