"""Hidden state is found, saved, and put back where the fresh process begins as the saved one did."""

from __future__ import annotations

import collections
import copy
import itertools
import logging
import os
import random
import sys
import textwrap
import types
from collections.abc import Callable
from fractions import Fraction
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ckpt_engine.audit import roots, values
from ckpt_engine.audit.attributes import UsedObject, Variables
from ckpt_engine.audit.audit import Audit, HiddenState
from ckpt_engine.audit.roots import of_modules
from ckpt_engine.audit.values import items_of, reached
from ckpt_engine.loop.capture import Packer, unpack
from ckpt_engine.whose_code import _program


class Net(nn.Module):
    """A model with all kinds of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("transient", torch.zeros(3), persistent=False)
        self.count = 0
        self.name = "net"
        self._private = 1.5
        self.history: list[float] = []
        self.table: dict[str, int] = {}
        self.window: collections.deque[int] = collections.deque(maxlen=4)
        self.seen: set[int] = set()
        self.plain = torch.zeros(2)
        self.weights = [self.layer.weight]
        self.dice = random.Random(1)
        self.numpy_dice = np.random.default_rng(1)
        self.torch_dice = torch.Generator().manual_seed(1)
        self.meter = Meter()
        self.meters = [Meter(), Meter()]
        self.best: float | None = None
        self.size = torch.Size([2])


class Meter:
    """An object of the user."""

    def __init__(self) -> None:
        self.total = 0.0


def through_a_snapshot(rows: dict[str, Any]) -> dict[str, Any]:
    """What a resumed process gets."""
    return unpack(Packer("hidden").pack(rows))[0]


def count(net: Net) -> None:
    net.count += 1


def push(net: Net) -> None:
    net.window.extend([1, 2])


CHANGES: dict[str, Callable[[Net], Any]] = {
    "net.count": count,
    "net._private": lambda net: setattr(net, "_private", 2.5),
    "net.name": lambda net: setattr(net, "name", "other"),
    "net.history": lambda net: net.history.append(0.5),
    "net.table": lambda net: net.table.update(a=1),
    "net.window": push,
    "net.seen": lambda net: net.seen.add(4),
    "net.plain": lambda net: net.plain.add_(1),
    "net.transient": lambda net: net.transient.add_(1),
    "net.dice": lambda net: net.dice.random(),
    "net.numpy_dice": lambda net: net.numpy_dice.random(),
    "net.torch_dice": lambda net: torch.rand(1, generator=net.torch_dice),
    "net.meter.total": lambda net: setattr(net.meter, "total", 3.0),
    "net.meters[1].total": lambda net: setattr(net.meters[1], "total", 3.0),
    "net.best": lambda net: setattr(net, "best", 0.25),
    "net.drop.p": lambda net: setattr(net.drop, "p", 0.5),
    "net.later": lambda net: setattr(net, "later", 7),
}


def value_at(net: Net, path: str) -> Any:
    """The attribute, in a form that compares."""
    found: Any = net
    for name in path.removeprefix("net.").replace("[1]", "").split("."):
        found = getattr(found, name)
        found = found[1] if name == "meters" else found
    if isinstance(found, random.Random):
        return found.getstate()
    if isinstance(found, np.random.Generator):
        return found.bit_generator.state
    if isinstance(found, torch.Generator):
        return found.get_state().tolist()
    return found.tolist() if isinstance(found, torch.Tensor) else found


def begun(net: Any, mode: Any = "auto") -> HiddenState:
    """At the first batch of a process."""
    hidden = HiddenState(mode)
    hidden.note("start", {"net": net})
    hidden.note("batch", {"net": net})
    return hidden


@pytest.mark.parametrize("path", CHANGES)
def test_what_moved_is_found_alone_and_put_back(path: str) -> None:
    """Of all attributes the one that training changes is saved, and a fresh process gets it, three times over."""
    net = Net()
    hidden = begun(net)
    for _ in range(3):
        CHANGES[path](net)
        rows = hidden.state()
        assert list(rows) == [path]
        fresh = Net()
        hidden = begun(fresh)
        hidden.expect(through_a_snapshot(rows))
        restored, missing = hidden.restore("batch")
        assert not missing
        assert [one.detail for one in restored] == [path]
        assert value_at(fresh, path) == value_at(net, path)
        assert list(hidden.state()) == [path]
        net = fresh


class Mute:
    """An object that has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_what_has_no_text_stops_no_look() -> None:
    """An object whose `repr` raises, and an integer of more digits than Python writes: what changes is found."""
    net = Net()
    net.mutes, net.by_mute = {Mute(), 1}, {Mute(): Meter()}
    net.huge, net.half = 10**4400, Fraction(10**4400, 2)
    hidden = begun(net)
    net.count += 1
    net.huge += 1
    rows = hidden.state()
    assert set(rows) == {"net.count", "net.huge"}
    fresh = begun(Net())
    fresh.expect(through_a_snapshot(rows))
    _, (missing,) = fresh.restore("batch")
    assert "net.huge" in missing.name


def test_a_stream_without_a_state_stops_no_look() -> None:
    """The system's own source of chance has none, wherever an object keeps it."""
    net = Net()
    net.dice, net.dices, net.meter.total = random.SystemRandom(), [random.SystemRandom()], random.SystemRandom()  # type: ignore[assignment]
    hidden = begun(net)
    net.count += 1
    assert list(hidden.state()) == ["net.count"]


def test_a_value_without_a_text_that_a_process_begins_with_is_named() -> None:
    """In hexadecimal."""
    net = Net()
    hidden = begun(net)
    net.count += 1
    other = Net()
    other.count = 10**4400
    fresh = begun(other)
    fresh.expect(through_a_snapshot(hidden.state()))
    _, (missing,) = fresh.restore("batch")
    assert "begins with another value (0x" in missing.why


def test_a_key_without_a_text_stops_no_look_at_what_is_used() -> None:
    """Neither in a table that the loop only uses nor in one of its variables."""
    table = {Mute(): Meter()}
    hidden = begun(UsedObject(table))
    next(iter(table.values())).total += 1
    assert list(hidden.state()) == [f"net[{values.type_of(Mute())}].total"]
    assert [one for _, one in reached(["table"], {"table": table})] == list(table.values())


class Shared(nn.Module):
    """Its attributes begin as the same objects, or as views of one memory; or there is nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.was = self.layer.bias.detach()
        self.zero = self.now = torch.zeros(3)
        self.empty = self.window = [0.0, 0.0]
        self.layers = [torch.zeros(3)] * 2
        self.by_name = dict.fromkeys("ab", torch.zeros(3))
        self.arrays = [np.zeros(3), np.zeros(3)]
        self.steered = [torch.zeros(3, requires_grad=True)]
        self.both = torch.zeros(2, 3)
        self.upper = self.both[0]
        self.lazy: torch.Tensor | None = None
        self.other: torch.Tensor | None = None
        self.first = self.dice = random.Random(1)
        self.table: dict[str, torch.Tensor] = {}
        self.frozen = torch.zeros(3, requires_grad=True)
        self.noted = np.zeros(2)


def lazily(net: Shared) -> None:
    if net.lazy is None:
        net.lazy = net.other = torch.zeros(3)
    net.lazy += 1


def in_a_dict_too(net: Shared) -> None:
    if not net.table:
        net.lazy = torch.zeros(3)
        net.table |= {"lazy": net.lazy, "zero": net.zero}
    assert net.lazy is not None
    net.lazy += 1
    net.zero += 1


@torch.no_grad()
def freeze_it(net: Shared) -> None:
    net.frozen.add_(1).requires_grad_(False)


def set_item(items: Any, key: Any) -> None:
    items[key] = items[key] + 1


@torch.no_grad()
def steer(net: Shared) -> None:
    net.steered[0] += 1


REPLACED: dict[str, Callable[[Shared], Any]] = {
    "a view of a weight by a copy": lambda net: setattr(net, "was", net.was + 1),
    "one of two names": lambda net: setattr(net, "now", net.now + 1),
    "a list with two names": lambda net: setattr(net, "window", [*net.window[1:], net.window[1] + 1]),
    "one of a list of the same": lambda net: set_item(net.layers, 1),
    "one of a dict of the same": lambda net: set_item(net.by_name, "a"),
    "a stream with two names": lambda net: setattr(net, "dice", random.Random(2)),
    "within one of two arrays": lambda net: net.arrays[0].__iadd__(1),
    "within one with a gradient": steer,
    "within a view": lambda net: net.upper.add_(1),
    "a view by a copy": lambda net: setattr(net, "upper", net.upper + 1),
    "nothing, by one for two names": lazily,
    "nothing, by one for a name and a key": in_a_dict_too,
    "what requires a gradient by what does not": freeze_it,
    "an array by one of another byte order": lambda net: setattr(net, "noted", (net.noted + 1).astype(">f8")),
}


def all_of(net: Shared) -> dict[str, Any]:
    """Its attributes, in a form that compares."""
    rows = {name: getattr(net, name) for name in vars(Shared()) if name not in vars(nn.Module())}
    rows |= {"dice": net.dice.getstate(), "first": net.first.getstate()}
    rows |= {"order": net.noted.dtype.str}
    return {name: repr(one) for name, one in {**rows, **net.layer.state_dict()}.items()}


@pytest.mark.parametrize("way", REPLACED)
def test_what_training_replaces_is_put_back_beside_what_it_was(way: str) -> None:
    """A tensor of two names, or that is a weight's memory, gets no value that training gave to one of them only."""
    whole, net = Shared(), Shared()
    weights = whole.state_dict()
    net.load_state_dict(weights)
    hidden = begun(net)
    for _ in range(3):
        REPLACED[way](whole)
        REPLACED[way](net)
        fresh = Shared()
        fresh.load_state_dict(weights)
        again = begun(fresh)
        again.expect(through_a_snapshot(hidden.state()))
        assert not again.restore("batch")[1]
        assert all_of(fresh) == all_of(whole)
        net, hidden = fresh, again


def test_the_weight_of_an_old_spectral_norm_is_no_memory_of_its_parameter() -> None:
    """`nn.utils.spectral_norm` begins with one tensor as parameter and attribute, and its first step parts them."""
    nets = [nn.utils.spectral_norm(nn.Linear(3, 3)) for _ in range(2)]
    hidden = begun(nets[0])
    nets[0](torch.ones(1, 3))
    nets[1].load_state_dict(nets[0].state_dict())
    again = begun(nets[1])
    again.expect(through_a_snapshot(hidden.state()))
    assert not again.restore("batch")[1]
    assert torch.equal(*(net.get_parameter("weight_orig") for net in nets))


def test_what_is_the_memory_of_a_weight_is_named() -> None:
    """A copy of it would not follow the weight."""
    net = Shared()
    hidden = begun(net)
    net.lazy = net.layer.weight.detach()
    (row,) = hidden.state().values()
    assert "memory of a weight" in row["why"]


def test_memory_that_a_weight_had_before_is_no_memory_of_it() -> None:
    """Pruning that resets weights gives them other memory, and what is computed next may be where they were."""
    net = Shared()
    hidden = begun(net)
    was = net.layer.weight.data
    net.layer.weight.data = was.clone()
    net.lazy = was
    (row,) = hidden.state().values()
    assert torch.equal(row["value"], was)


def test_a_variable_that_was_another_ones_object_is_named() -> None:
    """Nothing can be assigned to it, and its content may not be written into the other one."""
    processes = []
    for _ in range(2):
        values = {"empty": [0.0]}
        values["window"] = values["empty"]
        hidden = HiddenState("auto")
        hidden.note("batch", {"train()": Variables(values.get, within=frozenset(values))})
        processes.append((values, hidden))
    (values, hidden), (fresh, again) = processes
    values["window"] = [1.0]
    again.expect(through_a_snapshot(hidden.state()))
    restored, (missing,) = again.restore("batch")
    assert not restored
    assert fresh["empty"] == [0.0]
    assert "same object as train().empty" in missing.why


def test_what_a_state_dict_has_is_not_hidden() -> None:
    """Parameters and buffers, also where an attribute refers to them."""
    net = Net()
    hidden = begun(net)
    with torch.no_grad():
        net.layer.weight.add_(1)
        net.kept.add_(1)
    assert hidden.state() == {}


def test_another_beginning_is_left_alone_and_named() -> None:
    """A value that differs from process to process is not overwritten with that of another one."""
    net = Net()
    net.count = 100
    hidden = begun(net)
    net.count = 101
    fresh = Net()
    again = begun(fresh)
    again.expect(through_a_snapshot(hidden.state()))
    restored, missing = again.restore("batch")
    assert not restored
    assert fresh.count == 0
    assert [one.name for one in missing] == ["hidden state net.count"]
    assert "state_dict" in missing[0].why


class Evaluation:
    """As metrics are written: adding in place gives the object the list of its class, which each result empties."""

    seen: list[int] = []  # noqa: RUF012 - that is the case

    def add(self, one: int) -> None:
        self.seen += [one]

    def compute(self) -> float:
        mean, self.seen[:] = sum(self.seen) / len(self.seen), []
        return mean


def test_a_list_of_the_class_is_not_one_of_the_object() -> None:
    """It was there before, and is as empty as then."""
    evaluation = Evaluation()
    hidden = begun(UsedObject(evaluation))
    evaluation.add(1)
    assert evaluation.compute() == 1.0
    assert "seen" in vars(evaluation)
    assert hidden.state() == {}


def test_what_is_already_there_is_neither_restored_nor_named() -> None:
    """A script that sets an attribute for each epoch itself has set it right."""
    net = Net()
    hidden = begun(net)
    net.count = 3
    fresh = Net()
    fresh.count = 3
    again = begun(fresh)
    again.expect(through_a_snapshot(hidden.state()))
    assert again.restore("batch") == ([], [])


def test_what_cannot_be_assigned_is_named() -> None:
    """A layer that was pruned has its weight as a plain tensor, which a layer with a parameter of that name refuses."""
    net = Net()
    hidden = begun(net)
    prune.l1_unstructured(net.layer, "weight", 0.5)
    net.count = 1
    fresh = Net()
    again = begun(fresh)
    again.expect(through_a_snapshot(hidden.state()))
    restored, missing = again.restore("batch")
    named = {one.name: one.why for one in missing}
    assert "it cannot be assigned: cannot assign" in named["hidden state net.layer.weight"]
    assert isinstance(fresh.layer.weight, nn.Parameter) and "net.count" in restored[0].detail


class Stack:
    """An object that cannot be stored."""

    def __init__(self) -> None:
        self.items = iter([1, 2, 3])
        self.other: Any = None
        self.table: dict[Any, int] = {}


def test_what_cannot_be_stored_is_named() -> None:
    """Running iterators, whether they move or not, new objects, and dicts with keys that are objects."""
    stack = Stack()
    hidden = begun(stack)
    stack.other = Stack()
    stack.table[stack] = 1
    rows = through_a_snapshot(hidden.state())
    assert set(rows) == {"net.items", "net.other", "net.table"}
    assert len(hidden.unsaved(rows)) == 3
    assert hidden.unsaved(rows) == []
    again = begun(Stack())
    again.expect(through_a_snapshot(rows))
    _, missing = again.restore("batch")
    assert sorted(one.name for one in missing) == [f"hidden state net.{name}" for name in ("items", "other", "table")]


def test_a_global_count_is_named_once_it_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that nothing asks during training, as the one that numbers objects while they are made, say nothing."""
    text = "import itertools\nnumbers = itertools.count()\ndef number():\n    return next(numbers)\n"
    user_module(tmp_path, monkeypatch, text)
    hidden = HiddenState("auto")
    hidden.note("batch", of_modules())
    assert hidden.state() == {}
    sys.modules["of_a_user"].number()
    rows = hidden.state()
    assert list(rows) == ["of_a_user.numbers"]
    assert "running iterator" in rows["of_a_user.numbers"]["why"]


def test_report_only_names() -> None:
    """With `hidden: report` nothing is stored or restored."""
    net = Net()
    hidden = begun(net, "report")
    net.count += 1
    rows = hidden.state()
    assert "value" not in rows["net.count"]
    fresh = Net()
    again = begun(fresh, "report")
    again.expect(rows)
    _, missing = again.restore("batch")
    assert [one.name for one in missing] == ["hidden state net.count"]
    assert fresh.count == 0


def test_a_flag_that_each_process_sets_is_named_and_not_restored() -> None:
    """It most often says that something is ready in this process. One of a module, or one set later, is restored."""
    meter, net = Meter(), Net()
    hidden = HiddenState("auto")
    for one in (meter, net):
        one.ready, one.late = False, False  # type: ignore[union-attr]
    hidden.note("batch", {"meter": meter, "net": net})
    meter.ready = net.ready = True  # type: ignore[attr-defined, assignment]
    hidden.stepped()
    meter.late = True  # type: ignore[attr-defined]
    rows = hidden.state()
    assert {path for path, row in rows.items() if "value" in row} == {"net.ready", "meter.late"}
    assert "first step" in rows["meter.ready"]["why"]
    assert hidden.unsaved(rows) == []


def test_off_looks_at_nothing() -> None:
    """With `hidden: off` there is nothing in a snapshot."""
    net = Net()
    audit = Audit("off", lambda: {"net": net}, logging.getLogger("test"))
    audit.begin("batch")
    net.count += 1
    assert audit.for_snapshot() == ({"attributes": {}, "locals": [], "inputs": {}}, {})


def test_variables_of_closures_count() -> None:
    """A function that counts its calls is put back."""

    def make() -> Callable[[], int]:
        calls = 0

        def collate() -> int:
            nonlocal calls
            calls += 1
            return calls

        return collate

    collate = make()
    hidden = begun(collate)
    assert (collate(), collate()) == (1, 2)
    fresh = make()
    again = begun(fresh)
    again.expect(through_a_snapshot(hidden.state()))
    again.restore("batch")
    assert fresh() == 3


def test_a_cycle_ends() -> None:
    """Objects that refer to each other are looked at once."""
    first, second = Meter(), Meter()
    first.other = second  # type: ignore[attr-defined]
    second.other = first  # type: ignore[attr-defined]
    hidden = begun(first)
    second.total = 1.0
    assert list(hidden.state()) == ["net.other.total"]


def test_an_object_replaced_by_one_of_its_class_has_moved() -> None:
    """Nothing of the new one is known, so it is named."""
    net = Net()
    hidden = begun(net)
    net.meter = Meter()
    assert list(hidden.state()) == ["net.meter"]


def test_what_may_be_drawn_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first snapshot finds no such data, later ones do not look at every attribute again."""

    class Named:
        def __init__(self) -> None:
            self.name = "loss"

    hidden = HiddenState("auto")
    hidden.note("batch", {"named": Named()})
    assert hidden.inputs({}) == {"batch": {}}
    monkeypatch.setattr(roots, "is_drawn", lambda _: pytest.fail("looked again"))
    assert hidden.inputs({}) == {"batch": {}}


def test_nothing_is_drawn_from_any_stream() -> None:
    """The run is the same with and without the audit."""
    net = Net()
    before = torch.get_rng_state().tolist(), random.getstate(), net.dice.getstate()
    begun(net).state()
    assert (torch.get_rng_state().tolist(), random.getstate(), net.dice.getstate()) == before


def test_large_values_are_sampled() -> None:
    """A long list that grows, and a large tensor that changes everywhere, are seen."""
    net = Net()
    net.history = list(itertools.repeat(0.0, 100_000))
    net.plain = torch.zeros(1 << 20)
    hidden = begun(net)
    net.history.append(1.0)
    net.plain.mul_(2).add_(1)
    assert set(hidden.state()) == {"net.history", "net.plain"}


@pytest.mark.parametrize(
    "table",
    [
        [[0.0] * 500 for _ in range(2000)],
        [[[0] * 60 for _ in range(60)] for _ in range(60)],
        [{str(key): key for key in range(200)} for _ in range(2000)],
        [[[["word"]] * 60] * 60] * 60,
        [set(map(str, range(200)))] * 2000,
        {key: [key] for key in range(20_000)},
    ],
    ids=["rows", "nested", "dicts", "deep", "sets", "keys"],
)
def test_the_work_of_a_look_is_bound(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a data set holds: so many nodes of it are looked at, and a change of all rows is seen."""
    nodes: list[str] = []

    def counted(name: str, look: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (nodes.append(name), look(*args))[1]

    for name in ("freeze", "_is_plain", "tensors_in"):
        monkeypatch.setattr(values, name, counted(name, getattr(values, name)))
    before = values.freeze(table)
    assert len(nodes) < 10_000
    assert values.freeze(copy.deepcopy(table)) == before
    assert values.is_own(table) and not list(values.tensors_in(table))
    assert len(nodes) < 40_000
    for row in table.values() if isinstance(table, dict) else table:
        row.update({"0": -1}) if isinstance(row, dict) else row.add(1) if isinstance(row, set) else row.append(-1)
    assert values.freeze(table) != before


@pytest.mark.parametrize("row", [[0.5, "a", b"b", None, True, 1j] * 10, dict.fromkeys(range(60), -0.0)])
def test_a_row_of_plain_values_compares_as_equal_objects_do(row: Any) -> None:
    """Whichever of its values are one object, in any process; and the sign and class of each counts."""
    other = copy.deepcopy(row)
    key = next(iter(row)) if isinstance(row, dict) else 0
    other[key] = type(row[key])(str(row[key]))
    assert values.freeze([row] * 2) == values.freeze([other] * 2)
    other[key] = abs(row[key]) if isinstance(row, dict) else [0]
    assert values.freeze([row] * 2) != values.freeze([other] * 2)


def test_what_is_ahead_of_training_is_named_and_not_saved() -> None:
    """A loader that reads a batch early has used its dataset's random stream for a step that was not made."""
    net, hidden = Net(), HiddenState("auto")
    hidden.note("batch", {"loader": net})
    net.dice.random()
    row = hidden.state(ahead=["loader"])["loader.dice"]
    assert "reads batches before the step" in row["why"] and "value" not in row
    assert "value" in hidden.state(ahead=["load"])["loader.dice"]


def test_a_class_that_refuses_to_be_asked_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of transformers that stand for classes whose package is not there."""
    user_module(
        tmp_path,
        monkeypatch,
        """
        class Refuses(type):
            def __getattribute__(cls, name):
                if not name.startswith("_"):
                    raise ImportError(name)
                return super().__getattribute__(name)

        class Absent(metaclass=Refuses):
            pass

        count = 0

        def step():
            global count
            count += 1
        """,
    )
    assert of_modules()["of_a_user"].assigned == {"count"}


def test_a_function_that_a_script_makes_in_its_loop_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sets is known before it is made."""
    user_module(
        tmp_path,
        monkeypatch,
        """
        from ckpt_engine.audit.roots import of_modules

        calls = 0
        found = of_modules()["of_a_user"].assigned

        def closure():
            global calls
            calls += 1
        """,
    )
    assert sys.modules["of_a_user"].found == {"calls"}


def test_a_package_that_is_partly_the_users_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a file of its own may lie in many folders."""
    user_module(
        tmp_path, monkeypatch, "count = 0\ndef step():\n    global count\n    count += 1\n", "plugins.of_a_user"
    )
    package = types.ModuleType("plugins")
    package.__path__ = [str(tmp_path), f"{os.sep}site-packages{os.sep}plugins"]
    installed = types.ModuleType("plugins.installed")
    installed.__file__ = f"{os.sep}dist-packages{os.sep}plugins{os.sep}installed.py"
    monkeypatch.setitem(sys.modules, "plugins", package)
    monkeypatch.setitem(sys.modules, "plugins.installed", installed)
    assert [name for name in of_modules() if name.startswith("plugins")] == ["plugins.of_a_user"]


COUNTS = "import torch\ncount = 0\ndef step():\n    global count\n    count += 1\n"


@pytest.mark.parametrize("recorded", [False, True])
def test_what_pip_has_installed_into_a_folder_is_a_library(
    recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target`: the files that its record names, and no others of a project that lies there, too."""
    user_module(tmp_path, monkeypatch, COUNTS, "in_a_folder")
    installed = tmp_path / "of_a_user-1.0.dist-info"
    installed.mkdir()
    (installed / "RECORD").write_text(
        f"of_a_user-1.0.dist-info/METADATA,,\n{'of_a_user' if recorded else 'other'}.py,,\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert ("in_a_folder" in of_modules()) is not recorded


@pytest.mark.parametrize("way", ["module", "command", "other"])
def test_an_installed_package_that_is_the_program_is_the_users(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m package.train`, or a command that the package brings; but no program that only runs others' code."""
    folder = tmp_path / "site-packages" / "mine"
    folder.mkdir(parents=True)
    user_module(folder, monkeypatch, COUNTS, "mine.train")
    user_module(folder, monkeypatch, "" if way == "other" else "import torch", "mine")
    sys.modules["mine"].__file__ = str(folder / "__init__.py")
    main = types.ModuleType("__main__")
    main.__spec__ = ModuleSpec("mine.train", None) if way != "command" else None
    main.__file__ = str(Path(sys.executable).parent / "mine")
    vars(main)["main"] = sys.modules["mine.train"].step
    vars(sys.modules["mine.train"]).pop("torch" if way == "other" else "nothing", None)
    sys.modules["mine.train"].step.__module__ = "mine.train"
    monkeypatch.setitem(sys.modules, "__main__", main)
    _program.cache_clear()
    try:
        assert ("mine.train" in of_modules()) is (way != "other")
    finally:
        _program.cache_clear()


def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str = "of_a_user") -> None:
    """A module that a user has written, imported."""
    file = tmp_path / "of_a_user.py"
    file.write_text(textwrap.dedent(text))
    module = types.ModuleType(name)
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(file.read_text(), str(file), "exec"), vars(module))


def test_a_dict_that_grows_while_it_is_looked_at_does_not_end_the_look() -> None:
    """As another thread may fill it, such as one that reads ahead: here each call of a C function does so."""
    held = {number: object() for number in range(8)}

    def fill(_frame: FrameType, event: str, _argument: object) -> None:
        if event == "c_call":
            held[len(held)] = object()

    sys.setprofile(fill)
    try:
        rows = items_of(held)
    finally:
        sys.setprofile(None)
    assert [key for key, _ in rows][:8] == list(range(8))
