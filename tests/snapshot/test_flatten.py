"""Any state tree survives the way into the arena and back."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import random
import re
import sys
import types
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ckpt_engine.errors import FormatError, StateError, UnstorableLeafError
from ckpt_engine.state import layout
from ckpt_engine.state.flatten import Flattener
from ckpt_engine.state.layout import Planner
from ckpt_engine.state.rebuild import Rebuilder
from tests.snapshot.passage import filled_tree, same, through_arena


@pytest.fixture(params=[layout.LEAST_ARRAYS, 1], ids=["entries", "packs"], autouse=True, scope="module")
def least(request: pytest.FixtureRequest) -> Iterator[None]:
    """All of it with an entry for each array, and with small arrays in packs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "LEAST_ARRAYS", request.param)
        yield


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Part:
    n: int
    weight: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int


class Attributes(dict):
    """A dict subclass, as trainers keep hyper-parameters in."""


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    *(
        getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)
    ),  # torch 2.7, 2.8
    torch.bits8,
    torch.bits16,
    torch.uint4,
    torch.int4,
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_every_dtype_and_shape_comes_back_bitwise(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The bits of a tensor come back, for every dense torch dtype."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    back = through_arena({"t": tensor, "other": torch.ones(3)})["t"]
    assert same(tensor, back)


PLAIN = [
    None,
    True,
    3,
    2**80,
    1.5,
    float("nan"),
    float("-inf"),
    -0.0,
    "text",
    "",
    b"",
    b"short",
    b"long" * 100,
    bytearray(b"x" * 99),
    1 + 2j,
    complex(float("nan"), float("inf")),
    Color.RED,
    pathlib.Path("/a/b"),
    pathlib.PurePosixPath("a"),
    datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC),
    datetime.date(2024, 5, 1),
    datetime.time(1, 2, 3),
    datetime.timedelta(days=1, microseconds=5),
    uuid.UUID(int=7),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    range(1, 9, 2),
    slice(None, 4),
    torch.float32,
    torch.device("cuda:1"),
    torch.channels_last,
    torch.strided,
    np.dtype("float32"),
    np.float32(1.1),
    np.int64(-3),
    np.bool_(True),
    np.datetime64("2024-01-01"),
    Point(1, "y"),
    Frozen(2),
    torch.Size([2, 3]),
    {1, 2},
    frozenset({"a"}),
    (1, (2, [3])),
    {},
    [],
    (),
    {1: "int key", (1, "t"): "tuple key", None: 0, False: 1},
    {"$": "looks like a node"},
    collections.OrderedDict(b=1, a=2),
    collections.defaultdict(list, {"a": [1]}),
    collections.Counter("aab"),
    collections.deque([1, 2], maxlen=4),
    Attributes(lr=0.1),
    argparse.Namespace(a=1, b=[2]),
    types.SimpleNamespace(z=None),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda v: f"{type(v).__name__}-{str(v)[:20]}")
def test_plain_python_values_come_back_with_their_type(value: object) -> None:
    """Values that are not arrays come back equal and of the same type, next to tensors and by themselves."""
    assert same(through_arena({"v": value, "t": torch.ones(1)})["v"], value)
    assert same(through_arena(value), value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.array(5.0),
        np.zeros((0, 3)),
        np.array(["ab", "c"]),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.arange(3, dtype=">i4"),
        np.array([1 + 2j], dtype=np.complex128),
        np.array([True, False]),
        np.array([1.5], dtype=np.longdouble),
    ],
    ids=lambda a: f"{a.dtype}-{a.shape}",
)
def test_numpy_arrays_come_back(array: np.ndarray) -> None:
    """Arrays come back with values, shape and (native) dtype, including those torch has no dtype for."""
    back = through_arena({"a": array})["a"]
    assert back.dtype == array.dtype and back.shape == array.shape
    assert np.array_equal(back, array)


def test_random_generators_continue_where_they_were() -> None:
    """A generator stored as an object draws the same numbers after restore."""
    torch_gen, np_gen, py_gen = torch.Generator().manual_seed(3), np.random.default_rng(3), random.Random(3)
    legacy = np.random.RandomState(4)
    back = through_arena({"t": torch_gen, "n": np_gen, "p": py_gen, "l": legacy, "s": random.getstate()})
    assert torch.equal(torch.rand(3, generator=back["t"]), torch.rand(3, generator=torch_gen))
    assert back["n"].random() == np_gen.random()
    assert back["p"].random() == py_gen.random()
    assert back["l"].rand() == legacy.rand()
    assert back["s"] == random.getstate()


def test_omegaconf_keeps_interpolations_and_flags() -> None:
    """An OmegaConf tree comes back unresolved, with its struct flag."""
    config = OmegaConf.create({"a": 1, "b": "${a}", "c": [1, {"d": None}]})
    OmegaConf.set_struct(config, True)
    back = through_arena({"c": config})["c"]
    assert back == config and OmegaConf.is_struct(back)
    assert OmegaConf.to_container(back, resolve=False)["b"] == "${a}"


def test_dataclass_with_tensor_comes_back_without_running_its_constructor() -> None:
    """Dataclasses are rebuilt field by field."""
    back = through_arena({"part": Part(1, torch.arange(3))})["part"]
    assert type(back) is Part and back.n == 1 and torch.equal(back.weight, torch.arange(3))


def test_state_dict_metadata_survives() -> None:
    """Module versions, which torch keeps on an attribute of the state dict, come back."""
    module = torch.nn.BatchNorm1d(3)
    back = through_arena({"model": module.state_dict()})["model"]
    assert back._metadata == module.state_dict()._metadata


def test_tied_weights_are_stored_once_and_tied_again() -> None:
    """Two names of one tensor give one entry, and one tensor after restore."""
    weight = torch.randn(4, 4)
    state = {"a": weight, "b": {"c": weight.detach()}}
    capture = Planner(Flattener()).capture(state)
    assert len(capture.plan.layout.entries) == 1
    back = through_arena(state)
    assert back["a"].data_ptr() == back["b"]["c"].data_ptr() and torch.equal(back["a"], weight)


def test_overlapping_views_share_memory_again() -> None:
    """Views into one storage are stored once and overlap again; disjoint views stay separate."""
    base = torch.arange(10.0)
    back = through_arena({"all": base, "part": base[2:5], "strided": base[::2], "own": torch.zeros(2)})
    back["all"][4] = 99
    assert back["part"][2] == 99 and back["strided"][2] == 99
    halves = {"x": base[:5], "y": base[5:]}
    entries = Planner(Flattener()).capture(halves).plan.layout.entries
    assert len([entry for entry in entries if not entry.name.endswith("schema")]) == 2
    assert same(through_arena(halves), halves)


def test_memory_format_survives() -> None:
    """A channels_last tensor comes back channels_last, so that kernels choose the same path."""
    tensor = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    back = through_arena({"t": tensor})["t"]
    assert back.stride() == tensor.stride() and torch.equal(back, tensor)


def test_parameters_stay_parameters() -> None:
    """A Parameter comes back as one, with its requires_grad."""
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    back = through_arena({"p": frozen})["p"]
    assert isinstance(back, torch.nn.Parameter) and not back.requires_grad


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"model": {"fn": lambda: None}}, "model/fn"),
        ({"a": [1, {"b": object()}]}, "a/1/b"),
        ({"t": torch.eye(3).to_sparse()}, "t"),
        ({"t": torch.empty(2, device="meta")}, "t"),
        ({"flags": re.ASCII | re.DOTALL}, "flags"),
        ({"flags": enum.Flag("Bits", "A B")(0)}, "flags"),
        ({"o": np.array([object()])}, "o"),
        ({"masked": np.ma.masked_array([1.0, 2.0], mask=[True, False])}, "masked"),
        ({"c": collections.defaultdict(lambda: 3)}, "c"),
        ({"k": {object(): 1}}, "k"),
        ({"cls": torch.nn.Linear}, "cls"),
    ],
    ids=lambda v: v if isinstance(v, str) else "state",
)
def test_what_needs_pickle_is_refused_naming_the_leaf(state: dict, where: str) -> None:
    """A leaf that cannot be stored is refused when saving, with its path and a way out."""
    with pytest.raises((UnstorableLeafError, StateError)) as caught:
        Planner(Flattener()).capture(state)
    assert where in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_naming_the_leaf() -> None:
    """Its layout says strided, and it has no sizes that could be asked for."""
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(UnstorableLeafError, match="cannot store tensor at a/t: nested layout"):
        Planner(Flattener()).capture({"a": {"t": nested}})


@pytest.mark.parametrize("given", [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).state_dict], ids=["module", "method"])
def test_a_module_in_the_place_of_its_state_is_named(given: object) -> None:
    """That is so where the call of `state_dict` was forgotten, too."""
    with pytest.raises(UnstorableLeafError, match=r"at model .* → save its state: .* of the Linear"):
        Planner(Flattener()).capture({"model": given})


def test_a_state_that_contains_itself_is_refused() -> None:
    """A cycle is an error, not an endless loop."""
    state: dict = {"a": []}
    state["a"].append(state["a"])
    with pytest.raises(StateError, match="contain itself"):
        Planner(Flattener()).capture(state)


def test_pickle_is_opt_in_per_path_on_both_ends() -> None:
    """An opted-in leaf is pickled; a reader that did not opt in refuses to unpickle it."""
    state = {"extra": {"fn": torch.nn.Linear}, "x": 1}
    assert same(through_arena(state, pickle_paths=("extra/*",)), state)
    with pytest.raises(UnstorableLeafError, match="extra/fn"):
        through_arena(state, pickle_paths=("other/*",))
    capture = Planner(Flattener(("extra/*",))).capture(state)
    with pytest.raises(FormatError, match="opt in"):
        Rebuilder({}).state(filled_tree(capture))


def test_what_was_pickled_and_whose_module_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that has been taken apart since it saved has its classes elsewhere."""
    there = types.ModuleType("there")
    there.Kind = type("Kind", (), {"__module__": "there"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "there", there)
    capture = Planner(Flattener(("kind",))).capture({"kind": there.Kind()})
    monkeypatch.delitem(sys.modules, "there")
    with pytest.raises(FormatError, match="kind was stored with pickle and cannot be made again: ModuleNotFoundError"):
        Rebuilder({}, ("kind",)).state(filled_tree(capture))


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=100),
    st.integers(0, 5).map(lambda n: torch.arange(n, dtype=torch.float32)),
    st.integers(0, 3).map(lambda n: torch.ones(n, 2, dtype=torch.bfloat16)),
)
TREES = st.recursive(
    LEAVES,
    lambda child: st.one_of(
        st.lists(child, max_size=4),
        st.lists(child, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers()), child, max_size=4),
    ),
    max_leaves=20,
)


@given(TREES, TREES)
def test_any_tree_round_trips_and_one_planner_serves_changing_structures(first: object, second: object) -> None:
    """Law: out == in, for random trees, also when one planner sees different structures in turn."""
    planner = Planner(Flattener())
    for state in (first, second, first, {"model": first, "$": second, "": 1}, {"a/b": first, "a": {"b": second}}):
        assert same(through_arena(state, planner), state)
