"""Whatever the state of an optimizer is made of comes back bit for bit, or its first snapshot is refused."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_engine.errors import UnstorableLeafError
from tests.loop.conftest import arena_at_once, one_thread
from tests.state.optimizers.runs import Case, assert_exact, tracked

__all__ = ["arena_at_once", "one_thread"]

Moments = namedtuple("Moments", "first second")


class Keeps(torch.optim.Optimizer):
    """Plain gradient descent, whose step is scaled by what it keeps of each parameter.

    Args:
        first: makes what it keeps of a parameter, or of the whole optimizer with `key`.
        scale: reads a number out of it, and changes it.
        key: where in `state` it is; None: of each parameter.
    """

    def __init__(
        self, parameters: Any, first: Callable[[torch.Tensor], Any], scale: Callable[[Any], Any], key: Any = None
    ) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.make, self.read, self.key = first, scale, key

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state if self.key is not None else self.state[p]
                key = self.key if self.key is not None else "kept"
                if key not in state:
                    state[key] = self.make(p)
                factor, state[key] = self.read(state[key])
                p.sub_(p.grad * factor * group["lr"])


def keeping(first: Callable[[torch.Tensor], Any], scale: Callable[[Any], Any], key: Any = None) -> Case:
    return Case(lambda model: Keeps(model.parameters(), first, scale, key))


def doubled(tensor: torch.Tensor) -> tuple[float, torch.Tensor]:
    return float(tensor.double().sum()) % 1 + 0.5, (tensor.double() * 1.1 + 1 / 3).to(tensor.dtype)


def flipped(mask: torch.Tensor) -> tuple[float, torch.Tensor]:
    return 1.0 + float(mask.sum()), ~mask


OTHER_DTYPES: dict[str, Case] = {
    "NAdam in bf16": Case(lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2), dtype=torch.bfloat16),
    "NAdam in fp64": Case(lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2), dtype=torch.float64),
    "ASGD in bf16": Case(lambda m: torch.optim.ASGD(m.parameters(), lr=1e-2, t0=1), dtype=torch.bfloat16),
    "ASGD in fp64": Case(lambda m: torch.optim.ASGD(m.parameters(), lr=1e-2, t0=1), dtype=torch.float64),
    "bf16 moments": keeping(lambda p: torch.zeros_like(p, dtype=torch.bfloat16), doubled),
    "fp64 moments": keeping(lambda p: torch.zeros_like(p, dtype=torch.float64), doubled),
    "mask": keeping(lambda p: p > 0, flipped),
    "counts": keeping(
        lambda p: torch.full_like(p, 2**53 - 1, dtype=torch.int64), lambda n: (1 / float(n.sum() % 7 + 1), n + 2)
    ),
    "number": keeping(lambda _: torch.tensor(0.1, dtype=torch.float64), doubled),
    "within a list": keeping(
        lambda p: [torch.zeros((), dtype=torch.float64), p > 0],
        lambda kept: (1.0, [doubled(kept[0])[1], ~kept[1]]),
    ),
    "within a dict": keeping(
        lambda _: {"a": {"b": torch.zeros((), dtype=torch.float64)}},
        lambda kept: (1.0, {"a": {"b": doubled(kept["a"]["b"])[1]}}),
    ),
}


@pytest.mark.cells(3)
@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_a_state_of_another_dtype_than_its_parameter_keeps_its_dtype(name: str, tmp_path: Path) -> None:
    assert_exact(OTHER_DTYPES[name], tmp_path)


def counted(value: Any, factor: float = 1.0) -> tuple[float, Any]:
    return factor, value


OTHER_FORMS: dict[str, Case] = {
    "a tensor under a text": keeping(lambda _: torch.tensor(0.1, dtype=torch.float64), doubled, "k"),
    "a whole number under a text": keeping(lambda _: 0, lambda n: (1 / (n + 1), n + 1), "k"),
    "a list under a text": keeping(lambda _: [0, 0.5], lambda row: (row[1], [row[0] + 1, row[1] / 2]), "seen"),
    "a dict of lists under a text": keeping(
        lambda _: {"a": [torch.zeros(2)]}, lambda d: (float(d["a"][0].sum()) + 1, {"a": [d["a"][0] + 0.25]}), "seen"
    ),
    "a text": keeping(lambda _: "a", lambda text: (1.0 / len(text), text + "b")),
    "a named tuple": keeping(
        lambda p: Moments(torch.zeros_like(p), 0), lambda m: (1 / (m.second + 1), Moments(m.first + 1, m.second + 1))
    ),
    "a deque": keeping(lambda _: deque([1.0], maxlen=3), lambda d: (d[0], deque([*d, d[-1] / 2], maxlen=d.maxlen))),
    "a set": keeping(lambda _: {1}, lambda s: (1 / len(s), s | {len(s) + 1})),
    "an array": keeping(lambda _: np.zeros(3), lambda a: (1 / (1 + float(a.sum())), a + 1)),
    "a numpy scalar": keeping(lambda _: np.float32(0.1), lambda a: (float(a), np.float32(a * np.float32(1.1)))),
    "an ordered dict": keeping(lambda _: OrderedDict(a=1.0), lambda d: (d["a"], OrderedDict(a=d["a"] / 2, b=1))),
}


@pytest.mark.cells(3)
@pytest.mark.parametrize("name", OTHER_FORMS)
def test_a_state_that_is_no_dict_of_tensors_for_each_parameter_comes_back(name: str, tmp_path: Path) -> None:
    assert_exact(OTHER_FORMS[name], tmp_path)


class Projector:
    """An object without a `state_dict`."""


@pytest.mark.parametrize("key", [None, "projector"])
def test_a_state_that_no_snapshot_can_hold_is_refused_at_the_first_one(key: str | None, tmp_path: Path) -> None:
    case = keeping(lambda _: Projector(), counted, key)
    with pytest.raises(UnstorableLeafError, match=r"Projector at optimizer/state/.*(kept|projector)"):
        tracked(case, tmp_path)
    assert not list((tmp_path / "run" / "snapshots").glob("*.json"))


class Around(torch.optim.Optimizer):
    """Steps by another optimizer that has its state, as sharpness-aware ones do; its own is read from there."""

    def __init__(self, parameters: Any, inner: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.base = inner(self.param_groups)
        self.param_groups, self.state = self.base.param_groups, self.base.state

    def step(self, closure: Any = None) -> None:
        self.base.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "inner",
    [
        lambda groups: torch.optim.Adam(groups, lr=1e-2),
        lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
        lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    ],
    ids=["adam", "momentum", "adagrad"],
)
def test_an_optimizer_that_has_the_state_of_another_has_it_after_a_resume(inner: Any, tmp_path: Path) -> None:
    """torch loads into a new dict of the outer one alone: the inner one would begin without its moments."""
    assert_exact(Case(lambda model: Around(model.parameters(), inner)), tmp_path)
