"""What a step changes before it changes weights, as it was at the last boundary: for a step that fails before that.

Parameters that an optimizer manages, and its state, change behind the fence only. As long as the fence was not passed
they are those of the boundary. With a record of everything else the boundary can still be saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Generic, TypeVar

import torch

from ckpt_engine.snapshot.sharding import here
from ckpt_engine.tracking.parts import managed

R = TypeVar("R")

MOST_BYTES = 1 << 20
_MOST_VALUES = 256
_PLAIN = (float, int, str, bool, type(None), bytes, PurePath)
_SHARE = 0.5
AGAIN = 64
"""Boundaries after which what was found out about a run is looked at again."""
_SMOOTH = 0.9


def affordable(cost_seconds: float, step_seconds: float, budget: float) -> bool:
    """Whether a record may be made at every boundary: of the budget for snapshots it takes half at most."""
    return cost_seconds <= _SHARE * budget * step_seconds


class ImpossibleError(Exception):
    """The state of the last boundary cannot be had; the message says why."""


class LastBoundary(Generic[R]):
    """The record of the last boundary, while nothing was changed that is not in it. Training thread only.

    Args:
        make: makes a record.
        budget: the share of training time that snapshots may cost.
        now: the source of moments.
    """

    def __init__(self, make: Callable[[], R], budget: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._make, self._budget, self._now = make, budget, now
        self._record: R | None = None
        self._why = "no step was begun"
        self._cost: float | None = None
        self._step: float | None = None
        self._ended: float | None = None
        self._count = 0

    def reached(self) -> None:
        """A boundary; the next step begins when this returns."""
        began = self._now()
        if self._ended is not None:
            taken = began - self._ended
            self._step = taken if self._step is None else _SMOOTH * self._step + (1.0 - _SMOOTH) * taken
        self._count += 1
        if self._cost is None or self._step is None or self._count % AGAIN == 0 or self._affords():
            try:
                self._record = self._make()
            except ImpossibleError as err:
                self._record, self._why = None, str(err)
            cost = self._now() - began
            self._cost = cost if self._cost is None else min(cost, _SMOOTH * self._cost + (1.0 - _SMOOTH) * cost)
        else:
            self._record, self._why = None, "steps are too short to record what each of them changes"
        self._ended = self._now()

    @property
    def holds(self) -> bool:
        """Whether there is a record."""
        return self._record is not None

    def missed(self, why: str) -> None:
        """A boundary that no snapshot can be taken at."""
        self._record, self._why = None, why
        self._ended = None

    def changes(self) -> None:
        """Weights may change from here on."""
        if self._record is not None:
            self._record, self._why = None, "weights may have changed since that boundary"

    def record(self) -> R:
        """The record of the last boundary.

        Raises:
            ImpossibleError: more has changed since, or there is none.
        """
        if self._record is None:
            raise ImpossibleError(self._why)
        return self._record

    def _affords(self) -> bool:
        assert self._cost is not None
        assert self._step is not None
        return affordable(self._cost, self._step, self._budget)


@dataclass(frozen=True, slots=True)
class Loose:
    """A tensor of a model that a forward or a hook may change at any time.

    Args:
        key: its name in the model's `state_dict`.
        owner: the module that has it, as a buffer or a parameter.
        name: its name there.
    """

    key: str
    owner: torch.nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """As it is now: some modules make a new one in each step."""
        found = self.owner._buffers.get(self.name)
        return self.owner._parameters[self.name] if found is None else found  # type: ignore[return-value]


def keys_of(module: torch.nn.Module) -> Iterator[tuple[Loose, torch.Tensor]]:
    """What a `state_dict` has where nobody has changed what it does; tied tensors under each of their names."""
    for path, owner in module.named_modules(remove_duplicate=False):
        left_out = owner._non_persistent_buffers_set
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and name not in left_out:
                yield Loose(f"{path}.{name}" if path else name, owner, name), tensor


def loose_tensors(module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[Loose]:
    """Buffers, and parameters that no optimizer manages.

    Raises:
        ImpossibleError: they are too large to be copied at every step.
    """
    behind_the_fence = {id(parameter) for parameter in managed(optimizers)}
    found = [
        (one, tensor)
        for one, tensor in keys_of(module)
        if id(tensor) not in behind_the_fence and not torch.nn.parameter.is_lazy(tensor)
    ]
    size = sum(here(tensor).numel() * tensor.element_size() for _, tensor in found)
    if size > MOST_BYTES:
        raise ImpossibleError(f"what changes in forward is too large to be copied at every step: {size / 1e6:.0f} MB")
    return [one for one, _ in found]


def require_unmoved(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Nothing has moved since the boundary.

    Raises:
        ImpossibleError: something has; names it.
    """
    for name in before.keys() | now.keys():
        if now.get(name) != before.get(name):
            raise ImpossibleError(f"{name} has changed in the step that failed")


def seen(name: str, state: Any) -> Any:
    """See `fingerprint`; `name` is for its message."""
    try:
        return fingerprint(state)
    except ImpossibleError as err:
        raise ImpossibleError(f"{name} has {err}") from err


def fingerprint(value: Any) -> Any:
    """A value that equals that of an equal state, of small states.

    Raises:
        ImpossibleError: `value` holds what cannot be compared at every step.
    """
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.numel() > _MOST_VALUES:
            raise ImpossibleError("a tensor that is too large to be compared at every step")
        return (tuple(value.shape), value.detach().tolist())
    if kind is dict or isinstance(value, Mapping):
        return [(key, item if type(item) in _PLAIN else fingerprint(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [item if type(item) in _PLAIN else fingerprint(item) for item in value]
    raise ImpossibleError(f"a {type(value).__name__}, which cannot be compared at every step")


def require_finite(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """No weight and no state of an optimizer is NaN or infinite.

    Raises:
        ImpossibleError: one is: training has diverged.
    """
    for optimizer in optimizers:
        states = (value for state in optimizer.state.values() for value in state.values())
        found = (value for value in (*managed([optimizer]), *states) if isinstance(value, torch.Tensor))
        if not all(map(_is_finite, found)):
            raise ImpossibleError("the weights or the optimizer's state are not finite: training has diverged")


def _is_finite(value: torch.Tensor) -> bool:
    if not (value.is_floating_point() or value.is_complex()):
        return True
    # A mask of all elements would need memory that a device may not have now.
    return bool(torch.isfinite(here(value).detach().sum(dtype=_wide(value))))


def _wide(value: torch.Tensor) -> torch.dtype:
    return value.dtype if value.is_complex() or value.dtype is torch.float64 else torch.float32
