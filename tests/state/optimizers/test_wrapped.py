"""Tensors of other tensors (low-bit weights, buffers, moments) are resumed bit for bit, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from ckpt_engine import Checkpointer
from ckpt_engine.errors import MismatchError, UnstorableLeafError
from ckpt_engine.state.wrapped import kinds_of, with_made
from tests.loop.conftest import arena_at_once, one_thread
from tests.snapshot.passage import through_arena
from tests.state.optimizers import wrapped
from tests.state.optimizers.runs import Case, assert_exact, plain, resumed, tracked
from tests.state.optimizers.wrapped import (
    Layout,
    LowBit,
    Mode,
    Moments,
    Nested,
    Rounding,
    Scaled,
    Unregistered,
    Wrapper,
    integers,
    nested,
    scaled,
)

__all__ = ["arena_at_once", "one_thread"]

CONTEXT = {"dtype": torch.int8, "layout": Layout((1, 8), Mode.UP), "sizes": torch.Size([8, 8]), 3: (None, 1.5, True)}


def with_weight(make: Callable[[], Wrapper], *, as_parameter: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 8), LowBit(make(), as_parameter), nn.Linear(8, 1))


def last(model: Any) -> Any:
    return torch.optim.AdamW(model[-1].parameters(), lr=1e-2)


def tied() -> nn.Module:
    layer = LowBit(scaled(8), as_parameter=True)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(8, 1))


def of_wrapper(model: Any) -> Any:
    """An optimizer whose state is of the class of its parameter, which only the parameter names."""

    class Plain(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for p in model[1].parameters():
                self.state[p].setdefault(
                    "last",
                    p.detach().__tensor_unflatten__(
                        {"q": p.q.clone(), "scale": p.scale.clone()}, p.context, None, None
                    ),
                ).scale.add_(1)

    optimizer = Plain(model[-1].parameters(), lr=1e-2, momentum=0.9)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    return optimizer


EXACT = {
    "a parameter": Case(last, with_weight(lambda: scaled(8))),
    "a buffer": Case(last, with_weight(lambda: scaled(8), as_parameter=False)),
    "its copy_ rounds": Case(last, with_weight(lambda: scaled(8, Rounding))),
    "one in another": Case(last, with_weight(lambda: nested(8))),
    "a context of plain data": Case(last, with_weight(lambda: scaled(8, context=CONTEXT))),
    "under two names": Case(last, tied),
    "moments": Case(lambda m: Moments(m.parameters(), Scaled)),
    "moments with a context": Case(lambda m: Moments(m.parameters(), Scaled, CONTEXT)),
    "moments of the parameters' class": Case(of_wrapper, with_weight(lambda: scaled(8, Unregistered))),
}


@pytest.mark.cells(3)
@pytest.mark.parametrize("name", EXACT)
def test_tensors_of_other_tensors_are_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    """The process that resumes makes others, and has those of the snapshot afterwards."""
    assert_exact(EXACT[name], tmp_path)


def test_moments_of_a_registered_class_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's own loader may make of a file a snapshot may, too."""
    monkeypatch.setattr(wrapped, "Unregistered", None)
    case = Case(lambda m: Moments(m.parameters(), Unregistered))
    with torch.serialization.safe_globals([Unregistered]):
        assert_exact(case, tmp_path)


def test_moments_that_no_later_process_makes_are_refused_at_the_first_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapped, "Unregistered", None)
    with pytest.raises(UnstorableLeafError, match=r"'optimizer'.*wrapped:Unregistered") as refused:
        tracked(Case(lambda m: Moments(m.parameters(), Unregistered)), tmp_path)
    assert "torch.serialization.add_safe_globals" in str(refused.value)
    assert not list((tmp_path / "run" / "snapshots").glob("*"))


OTHERS = {
    "of another class": (lambda: scaled(8, Rounding), r"model/1\.weight .*wrapped:Scaled in the snapshot"),
    "of another context": (lambda: scaled(8, context=2), r"model/1\.weight .*another context"),
    "of another dtype": (lambda: Scaled(integers(8).float(), torch.rand(8)), r"model/1\.weight .*'q'"),
    "of another shape": (lambda: Scaled(integers(8), torch.rand(1)), r"1\.weight/scale: \[8\] saved, \[1\] here"),
    "with other parts": (lambda: Nested(integers(8), scaled(8)), r"1\.weight/inner/q"),
    "a plain one": (lambda: torch.rand(8, 8), r"1\.weight/q"),
}


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", OTHERS)
def test_another_tensor_at_its_place_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Nothing is made because a snapshot names it."""
    make, why = OTHERS[name]
    tracked(Case(last, with_weight(lambda: scaled(8))), tmp_path)
    with pytest.raises(MismatchError, match=why):
        resumed(Case(last, with_weight(make)), tmp_path)  # type: ignore[arg-type]


class Odd:
    """No plain data."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Odd

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Odd()"


CONTEXTS = {"an object": Odd, "a function": lambda: integers, "in a dict": lambda: {"a": [Odd()]}}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_that_is_no_plain_data_is_refused_with_its_path(name: str, tmp_path: Path) -> None:
    """At the first snapshot; the option `pickle` stores that part of it."""
    case = Case(last, with_weight(lambda: scaled(8, context=CONTEXTS[name]())))
    with pytest.raises(UnstorableLeafError, match=r"model/1\.weight/__tensor_flatten__.* without pickle"):
        tracked(case, tmp_path)


def test_a_part_of_a_context_may_be_pickled(tmp_path: Path) -> None:
    case = Case(last, with_weight(lambda: scaled(8, context={"a": Odd()})))
    options = {"pickle": ["model/1.weight/__tensor_flatten__/a"]}
    assert_exact(case, tmp_path, **options)


class Called(Wrapper):
    """It notes each call that makes one."""

    made: ClassVar[list[Any]] = []

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Wrapper:
        cls.made.append(context)
        return super().__tensor_unflatten__(inner, context, size, stride)


@pytest.mark.parametrize("where", ["model", "optimizer", "extra"])
def test_a_class_that_only_a_snapshot_names_is_never_called(where: str, tmp_path: Path) -> None:
    """It is imported here, and nothing that is live names it."""
    Called.made.clear()
    hostile = scaled(8, Called)
    with Checkpointer(str(tmp_path), writer="thread") as ckpt:
        ckpt.save({where: {"state": {0: {"momentum": hostile}}, "weight": hostile}}, step=1).wait()
    with Checkpointer(str(tmp_path), writer="thread") as ckpt:
        with pytest.raises(MismatchError, match=r"test_wrapped:Called in the snapshot"):
            ckpt.load()
        assert not Called.made


def test_a_state_of_the_users_own_is_filled_in_place(tmp_path: Path) -> None:
    """`load(into=…)` has live tensors for all of it."""
    saved, live = [{"a": [scaled(8, Unregistered, CONTEXT)], "b": nested(8), "n": n} for n in (1, 2)]
    with Checkpointer(str(tmp_path), writer="thread") as ckpt:
        ckpt.save(saved, step=1).wait()
        found = ckpt.load(into=live)
    assert found is not None
    assert found["a"][0] is live["a"][0]
    assert repr(plain(found)) == repr(plain(saved))


def test_a_state_of_the_users_own_has_tensors_of_registered_classes(tmp_path: Path) -> None:
    saved = {"a": nn.Parameter(scaled(8), requires_grad=False), "b": [nested(8), scaled(8).requires_grad_()]}
    with Checkpointer(str(tmp_path), writer="thread") as ckpt, torch.serialization.safe_globals([Scaled, Nested]):
        ckpt.save(saved, step=1).wait()
        found = ckpt.load()
    assert found is not None
    assert repr(plain(found)) == repr(plain(saved))
    assert isinstance(found["a"], nn.Parameter)
    assert (found["a"].requires_grad, found["b"][1].requires_grad) == (False, True)


def test_very_many_of_them_are_packed() -> None:
    state = {"m": {str(n): scaled(2, context=(n, "a")) for n in range(2100)}}
    with torch.serialization.safe_globals([Scaled]):
        found = with_made(through_arena(state), kinds_of())
    assert [(one.context, one.q.tolist(), one.scale.tolist()) for one in found["m"].values()] == [
        (one.context, one.q.tolist(), one.scale.tolist())
        for one in state["m"].values()  # type: ignore[attr-defined]
    ]
