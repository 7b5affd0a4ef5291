"""`ckpt diff`: the places where two snapshots differ, and no others."""

from __future__ import annotations

import collections
import copy
import functools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_engine import Checkpointer
from ckpt_engine.data import rng
from ckpt_engine.loop.capture import Packer
from ckpt_engine.restore import ask_tiers
from tests.interop.training import Loop

Ckpt = Callable[..., Any]


def _save(root: Path, *states: Any) -> None:
    with Checkpointer(root, writer="thread", keep={"last": 9}) as checkpointer:
        for step, state in enumerate(states):
            checkpointer.save(state, step=step).wait(60)


def _state() -> dict[str, Any]:
    return {
        **Loop().trained(2).state(),
        "array": np.arange(12.0).reshape(3, 4),
        "nan": float("nan"),
        "numbers": [1, 2, 3],
        "nested": [{"a": (1, torch.zeros(2))}, b"x" * 100],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0),
    }


def test_equal_snapshots_have_no_difference_and_their_tensors_are_not_read(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests are enough, for two runs too; not a number is equal to itself."""
    _save(tmp_path / "a", _state())
    _save(tmp_path / "b", _state(), _state())
    monkeypatch.setattr(ask_tiers.Sources, "read", None)
    result = ckpt("diff", tmp_path / "a", f"{tmp_path / 'b'}#0")
    assert result.code == 0, result.err
    assert "are equal, bit for bit" in result.out
    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--json").json
    assert found["differences"] == []
    assert found["compared"] > 20


@pytest.mark.parametrize("rank", [None, "1"])
def test_times_that_a_run_measured_are_no_difference(ckpt: Ckpt, tmp_path: Path, rank: str | None) -> None:
    """Else no two equal runs would ever be equal; whatever else adapters, and each rank, keep counts."""
    for name, draws, stall in (("a", 1, 0.1), ("b", 1, 0.2), ("c", 2, 0.1)):
        packed = Packer("ckpt_engine").pack(
            {"draws": draws, "cadence": {"stall_seconds": stall, "interval_steps": 1 / stall}}
        )
        ours = {"ckpt_engine": {"packed": packed}}
        _save(tmp_path / name, {"model": torch.ones(2), **(ours if rank is None else {"ranks": {rank: ours}})})
    equal = ckpt("diff", tmp_path / "a", tmp_path / "b")
    assert (equal.code, "are equal, bit for bit" in equal.out) == (0, True), equal.out
    other = ckpt("diff", tmp_path / "a", tmp_path / "c", "--json")
    assert other.code == 1
    assert [one["path"].removeprefix(f"ranks/{rank}/") for one in other.json["differences"]] == ["ckpt_engine/draws"]


def test_each_difference_has_its_place_count_first_index_and_size(ckpt: Ckpt, tmp_path: Path) -> None:
    """Tensors of all kinds, values, forms, and what only one of them has."""
    a = _state()
    a["model"]["0.weight"].fill_(0.25)
    b = copy.deepcopy(a)
    b["model"]["0.weight"][1, 2] += 0.5
    b["model"]["0.weight"][3, 0] -= 1.0
    b["array"][2, 1] = -1
    b["half"][1] = -0.0
    b["numbers"] = [1, 2, 4]
    b["nested"][0]["a"] = (1, torch.zeros(3))
    b["nested"][1] = b"x" * 99 + b"y"
    b["step"] = True
    b["more"] = 1
    del b["nan"]
    _save(tmp_path / "run", a, b)
    result = ckpt("diff", f"{tmp_path / 'run'}#step=0", f"{tmp_path / 'run'}#latest", "--json")
    assert result.code == 1
    found = {one["path"]: one for one in result.json["differences"]}
    assert set(found) == {
        "model/0.weight",
        "array",
        "half",
        "numbers/2",
        "nested/0/a/1",
        "nested/1",
        "step",
        "more",
        "nan",
    }
    weight = found["model/0.weight"]
    assert (weight["kind"], weight["differing"], weight["elements"], weight["index"]) == ("tensor", 2, 32, [1, 2])
    assert weight["max_abs"] == 1.0
    assert weight["relative"] == pytest.approx(math.hypot(0.5, 1.0) / (0.25 * math.sqrt(32)))
    assert (weight["nan"], weight["inf"], weight["nbytes"], weight["stored"]) == ([0, 0], [0, 0], 128, [128, 128])
    assert (found["array"]["a"], found["array"]["b"], found["array"]["index"]) == ("9", "-1", [2, 1])
    assert (found["nested/0/a/1"]["a"], found["nested/0/a/1"]["b"]) == ("float32 [2]", "float32 [3]")
    assert found["nested/1"]["index"] == [99]
    assert (found["step"]["a"], found["step"]["b"]) == ("2", "True")
    assert (found["more"]["kind"], found["nan"]["a"]) == ("missing", "only in the first")
    text = ckpt("diff", f"{tmp_path / 'run'}#0", tmp_path / "run").out
    assert "model/0.weight: 2 of 32 elements differ, the first at [1, 2]: " in text
    assert text.splitlines()[-1].startswith("9 differences between 00000001-")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64", "float8_e5m2"])
def test_what_is_no_finite_number_is_counted(ckpt: Ckpt, tmp_path: Path, dtype: str) -> None:
    """Numbers that are not finite are counted in both snapshots, and have no size of the difference."""
    values = [[1.0, math.nan, 2.0, math.inf], [1.0, math.nan, math.nan, -math.inf]]
    _save(tmp_path / "run", *({"w": torch.tensor(row).to(getattr(torch, dtype))} for row in values))
    common = ("diff", f"{tmp_path / 'run'}#0", tmp_path / "run")
    (found,) = ckpt(*common, "--json").json["differences"]
    assert (found["nan"], found["inf"], found["max_abs"], found["relative"]) == ([1, 2], [1, 1], None, None)
    assert ", 1 and 2 NaN, 1 and 1 Inf" in ckpt(*common).out


def test_it_says_whose_data_each_snapshot_needs_and_what_they_share(ckpt: Ckpt, tmp_path: Path) -> None:
    """A frozen tensor lies there once, of a table the changed rows, and another run shares nothing."""
    table, frozen = torch.randn(20_000, 16), torch.randn(300_000)
    later = table.clone()
    later[7::100] += 1
    states = [{"table": table, "frozen": frozen}, {"table": later, "frozen": frozen}]
    _save(tmp_path / "run", *states)
    _save(tmp_path / "other", states[1])
    common = ("diff", f"{tmp_path / 'run'}#0", tmp_path / "run")
    found = ckpt(*common, "--json").json
    first, second = found["a"], found["b"]
    stored = found["stored"]
    assert stored["shared_bytes"] == stored["a"]["stored_bytes"] == table.nbytes + frozen.nbytes
    assert stored["a"]["written_by"] == {first: table.nbytes + frozen.nbytes}
    assert stored["b"]["written_by"][first] == table.nbytes + frozen.nbytes
    assert stored["b"]["written_by"][second] < 0.02 * table.nbytes
    (difference,) = found["differences"]
    assert difference["stored"][1] == stored["b"]["written_by"][second] < difference["nbytes"] == table.nbytes
    text = ckpt(*common).out
    assert "of 1.3 MB" in text and f"2.5 MB by {first}, " in text and "2.5 MB of it is the same data" in text
    other = ckpt("diff", tmp_path / "run", tmp_path / "other")
    assert other.code == 0
    apart = ckpt("diff", tmp_path / "run", tmp_path / "other", "--json").json
    assert apart["stored"]["shared_bytes"] == 0


def test_random_streams_and_positions_that_adapters_pack_are_compared_by_name(ckpt: Ckpt, tmp_path: Path) -> None:
    """The packed part is one tensor; its difference would say nothing."""
    packer = Packer("ckpt_engine")
    states = []
    for extra in (0, 1):
        torch.manual_seed(1)
        np.random.seed(1)
        np.random.standard_normal(extra)
        tree = {"rng": rng.capture_host(), "loaders": [{"batches": 3 + extra}]}
        states.append({"a": 1, "ckpt_engine": {"version": 1, "packed": packer.pack(tree)}})
    _save(tmp_path / "run", *states)
    found = ckpt("diff", f"{tmp_path / 'run'}#0", tmp_path / "run", "--json").json["differences"]
    paths = [one["path"] for one in found]
    assert "ckpt_engine/loaders/0/batches" in paths
    assert any(path.startswith("ckpt_engine/rng/numpy/") for path in paths)
    assert not any("rng/torch" in path or "packed" in path for path in paths)


Row = collections.namedtuple("Row", "x y")
HOLDING: dict[str, Callable[[Any], Any]] = {
    "namedtuple": lambda x: Row(x, 1),
    "deque": lambda x: collections.deque([x, x], maxlen=3),
    "deque of namedtuples": lambda x: collections.deque([Row(1, 2), Row(x, 1)]),
    "behind plain values": lambda x: [1, 2, 3, 4, x],
    "tuple in a list": lambda x: [(1, 2), (x, 3)],
    "dataclass": lambda x: SimpleNamespace(x=x),
}
HELD: dict[str, Callable[[int], Any]] = {
    "array": lambda number: np.array([1.0, number]),
    "tensor": lambda number: torch.tensor([1.0, number]),
    "texts": lambda number: np.array(["a", str(number)]),
    "days": lambda number: np.array([f"2026-01-0{number}", "2026-01-09"], dtype="datetime64[D]"),
}


@pytest.mark.cells(3)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("holding", HOLDING)
def test_arrays_in_containers_of_any_kind_are_compared_one_by_one(
    ckpt: Ckpt, tmp_path: Path, holding: str, packed: bool
) -> None:
    """What holds them has no truth value as a whole; what a container has in place of an array is a difference too."""
    packer = Packer("ckpt_engine")
    states = []
    for number in (1, 2, 1):
        tree = {name: HOLDING[holding](make(number)) for name, make in HELD.items()}
        tree |= {"same": HOLDING[holding](np.zeros(2)), "other": [1, number if number == 1 else np.zeros(2)]}
        states.append({"a": 1, "ckpt_engine": {"packed": packer.pack(tree)}} if packed else tree)
    _save(tmp_path / "run", *states)
    found = ckpt("diff", f"{tmp_path / 'run'}#0", f"{tmp_path / 'run'}#1", "--json")
    assert found.code == 1, found.err
    paths = {one["path"].removeprefix("ckpt_engine/").partition("/")[0] for one in found.json["differences"]}
    assert paths == {*HELD, "other"}
    assert ckpt("diff", f"{tmp_path / 'run'}#0", f"{tmp_path / 'run'}#2").code == 0


def test_generators_are_compared_by_where_their_streams_are(ckpt: Ckpt, tmp_path: Path) -> None:
    """Two objects that draw the same numbers are equal; a drawn number is a difference, and it says where."""

    def streams() -> dict[str, Any]:
        return {
            "python": random.Random(1),
            "numpy": np.random.default_rng(1),
            "old": np.random.RandomState(1),
            "torch": torch.Generator().manual_seed(1),
        }

    drawn = streams()
    drawn["python"].random(), drawn["numpy"].random(), drawn["old"].random(), torch.rand(1, generator=drawn["torch"])
    _save(tmp_path / "run", streams())
    _save(tmp_path / "other", streams(), drawn)
    assert ckpt("diff", f"{tmp_path}/run#0", f"{tmp_path}/other#0").code == 0
    result = ckpt("diff", f"{tmp_path}/run#0", f"{tmp_path}/other#1")
    assert result.code == 1
    assert {line.split("/")[0] for line in result.out.splitlines() if "/state" in line} == set(streams())


def test_pickled_values_are_compared_by_their_bytes(ckpt: Ckpt, tmp_path: Path) -> None:
    """Nothing is unpickled, and the comparison goes on behind them."""
    for name, number in (("a", 3), ("b", 7)):
        with Checkpointer(tmp_path / name, writer="thread", pickle=["odd*"]) as checkpointer:
            odd = [functools.partial(max, 1), functools.partial(max, number)]
            checkpointer.save({"odd": odd, "rest": number}, step=0).wait(60)
    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--json").json["differences"]
    assert [one["path"] for one in found] == ["odd/1", "rest"]
    assert found[0]["a"] != found[0]["b"]
    assert found[0]["a"].startswith("pickled ")


def test_the_counters_of_a_transformers_trainer_are_compared_one_by_one(ckpt: Ckpt, tmp_path: Path) -> None:
    """They are one text in a snapshot; how long training took is no difference."""
    for name, loss, seconds in (("a", 0.5, 1.0), ("b", 0.25, 2.0)):
        history = [{"loss": loss, "train_runtime": seconds, "train_steps_per_second": 1 / seconds}]
        state = json.dumps({"epoch": 1.0, "log_history": history})
        _save(tmp_path / name, {"ckpt_engine": {"surroundings": {"state": state}}})
    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--json").json["differences"]
    assert [one["path"] for one in found] == ["ckpt_engine/surroundings/state/log_history/0/loss"]


def test_many_differences_are_cut_unless_all_are_asked_for(ckpt: Ckpt, tmp_path: Path) -> None:
    """A terminal is not flooded."""
    _save(tmp_path / "run", {str(i): i for i in range(50)}, {str(i): -i - 1 for i in range(50)})
    common = ("diff", f"{tmp_path / 'run'}#0", tmp_path / "run")
    assert len(ckpt(*common).out.splitlines()) == 21
    assert "30 of them not shown" in ckpt(*common).out
    assert len(ckpt(*common, "--all").out.splitlines()) == 51


def test_a_state_that_is_no_dict_and_tied_tensors(ckpt: Ckpt, tmp_path: Path) -> None:
    """Names of entries do not matter, only what the state holds."""
    one = torch.arange(4.0)
    _save(tmp_path / "tied", [one, one])
    _save(tmp_path / "apart", [one, one.clone()])
    assert ckpt("diff", tmp_path / "tied", tmp_path / "apart").code == 0
    _save(tmp_path / "other", [one, one + 1])
    assert "1: 4 of 4 elements differ" in ckpt("diff", tmp_path / "tied", tmp_path / "other").out


_LEAVES = st.one_of(
    st.integers(-3, 3),
    st.floats(allow_nan=True, width=32),
    st.text(max_size=3),
    st.none(),
    st.booleans(),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=4).map(torch.tensor),
)
_TREES = st.dictionaries(
    st.text("abc", min_size=1, max_size=2),
    st.recursive(_LEAVES, lambda t: st.lists(t, max_size=3) | st.dictionaries(st.sampled_from("xyz"), t, max_size=3)),
    max_size=4,
)


@pytest.mark.long
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(a=_TREES, b=_TREES)
def test_there_is_a_difference_if_and_only_if_the_states_differ(
    tmp_path_factory: pytest.TempPathFactory, a: Any, b: Any
) -> None:
    """The difference is the same in both directions."""
    from ckpt_engine.cli.diff import _snapshot
    from ckpt_engine.tools.compare import Comparison

    folder = tmp_path_factory.mktemp("diff")
    _save(folder / "run", a, copy.deepcopy(a), b)
    one, same, other = (_snapshot(f"{folder / 'run'}#{step}") for step in range(3))
    assert list(Comparison(one, same)) == []
    there, back = list(Comparison(one, other)), list(Comparison(other, one))
    assert {d.path for d in there} == {d.path for d in back}
    assert bool(there) == (not _equal(a, b))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(_equal(*pair) for pair in zip(a, b, strict=True))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return repr(a) == repr(b)
