"""A plan is made again only when something about the structure changed."""

from __future__ import annotations

import logging
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_engine.state import flatten
from ckpt_engine.state.flatten import Flattener
from ckpt_engine.state.layout import Planner
from tests.snapshot.passage import same, through_arena


def tied_state() -> dict:
    weight, nothing = torch.ones(4), torch.empty(0, 3)
    return {
        "a": weight,
        "b": weight,
        "logged": torch.tensor(1.0),
        "n": 3,
        "text": b"x" * 100,
        "square": torch.nn.Parameter(torch.arange(4.0).view(2, 2)),
        "none": [nothing, nothing, torch.empty(0, 5)],
    }


def test_new_tensors_in_the_same_places_keep_the_plan() -> None:
    """Tensors that are new objects at every step, tied ones among them, do not cost a new plan."""
    planner = Planner(Flattener())
    first = planner.capture(tied_state())
    keep = [tied_state() for _ in range(5)]  # alive together, so that addresses differ
    assert all(planner.capture(state).plan is first.plan for state in keep)


def test_a_method_that_says_what_is_lazy_keeps_the_plan() -> None:
    """Each read of a bound method is a new object, and asks the same."""
    planner, lazy = Planner(Flattener()), SimpleNamespace(paths=[("a",)])
    first = planner.capture(tied_state(), lazy.paths.__contains__)
    assert planner.capture(tied_state(), lazy.paths.__contains__).plan is first.plan
    assert planner.capture(tied_state(), [].__contains__).plan is not first.plan


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(b=torch.ones(4)),
        lambda s: s.update(logged=s["a"][0]),
        lambda s: s.update(a=torch.ones(5)),
        lambda s: s.update(a=torch.ones(4, dtype=torch.float64)),
        lambda s: s.update(new=1),
        lambda s: s.update(text=b"y" * 101),
        lambda s: s.update(n=[3]),
        lambda s: s.update(logged=torch.tensor(1 + 2j).conj().imag),
        lambda s: setattr(s["square"], "data", s["square"].data.t()),
        lambda s: s["square"].requires_grad_(False),
        lambda s: s.update(none=[s["none"][0], s["none"][2], s["none"][2]]),
        lambda s: s.update(logged=torch.nn.Parameter(torch.tensor(1.0))),
    ],
    ids=[
        *("untied", "tied to a view", "shape", "dtype", "key", "bytes", "kind", "negative view"),
        *("strides of the same memory", "gradient", "one object in other places", "class"),
    ],
)
def test_a_changed_structure_gets_a_new_plan_and_comes_back_right(change) -> None:
    """Sharing, shapes, dtypes, keys and lengths belong to the structure."""
    planner = Planner(Flattener())
    state = tied_state()
    first = planner.capture(state)
    change(state)
    assert planner.capture(state).plan is not first.plan
    assert same(through_arena(state, planner), state)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_whether_gradients_are_counted_does_not_hide_a_change(mode) -> None:
    """A snapshot may be taken in any mode; a parameter that is frozen in it is stored as a frozen one."""
    planner = Planner(Flattener())
    state = {"w": torch.nn.Parameter(torch.ones(4))}
    with mode():
        first = planner.capture(state)
        assert planner.capture(state).plan is first.plan
        state["w"].requires_grad_(False)
        assert planner.capture(state).plan is not first.plan


def test_one_plan_serves_whatever_mode_a_snapshot_is_taken_in() -> None:
    """Planning 10,000 tensors again because a loop has autocast around it would cost it as long as training a step."""
    planner, state = Planner(Flattener()), {"w": torch.nn.Parameter(torch.ones(4)), "t": torch.ones(2, 3)}
    state |= {"bytes": b"x" * 100, "array": np.ones(3)}
    first = planner.capture(state)
    for mode in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.enable_grad()):
        with mode:
            assert planner.capture(state).plan is first.plan
            again = Planner(Flattener())
            inside = again.capture(state)
        assert again.capture(state).plan is inside.plan


@pytest.mark.parametrize("missing", [None, lambda *_, **__: SimpleNamespace(check=lambda *_: True)])
def test_a_torch_that_does_not_tell_of_changes_costs_a_plan_for_each_snapshot(
    missing: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is compared with is not public, and may be gone or tell something else; said once."""
    caplog.set_level(logging.INFO)
    states = [tied_state(), tied_state() | {"a": torch.ones(5)}]
    usual = [Planner(Flattener()).capture(state).plan for state in states]
    monkeypatch.setattr(flatten, "_are_told", cache(flatten._are_told.__wrapped__))
    monkeypatch.setattr(flatten, "TensorGuards", missing)
    planner = Planner(Flattener())
    for state, plan in zip(states, usual, strict=True):
        found = planner.capture(state).plan
        assert planner.capture(state).plan is not found
        assert (found.header, found.layout, found.trees) == (plan.header, plan.layout, plan.trees)
        assert same(through_arena(state, planner), state)
    assert caplog.text.count("does not compare the forms of tensors in one call") == 1, caplog.text


def test_a_small_tensor_of_very_many_that_becomes_a_negative_view_comes_back_right() -> None:
    """Its bytes are not its values, so that it cannot stay in its pack."""
    planner = Planner(Flattener())
    state = {"many": {str(n): torch.tensor(float(n)) for n in range(5000)}}
    assert same(through_arena(state, planner), state)
    state["many"]["7"] = torch.tensor(1 + 2j).conj().imag
    assert same(through_arena(state, planner), state)


def test_tensors_that_get_tied_share_one_entry_afterwards() -> None:
    """Two tensors that become one are stored once from then on."""
    planner = Planner(Flattener())
    state = {"a": torch.ones(4), "b": torch.ones(4)}
    assert len(planner.capture(state).plan.layout.entries) == 2
    state["b"] = state["a"]
    assert len(planner.capture(state).plan.layout.entries) == 1


def test_values_do_not_belong_to_the_structure() -> None:
    """Numbers, texts and flags change without a new plan."""
    planner = Planner(Flattener())
    first = planner.capture({"n": 1, "x": 0.5, "t": None, "w": torch.ones(2)})
    assert planner.capture({"n": 2**70, "x": float("nan"), "t": "text", "w": torch.ones(2)}).plan is first.plan
