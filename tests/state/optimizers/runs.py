"""A small tracked run with an optimizer of any kind, and the same run resumed from its middle under another seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer
from tests.loop.runs import durable, every_boundary, resume_only
from tests.restore.memory_tier.lives import until
from tests.support.digests import digest, seed_everything
from tests.support.snapshots import only, saved

EPOCHS, BATCH, SAMPLES = 2, 4, 16
EVERY = 5
"""Steps between snapshots: one in the middle of the second epoch."""
Step = Callable[[Any, Callable[[], torch.Tensor]], Any]


def plain_step(optimizer: Any, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
    """How most optimizers are used."""
    loss = closure()
    optimizer.step()
    return loss


@dataclass(frozen=True)
class Case:
    """How a run is made.

    Args:
        optimizer: makes the optimizer of a model.
        model: makes the model.
        dtype: of the parameters.
        width: of the data.
        step: one step of the optimizer.
        second_order: gradients of gradients are needed.
        eager: a first batch goes through the model before anything is made of it.
    """

    optimizer: Callable[[nn.Module], Any] = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    model: Callable[[], nn.Module] | None = None
    dtype: torch.dtype = torch.float32
    width: int = 8
    step: Step = plain_step
    second_order: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a run did and where it ended."""

    losses: list[str]
    end: dict[str, str]
    ckpt: Checkpointer | None = None


def train(case: Case, options: Mapping[str, Any] | None, seed: int = 0) -> Outcome:
    """One process of a run; without options it is not tracked."""
    seed_everything(seed)
    width, dtype = case.width, case.dtype
    make = case.model or (lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)))
    model = make().to(dtype)
    optimizer = case.optimizer(model)
    managed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter in model.parameters():
        if id(parameter) not in managed:
            parameter.requires_grad_(False)
    objects = {"model": model, "optimizer": optimizer}
    schedule: Any = None
    with suppress(Exception):  # an optimizer that takes no schedule
        schedule = objects["schedule"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    x = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH, shuffle=True)
    ckpt = None if options is None else Checkpointer(options)
    run = None if ckpt is None else ckpt.track(**objects, loader=loader)
    losses = []
    for _ in range(run.epoch if run is not None else 0, EPOCHS):
        for a, b in loader:
            durable(ckpt)
            if ckpt is not None:  # else the snapshot that is due is skipped as long as memory is made ready
                until(ckpt.engine.ready, lambda: "no snapshot could be taken")

            def closure(a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
                loss = ((model(a.to(dtype)) - b.to(dtype)) ** 2).mean()
                optimizer.zero_grad()
                loss.backward(create_graph=case.second_order)
                return loss

            if hasattr(optimizer, "train"):
                optimizer.train()
            loss = case.step(optimizer, closure)
            if schedule is not None:
                schedule.step()
            losses.append(float(0.0 if loss is None else loss.detach()).hex())
    end = digest(weights=plain(model.state_dict()), optimizer=plain(by_name(model, optimizer)))
    if ckpt is not None:
        ckpt.close()
    return Outcome(losses, end, ckpt)


def by_name(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The state of an optimizer by the names of parameters, in whatever order it has them; and its groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    state = {
        names.get(id(key), "") if isinstance(key, torch.Tensor) else str(key): one
        for key, one in optimizer.state.items()
    }
    groups = [
        {**group, "params": sorted(names.get(id(p), "") for p in group["params"])} for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}


def plain(value: Any) -> Any:
    """A state with the class and dtype of each leaf, as `digest` takes it."""
    if nn.parameter.is_lazy(value):
        return "lazy"
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):
            inner, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
            return [type(value).__name__, repr(context), [plain(getattr(value, name)) for name in inner]]
        flat = value.detach().contiguous()
        return [str(flat.dtype), tuple(flat.shape), flat.reshape(-1).view(torch.uint8)]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, [plain(one) for one in value]]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return [type(value).__name__, repr(value) if isinstance(value, bool | int | float | str) or value is None else ""]


def tracked(case: Case, folder: Path, **options: Any) -> Outcome:
    """The run with a snapshot in its middle."""
    return train(case, every_boundary(folder / "run", every_n_steps=EVERY, **options))


def resumed(case: Case, folder: Path, seed: int = 1234, **options: Any) -> tuple[Outcome, list[str], list[str]]:
    """The run from that snapshot on, and what its report says was not restored, and notes."""
    (snapshot,) = [one for one in saved(folder / "run") if one.step == EVERY]
    target = only(folder / "run", snapshot, folder / f"resumed-{seed}")
    outcome = train(case, resume_only(target, **options), seed)
    report = json.loads((target / "resume-report.json").read_text())
    return outcome, [f"{row['name']}: {row['why']}" for row in report["not_restored"]], report["notes"]


def assert_exact(case: Case, folder: Path, changed: Case | None = None, **options: Any) -> list[str]:
    """The resumed run is the uninterrupted one, bit for bit, and its report names nothing; the report's notes.

    Args:
        changed: how the resumed process makes its objects, where that differs.
    """
    wanted = train(case, None)
    watched = tracked(case, folder, **options)
    assert (watched.losses, watched.end) == (wanted.losses, wanted.end), "tracking changed the run"
    found, lost, notes = resumed(changed or case, folder, **options)
    assert found.losses == wanted.losses[EVERY:]
    assert found.end == wanted.end
    assert lost == []
    return notes
