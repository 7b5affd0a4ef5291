"""Seeded states and models of stated sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

SEED = 20240611

State = dict[str, Any]


def gpt2_shapes(*, layers: int = 12, width: int = 768, vocabulary: int = 50257) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters of GPT-2 (124 million in 148 tensors by default)."""
    found: list[tuple[str, tuple[int, ...]]] = [("wte", (vocabulary, width)), ("wpe", (1024, width))]
    for layer in range(layers):
        for name, shape in (
            ("ln_1.weight", (width,)),
            ("ln_1.bias", (width,)),
            ("attn.c_attn.weight", (width, 3 * width)),
            ("attn.c_attn.bias", (3 * width,)),
            ("attn.c_proj.weight", (width, width)),
            ("attn.c_proj.bias", (width,)),
            ("ln_2.weight", (width,)),
            ("ln_2.bias", (width,)),
            ("mlp.c_fc.weight", (width, 4 * width)),
            ("mlp.c_fc.bias", (4 * width,)),
            ("mlp.c_proj.weight", (4 * width, width)),
            ("mlp.c_proj.bias", (width,)),
        ):
            found.append((f"h.{layer}.{name}", shape))
    found += [("ln_f.weight", (width,)), ("ln_f.bias", (width,))]
    return found


def adam_state(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> State:
    """A training state as `state_dict` gives it: fp32 parameters, two moments of Adam and a step count for each."""
    generator = torch.Generator().manual_seed(SEED)
    model = {name: torch.randn(shape, generator=generator) for name, shape in shapes}
    moments = {
        index: {
            "step": torch.tensor(1000.0),
            "exp_avg": tensor * 1e-3,
            "exp_avg_sq": tensor.square() * 1e-6,
        }
        for index, tensor in enumerate(model.values())
    }
    group = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(range(len(model)))}
    return {"model": model, "optimizer": {"state": moments, "param_groups": [group]}, "step": 1000}


def gpt2_state(nbytes: int) -> State:
    """A GPT-2 with Adam of about `nbytes` in 592 tensors: 1.5 GB is the real thing, others have another width."""
    exact = 768 * math.sqrt(nbytes / 1.493e9)
    width = max(8, round(exact / 8) * 8)
    return adam_state(gpt2_shapes(width=width, vocabulary=round(50257 * width / 768)))


def many_tensors_state(count: int, nbytes: int) -> State:
    """`count` tensors of about `nbytes` together: parameters, Adam's moments, and a step count for each parameter."""
    parameters = count // 4
    elements = nbytes // 4 // (3 * parameters)
    return adam_state([(f"layer.{i}.weight", (elements,)) for i in range(parameters)])


def flat_state(count: int, nbytes: int) -> State:
    """`count` equal tensors of `nbytes` together in one dict."""
    generator = torch.Generator().manual_seed(SEED)
    elements = nbytes // 4 // count
    return {"model": {f"layer.{i}.weight": torch.randn(elements, generator=generator) for i in range(count)}}


def change_everything(state: Any) -> None:
    """Change every element of every tensor of a state in place."""
    with torch.no_grad():
        for tensor in tensors(state):
            tensor.add_(1)


def tensors(node: Any) -> Iterator[torch.Tensor]:
    """All tensors of a state."""
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, dict):
        for child in node.values():
            yield from tensors(child)
    elif isinstance(node, list | tuple):
        for child in node:
            yield from tensors(child)


def state_bytes(state: Any) -> int:
    """Bytes of all tensors of a state."""
    return sum(t.numel() * t.element_size() for t in tensors(state))


def everything_lazy(path: tuple[Any, ...]) -> bool:
    """Parameters and optimizer state change in the optimizer step only, so all of them may be staged lazily."""
    return True


def perceptron(parameters: int, *, inputs: int = 256, depth: int = 8) -> nn.Sequential:
    """A multilayer perceptron of about `parameters` parameters."""
    torch.manual_seed(SEED)
    width = max(8, round((-inputs + math.sqrt(inputs**2 + 4 * (depth - 1) * parameters)) / (2 * (depth - 1))))
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.GELU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))
