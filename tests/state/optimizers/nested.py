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


class Slow(torch.optim.Optimizer):
    """Steps with its inner optimizer, and pulls the weights to slower ones of its own."""

    def __init__(self, params: Any) -> None:
        self.optimizer = torch.optim.Adam(params, lr=1e-2)
        super().__init__(self.optimizer.param_groups, {})
        self.param_groups = self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                p.copy_(slow.lerp_(p, 0.5))
        return loss

    def state_dict(self) -> Any:
        return {"slow": super().state_dict(), "fast": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["slow"])
        self.optimizer.load_state_dict(state_dict["fast"])
        self.optimizer.param_groups = self.param_groups


class Beside(torch.optim.SGD):
    """Keeps what it needs in an attribute of its own.

    Args:
        key: of a parameter there.
        reads: `load_state_dict` makes that attribute again.
    """

    def __init__(self, params: Any, key: Any, *, reads: bool = False) -> None:
        super().__init__(params, lr=1e-2)
        self.key, self.reads = key, reads
        self.beside: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            seen = self.beside.setdefault(self.key(p), torch.zeros(()))
            p.mul_(1 - 1e-3 * seen.add_(1))

    def state_dict(self) -> Any:
        found: Any = super().state_dict()
        if self.reads:
            parameters = self.param_groups[0]["params"]
            found["beside"] = [self.beside[self.key(p)].clone() for p in parameters if self.key(p) in self.beside]
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        parameters = self.param_groups[0]["params"]
        self.beside = {
            self.key(p): one.clone() for p, one in zip(parameters, state_dict.get("beside", ()), strict=False)
        }
