"""A few really taken steps of torch's optimizers, as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

State = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Steps:
    """The state before and after one step, and the numbers of the optimizer: learning rate, betas, step."""

    old: State
    new: State
    numbers: dict[str, float]


@cache
def one_step(
    kind: type[torch.optim.Adam] = torch.optim.AdamW,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.1,
    lr: float = 1e-3,
    before: int = 20,
    size: int = 48,
    apart: int = 1,
    **options: bool,
) -> Steps:
    """Train a small network for a while, then take one step more (or `apart`)."""
    torch.manual_seed(3)
    network = torch.nn.Sequential(torch.nn.Linear(size, 4 * size), torch.nn.GELU(), torch.nn.Linear(4 * size, 8))
    optimizer = kind(network.parameters(), lr=lr, betas=betas, weight_decay=weight_decay, **options)
    target = torch.randn(size, 8)

    def step() -> None:
        x = torch.randn(32, size)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(network(x), torch.tanh(x @ target)).backward()
        optimizer.step()

    def state() -> State:
        weights = network[0].weight
        had = optimizer.state[weights]
        arrays = {"p": weights.detach(), "m": had["exp_avg"], "v": had["exp_avg_sq"]}
        return {role: array.numpy().tobytes() for role, array in arrays.items()}

    for _ in range(before):
        step()
    old = state()
    for _ in range(apart):
        step()
    decoupled = weight_decay if issubclass(kind, torch.optim.AdamW) else 0.0
    numbers = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": 1e-8, "weight_decay": decoupled}
    return Steps(old, state(), {**numbers, "step": before + apart})


def views(state: State) -> dict[str, memoryview]:
    """The arrays as codecs take them."""
    return {role: memoryview(data) for role, data in state.items()}
