"""What the recorder reads at a step: batches and tensors of every layout, at a cost that their size does not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_engine.probe.batch import digest_of
from ckpt_engine.probe.recorder import VERSION, FlightRecorder
from ckpt_engine.probe.repeated_steps import RepeatedSteps
from ckpt_engine.probe.sample import Sampler
from ckpt_engine.store.rows import ProcessRows, Row

STEPS, LATER_STEPS = range(40), range(40, 80)
HUGE = 10**6


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(1).expand(HUGE, HUGE),
        torch.ones(1, dtype=torch.bfloat16).expand(HUGE, HUGE),
        np.broadcast_to(np.ones(1), (HUGE, HUGE)),
    ],
    ids=["tensor", "bfloat16", "array"],
)
def test_a_batch_is_not_copied_to_be_looked_at(batch: Any) -> None:
    """Where elements do not lie one behind another there may be more of them than memory has room for."""
    assert digest_of(batch) == digest_of(batch[:]) != digest_of(batch[1:])


def _layouts() -> dict[str, Any]:
    rows = torch.randn(120, 90, generator=torch.Generator().manual_seed(0))
    return {
        "contiguous": rows,
        "small": rows[:5].clone(),
        "transposed": rows.clone().T,
        "a part": rows.clone()[1:, 3:],
        "needs gradients": rows.clone().requires_grad_().T,
        "bfloat16": rows.bfloat16().T,
        "conjugate": torch.complex(rows, rows).mH,
        "double complex": torch.complex(rows.double(), rows.double()).T,
        "array": rows.numpy().copy(),
        "array by columns": np.asfortranarray(rows.numpy()),
        "part of an array": rows.numpy().copy()[::2, ::-1],
    }


@pytest.mark.parametrize("name", _layouts())
def test_values_in_any_layout_count(name: str) -> None:
    """The same values give the same digest in two processes, and other values another one."""
    batch, same = _layouts()[name], _layouts()[name]
    assert digest_of({"x": batch}) == digest_of({"x": same})
    assert digest_of({"x": batch}) != digest_of({"x": same * 1.5})


@pytest.mark.parametrize("offset", range(1, 8))
def test_where_a_batch_lies_in_memory_does_not_count(offset: int) -> None:
    """The same values give the same digest at any address, also where words are read that begin at odd ones."""
    rows = torch.randint(0, 256, (10_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    moved = torch.empty(10_008, dtype=torch.uint8)[offset : offset + 10_000].copy_(rows)
    assert moved.data_ptr() % 8 == (rows.data_ptr() + offset) % 8
    assert digest_of(moved) == digest_of(rows) != digest_of(rows + 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [([[1], 2], [[1, 2]]), ([[], 1], [[1]]), ([(1,), 2], [[1], 2]), ({"x": [1], "y": 2}, {"x": [1, {"y": 2}]})],
)
def test_how_values_are_nested_counts(one: Any, other: Any) -> None:
    """The same values in other containers are another batch."""
    assert digest_of(one) == digest_of(one) != digest_of(other)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_looked_at_one_by_one() -> None:
    """They have no shape."""
    rows = [torch.ones(2), torch.ones(3)]
    digests = [digest_of([torch.nested.nested_tensor([rows[0], one])]) for one in (rows[1], rows[1], rows[1] + 1)]
    assert digests[0] == digests[1] != digests[2]


def _optimizer() -> torch.optim.Optimizer:
    torch.manual_seed(0)
    shapes = [(64, 32), (7,), (8, 4, 3, 3), (1,), (200,)]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
    for one in parameters:
        one.grad = torch.randn_like(one)
    optimizer.step()
    return optimizer


def _new_data(parameter: Any, known: dict[str, Any]) -> None:
    parameter.data = torch.randn_like(parameter)


def _new_moment(parameter: Any, known: dict[str, Any]) -> None:
    known["exp_avg"] = torch.randn_like(known["exp_avg"])


def _new_data_of_a_moment(parameter: Any, known: dict[str, Any]) -> None:
    known["exp_avg_sq"].data = torch.randn_like(known["exp_avg_sq"])


def _smaller(parameter: Any, known: dict[str, Any]) -> None:
    parameter.data = parameter.data.flatten()[:1].clone()


def _more_moments(parameter: Any, known: dict[str, Any]) -> None:
    known["another"] = torch.randn_like(known["exp_avg"])


def _no_state(parameter: Any, known: dict[str, Any]) -> None:
    known.clear()


def _none(parameter: Any, known: dict[str, Any]) -> None:
    known["exp_avg"] = None


def _sparse(parameter: Any, known: dict[str, Any]) -> None:
    known["exp_avg"] = known["exp_avg"].to_sparse()


def _cut_there(parameter: Any, known: dict[str, Any]) -> None:
    known["exp_avg"] = torch.empty(0).set_(known["exp_avg"].untyped_storage(), 0, (1,))


@pytest.mark.parametrize(
    "change",
    [_new_data, _new_moment, _new_data_of_a_moment, _smaller, _more_moments, _no_state, _none, _sparse, _cut_there],
)
def test_a_tensor_that_is_exchanged_is_followed(change: Callable[[Any, dict[str, Any]], None]) -> None:
    """What is read is what a process reads that has seen nothing else; the old tensor's memory is free at once."""
    optimizer = _optimizer()
    sampler, unchanged = Sampler(optimizer, "optimizer"), Sampler(optimizer, "optimizer")
    for step in STEPS:  # where it reads at the steps behind them is planned now
        sampler.look(step)
    before = [unchanged.look(step) for step in LATER_STEPS]
    kept = [weakref.ref(known["exp_avg"]) for known in optimizer.state.values()]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            change(parameter, optimizer.state[parameter])
    after = [sampler.look(step) for step in LATER_STEPS]
    if change not in (_smaller, _none):  # other words are chosen with other parameters only
        fresh = Sampler(optimizer, "optimizer")
        assert after == [fresh.look(step) for step in LATER_STEPS]
    assert after != before
    replaced = change in (_new_moment, _no_state, _none, _sparse, _cut_there)
    assert all((ref() is None) is replaced for ref in kept)


def test_the_words_are_the_same_in_any_layout_of_memory() -> None:
    """A model in `channels_last` is resumed with moments of the usual layout."""
    one, two = _optimizer(), _optimizer()
    for tensor in (*(p for g in two.param_groups for p in g["params"]), *(k["exp_avg"] for k in two.state.values())):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
    samplers = [Sampler(optimizer, "optimizer") for optimizer in (one, two)]
    for step in STEPS:
        assert samplers[0].look(step) == samplers[1].look(step)


def test_each_tensor_and_all_its_words_are_looked_at_in_time() -> None:
    """A change of any element of a weight or moment is met by some step."""
    optimizer = _optimizer()
    sampler, steps = Sampler(optimizer, "optimizer"), range(1500)
    before = [sampler.look(step) for step in steps]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            known = optimizer.state[parameter]
            for tensor in (parameter.detach(), known["exp_avg"], known["exp_avg_sq"]):
                for element in (tensor.view(-1)[:1], tensor.view(-1)[-1:]):
                    value = element.item()
                    element.fill_(9.0)
                    assert any(sampler.look(step) != before[step] for step in steps), (tensor.shape, element)
                    element.fill_(value)


@pytest.mark.parametrize("version", [None, VERSION - 1, VERSION])
def test_rows_of_another_version_are_not_compared(version: int | None) -> None:
    """Their digests are made otherwise, so that equal steps would seem to differ."""
    recorder = FlightRecorder(dict, dict, None, stops=False)
    try:
        row = Row(1, 1, 1, 0, 0, 0, 0, 0, 0, 0.0, b"")
        about = {key: value for key, value in {**recorder.about, "version": version}.items() if value is not None}
        recorder.expect({"calls": 0, "batch": 0, "world": 1}, 0, [ProcessRows(about, (row,))])
        compared = version == VERSION
        assert ("1 repeated steps" in recorder.proof.replay.why) is compared
        assert (recorder.proof.replay.why == "no earlier process has left a record") is not compared
    finally:
        recorder.close()


@pytest.mark.parametrize(
    ("plan", "words", "result"),
    [(1, b"same", "exact"), (2, b"same", "not compared"), (2, b"else", "not compared"), (1, b"else", "different")],
)
def test_weights_that_are_read_by_another_plan_are_not_called_equal(plan: int, words: bytes, result: str) -> None:
    """Their words are those of other tensors: neither equal nor different says anything."""
    steps = RepeatedSteps({1: Row(1, 1, 1, 0, 1, 0, 0, 0, 0, 0.0, b"same")}, {}, {}, lambda _: [])
    assert steps.compare(Row(1, 1, 1, 0, plan, 0, 0, 0, 0, 0.0, words))
    assert steps.replay.result == result
