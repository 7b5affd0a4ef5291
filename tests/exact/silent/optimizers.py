"""Optimizers, schedules, averages and scales that a script makes itself, or in another way at each start."""

from __future__ import annotations

import os
import random
from typing import Any

import torch

from tests.exact.silent.lab import STEPS, at, by_epochs, checkpoints, end, learn, parts, shuffled


class Halved(torch.optim.Optimizer):
    """Its moments have another dtype than its parameters."""

    def __init__(self, parameters: Any, dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.get("mean", torch.zeros_like(p, dtype=self.dtype))
                state["mean"] = (0.9 * mean + 0.1 * p.grad).to(self.dtype)
                p.sub_(group["lr"] * state["mean"].to(p.dtype))


def _of_dtype(dtype: torch.dtype, half: bool) -> None:
    model, _ = parts()
    model = model.to(torch.bfloat16) if half else model
    optimizer, loader = Halved(model.parameters(), dtype), shuffled()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                learn(model, optimizer, x.to(torch.bfloat16) if half else x)
    end(model, optimizer)


def moments_of_half_precision() -> None:
    _of_dtype(torch.bfloat16, half=False)


def moments_of_double_precision() -> None:
    _of_dtype(torch.float64, half=False)


def moments_wider_than_their_weights() -> None:
    _of_dtype(torch.float32, half=True)


def _in_another_order(groups: bool) -> None:
    """An order that is another one at each start, as that of a set of names is."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    named = dict(model.named_parameters())
    weights = [name for name in named if name.endswith("weight")]
    dice = random.Random(os.urandom(8) + bytes([groups]))
    while (order := dice.sample(weights, 4)) in (weights, sorted(weights, reverse=True)):
        pass
    if "KILL" in os.environ or not os.path.exists("ck"):  # noqa: PTH110
        order = weights
    both = [{"params": [named[name] for name in order], "weight_decay": 0.1}]
    both.append({"params": [p for name, p in named.items() if name not in order], "weight_decay": 0.0})
    optimizer, loader = torch.optim.AdamW(both[::-1] if groups and order != weights else both, lr=1e-2), shuffled()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model)
                learn(model, optimizer, x)
    end(model)


def parameters_in_another_order() -> None:
    _in_another_order(groups=False)


def groups_in_another_order() -> None:
    _in_another_order(groups=True)


def critic_that_nothing_tracks() -> None:
    model, optimizer = parts()
    critic, its = parts(0.02)
    loader = shuffled()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, critic=critic, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, critic, optimizer, its)
                learn(critic, its, x)
                learn(model, optimizer, x * (1 + critic(x).detach()))
    end(model, critic, optimizer, its)


def rate_by_hand_in_a_local() -> None:
    model, optimizer = parts(0.05)
    loader, rate = shuffled(), 0.05
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                rate = rate * 0.9
                for group in optimizer.param_groups:
                    group["lr"] = rate
                learn(model, optimizer, x)
    end(model, optimizer)


class Plateau:
    """Lowers the rate of an optimizer where the loss does not fall."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.best, self.bad = optimizer, float("inf"), 0

    def step(self, loss: float) -> None:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        if self.bad == 2:
            self.optimizer.param_groups[0]["lr"] *= 0.5
            self.bad = 0


def scheduler_by_hand() -> None:
    model, optimizer = parts(0.05)
    loader, plateau = shuffled(), Plateau(optimizer)
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                plateau.step(learn(model, optimizer, x))
    end(model, optimizer)


def scheduler_that_nothing_tracks() -> None:
    model, optimizer = parts(0.05)
    loader, schedule = shuffled(), torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                learn(model, optimizer, x)
                schedule.step()
    end(model, optimizer)


def loss_scale_by_hand() -> None:
    model, optimizer = parts()
    loader, scale, good = shuffled(), 8.0, 0
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                learn(model, optimizer, x, 1 + scale / 64)
                good += 1
                if good == 3:
                    scale, good = scale * 1.5, 0
    end(model, optimizer)


def average_in_a_list() -> None:
    model, optimizer = parts()
    average, loader = [one.detach().clone() for one in model.parameters()], shuffled()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer, average)
                learn(model, optimizer, x, 1 + average[0].mean().item())
                for mine, one in zip(average, model.parameters(), strict=True):
                    mine.lerp_(one.detach(), 0.2)
    end(model, optimizer, average)


def average_in_a_list_that_is_made_again() -> None:
    model, optimizer = parts()
    average, loader = [one.detach().clone() for one in model.parameters()], shuffled()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer, average)
                learn(model, optimizer, x, 1 + average[0].mean().item())
                average = [0.8 * a + 0.2 * one.detach() for a, one in zip(average, model.parameters(), strict=True)]
    end(model, optimizer, average)


def velocities_by_hand() -> None:
    model, optimizer = parts()
    extra = torch.nn.Parameter(torch.zeros(4))
    velocity = torch.zeros(4)

    def shifted(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + extra.data,)

    loader = shuffled()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                learn(model, optimizer, *shifted(x))
                velocity.mul_(0.9).add_(x.mean(0), alpha=0.1)
                extra.data -= 0.1 * velocity
    end(model, optimizer)


def weights_changed_by_hand() -> None:
    model, _ = parts()
    loader, velocities = shuffled(), [torch.zeros_like(p) for p in model.parameters()]
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, velocities)
                (model(x) - 1).square().mean().backward()
                for p, velocity in zip(model.parameters(), velocities, strict=True):
                    velocity.mul_(0.9).add_(p.grad)
                    p.data -= 0.05 * velocity
                    p.grad = None
                run.step()
    end(model, velocities)


def weights_changed_by_hand_at_a_hidden_rate() -> None:
    model, _ = parts()
    rates = iter([0.05 * 0.9**step for step in range(STEPS)])
    with checkpoints() as ckpt:
        run = ckpt.track(model=model)
        for step in range(run.global_step, STEPS):
            at(step, model)
            grads = torch.autograd.grad((model(torch.randn(2, 4)) - 1).square().mean(), list(model.parameters()))
            rate = next(rates)
            with torch.no_grad():
                for p, grad in zip(model.parameters(), grads, strict=True):
                    p.add_(grad, alpha=-rate)
            run.step()
    end(model)


def inputs_scaled_by_a_running_mean() -> None:
    mean, count = 0.0, 0

    def scaled(x: torch.Tensor) -> tuple[torch.Tensor]:
        nonlocal mean, count
        count += 1
        mean += (float(x.abs().mean()) - mean) / count
        return (x / mean,)

    by_epochs(scaled)
