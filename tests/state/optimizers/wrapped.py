"""Tensors of other tensors, as libraries of low-bit weights and moments have them, with the fewest operators."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """Inner tensors by name, and a context; torch gets `detach`, and whatever `more` has."""

    names: ClassVar[Sequence[str]] = ("q", "scale")
    more: ClassVar[dict[Any, Callable[..., Any]]] = {}
    context: Any

    @staticmethod
    def __new__(cls, *inner: torch.Tensor, context: Any = None) -> Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner[0].shape, dtype=torch.float32)
        made.context = context
        for name, one in zip(cls.names, inner, strict=True):
            setattr(made, name, one)
        return made  # type: ignore[no-any-return]

    def __init__(self, *inner: torch.Tensor, context: Any = None) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.names), self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Wrapper:
        return cls(*[inner[name] for name in cls.names], context=context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is aten.detach.default:
            return cls(*[getattr(args[0], name) for name in cls.names], context=args[0].context)
        if func in cls.more:
            return cls.more[func](*args)
        raise NotImplementedError(func)

    def value(self) -> torch.Tensor:
        q: torch.Tensor = self.q  # type: ignore[attr-defined]
        return q * self.scale  # type: ignore[attr-defined, no-any-return]


class Mode(enum.Enum):
    """How values are rounded."""

    NEAREST = 1
    UP = 2


@dataclass(frozen=True)
class Layout:
    """How the integers lie."""

    block: tuple[int, ...]
    mode: Mode


class Scaled(Wrapper):
    """Integers and their scale."""


def _rounding(to: Any, source: Any, *_: Any) -> Any:
    to.q.copy_((source.q / 2).round() * 2)
    return to


class Rounding(Wrapper):
    """Its `copy_` rounds again and leaves the scale out."""

    more: ClassVar = {aten.copy_.default: _rounding}


class Nested(Wrapper):
    """One in another: the scale of the scales."""

    names = ("q", "inner")

    def value(self) -> torch.Tensor:
        return self.q * self.inner.value()  # type: ignore[attr-defined, no-any-return]


class Unregistered(Wrapper):
    """No module of an optimizer names it."""


def integers(width: int) -> torch.Tensor:
    return torch.randint(-9, 9, (width, width), dtype=torch.int8)


def scaled(width: int, kind: type[Wrapper] = Scaled, context: Any = None) -> Wrapper:
    return kind(integers(width), torch.rand(width), context=context)


def nested(width: int) -> Wrapper:
    return Nested(integers(width), scaled(width), context=[1, "a"])


class LowBit(nn.Module):
    """Multiplies by a weight of integers, whose scale grows with each forward, as an observer's does."""

    def __init__(self, weight: Wrapper, as_parameter: bool) -> None:
        super().__init__()
        if as_parameter:
            self.weight = nn.Parameter(weight, requires_grad=False)
        else:
            self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> Any:
        weight: Any = self.weight
        if self.training:
            inner = weight.inner if isinstance(weight, Nested) else weight
            inner.scale.mul_(1.01)
            inner.q.neg_()
        return x @ weight.value()


class Moments(torch.optim.Optimizer):
    """SGD whose momentum is integers and a scale, as those of 8-bit optimizers."""

    def __init__(self, params: Any, kind: type[Wrapper], context: Any = None) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.kind, self.context = kind, context

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                before = state["momentum"].value() if state else torch.zeros_like(p)
                now = 0.9 * before + p.grad
                scale = now.abs().amax().clamp_min(1e-8) / 127
                if state:
                    state["momentum"].q.copy_((now / scale).round())
                    state["momentum"].scale.copy_(scale)
                else:
                    q = (now / scale).round().to(torch.int8)
                    state["momentum"] = self.kind(q, scale.reshape(()).clone(), context=self.context)
                p.sub_(group["lr"] * state["momentum"].value())
        return loss
