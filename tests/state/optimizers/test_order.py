"""Each parameter gets its own state back, in whatever order a script gives them to its optimizer; or the resume is
refused, by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.errors import MismatchError
from tests.loop.conftest import arena_at_once, one_thread
from tests.state.optimizers.runs import Case, assert_exact, resumed, tracked

__all__ = ["arena_at_once", "one_thread"]


def deep(*shapes: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, one) for one in shapes])


def grouped(order: int, *, by_group: bool = False, other: bool = False) -> Callable[[nn.Module], Any]:
    """Weights with decay and biases without, each in an order of its own."""

    def make(model: nn.Module) -> Any:
        dice = random.Random(order)
        named = dict(model.named_parameters())
        decay = [name for name in named if name.endswith("weight")]
        dice.shuffle(decay)
        groups = [
            {"params": [named[name] for name in decay], "weight_decay": 0.1},
            {"params": [p for name, p in named.items() if name not in decay], "weight_decay": 0.0, "lr": 3e-3},
        ]
        if other:
            groups[1]["params"].append(groups[0]["params"].pop())  # type: ignore[attr-defined]
        return torch.optim.AdamW(groups[::-1] if by_group else groups, lr=1e-2, foreach=False)

    return make


def shuffled(kind: Any, **options: Any) -> Callable[[int], Callable[[nn.Module], Any]]:
    def ordered(order: int) -> Callable[[nn.Module], Any]:
        def make(model: nn.Module) -> Any:
            parameters = list(model.parameters())
            random.Random(order).shuffle(parameters)
            return kind(parameters, **options)

        return make

    return ordered


class Parts(nn.Module):
    """Its layers are made in the order of a set."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        states = {name: nn.Linear(8, 8).state_dict() for name in "abc"}
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
        for name, layer in self.layers.items():
            layer.load_state_dict(states[name])
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        for name in "abc":
            x = self.layers[name](x)
        return self.last(x)


def lbfgs_step(optimizer: Any, closure: Any) -> Any:
    return optimizer.step(closure)


def six() -> nn.Module:
    return deep(8, 8, 8, 1)


SAME = {
    "same shapes": (Case(grouped(1), six), Case(grouped(2), six)),
    "groups in another order": (Case(grouped(1), six), Case(grouped(1, by_group=True), six)),
    "groups and members": (Case(grouped(1), six), Case(grouped(5, by_group=True), six)),
    "one group": (Case(shuffled(torch.optim.Adam)(1), six), Case(shuffled(torch.optim.Adam)(2), six)),
    "several at once": (
        Case(shuffled(torch.optim.SGD, momentum=0.9, lr=1e-2, foreach=True)(1), six),
        Case(shuffled(torch.optim.SGD, momentum=0.9, lr=1e-2, foreach=True)(2), six),
    ),
    "layers in another order": (
        Case(model=lambda: Parts(["a", "b", "c"])),
        Case(model=lambda: Parts(["c", "a", "b"])),
    ),
    "state of all parameters in one row": (
        Case(shuffled(torch.optim.LBFGS, lr=0.1, max_iter=3)(1), six, step=lbfgs_step),
        Case(shuffled(torch.optim.LBFGS, lr=0.1, max_iter=3)(2), six, step=lbfgs_step),
    ),
}


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", SAME)
def test_parameters_in_another_order_get_their_own_state(name: str, tmp_path: Path) -> None:
    """The uninterrupted run goes through them in the order in which it began."""
    first, then = SAME[name]
    notes = assert_exact(first, tmp_path, then)
    assert [note for note in notes if note.startswith("optimizer: the script gives its parameters in another order")]


def test_parameters_in_the_same_order_are_no_note(tmp_path: Path) -> None:
    assert not [note for note in assert_exact(Case(), tmp_path) if "order" in note]


class Outside(nn.Module):
    """The model of a loss whose two scales are parameters of the script, in no tracked model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)
        self.hidden = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * self.hidden[0] + self.hidden[1]


def with_hidden(order: int) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        parameters = [*model.inner.parameters(), *model.hidden]
        return torch.optim.Adam(parameters if order == 0 else parameters[::-1], lr=1e-2)

    return make


OTHER = {
    "in another group": (
        Case(grouped(1), six),
        Case(grouped(1, other=True), six),
        r"another group .* model\.\d\.weight",
    ),
    "fewer": (
        Case(model=six),
        Case(lambda m: torch.optim.AdamW(list(m.parameters())[2:], lr=1e-2), six),
        r"other parameters .*only saved: model\.0\.bias, model\.0\.weight",
    ),
    "others, as many": (
        Case(lambda m: torch.optim.AdamW(list(m.parameters())[2:4], lr=1e-2), six),
        Case(lambda m: torch.optim.AdamW(list(m.parameters())[:2], lr=1e-2), six),
        r"only saved: model\.1\.bias.*only here: model\.0\.bias",
    ),
    "one more group": (
        Case(model=six),
        Case(lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()], lr=1e-2), six),
        r"another group",
    ),
    "several without a name": (Case(with_hidden(0), Outside), Case(with_hidden(1), Outside), r"no name.*\[1\]"),
}


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", OTHER)
def test_an_optimizer_of_other_parameters_is_refused_by_name(name: str, tmp_path: Path) -> None:
    first, then, why = OTHER[name]
    tracked(first, tmp_path)
    with pytest.raises(MismatchError, match=why):
        resumed(then, tmp_path)
