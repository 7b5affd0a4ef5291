"""Optimizers that hold another one, as those of sharpness-aware minimisation do."""

from __future__ import annotations

from typing import Any

import torch


class Sharpness(torch.optim.Optimizer):
    """Climbs along the gradients that are there, runs the closure, and lets its inner optimizer step from below.

    Args:
        shares: the inner one has the same groups and the same state.
        delegates: `state_dict` and `load_state_dict` are those of the inner one.
    """

    def __init__(self, params: Any, *, shares: bool = True, delegates: bool = False) -> None:
        super().__init__(params, {"rho": 0.05, "lr": 1e-2})
        self.base_optimizer = torch.optim.AdamW(self.param_groups if shares else params, lr=1e-2)
        self.delegates = delegates
        if shares:
            self.param_groups = self.base_optimizer.param_groups
            self.state = self.base_optimizer.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        moved = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    moved.append((p, group["rho"] * p.grad / (p.grad.norm() + 1e-12)))
                    p.add_(moved[-1][1])
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p, by in moved:
            p.sub_(by)
        self.base_optimizer.step()
        return loss

    def state_dict(self) -> Any:
        return self.base_optimizer.state_dict() if self.delegates else super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        if self.delegates:
            self.base_optimizer.load_state_dict(state_dict)
        else:
            super().load_state_dict(state_dict)
