"""DTensors are saved by the ranks that have them, once, and read into any other layout."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import StateError
from ckpt_engine.state.sharding import here, is_sharded
from ckpt_engine.store.storage.local import LocalStorage
from tests.ranks.runs import on_all, open_ranks
from tests.ranks.sharded.pretend import mesh_of, part, pretended, row

FLAT, PAIRS = [0, 1, 2, 3], [[0, 1], [2, 3]]
LAYOUTS: dict[str, tuple[Any, list[Any]]] = {
    "rows": (FLAT, [Shard(0)]),
    "columns": (FLAT, [Shard(1)]),
    "replicated": (FLAT, [Replicate()]),
    "hybrid": (PAIRS, [Replicate(), Shard(0)]),
    "hybrid columns": (PAIRS, [Shard(1), Replicate()]),
    "both": (PAIRS, [Shard(0), Shard(1)]),
    "strided": (PAIRS, [_StridedShard(0, split_factor=2), Shard(0)]),
    "one row": (FLAT, []),
}
QUICK = {"strided", "hybrid columns", "one row"}
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
SOME = [name if name == "strided" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
SHAPES = {"even": (8, 6), "uneven": (7, 5), "few": (2, 3), "deep": (1, 9, 4), "large": (900, 700)}


def wholes(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parts(rank: int, layout: str, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a rank has of each."""
    ranks, placements = LAYOUTS[layout]
    if not placements:
        return dict(row(whole, rank, 4))
    mesh = mesh_of(ranks, rank)
    return {name: part(one, mesh, placements) for name, one in whole.items()}


def divided(rank: int, layout: str, seed: int = 0) -> dict[str, Any]:
    """The state of a rank: every whole as a DTensor, tied once, with a plain scalar."""
    weights = parts(rank, layout, wholes(seed))
    weights["tied"] = weights["even"]
    return {"model": weights, "step": torch.tensor(float(seed)), "own": {"rank": rank}}


def save(root: Path, states: list[dict[str, Any]], **options: Any) -> None:
    """One snapshot of a state per rank."""
    ranks = open_ranks(root, len(states), **options)
    for handle in on_all(lambda rank: ranks[rank].save(states[rank], step=1), len(states)):
        handle.wait(60)
    on_all(lambda rank: ranks[rank].close(), len(states))


def load(root: Path, into: list[Any]) -> list[Any]:
    """What each rank gets."""
    ranks = open_ranks(root, len(into))
    states = on_all(lambda rank: ranks[rank].load(into=into[rank]), len(into))
    on_all(lambda rank: ranks[rank].close(), len(into))
    return states


@pytest.fixture(autouse=True)
def four_ranks() -> Any:
    with pretended(4):
        yield


@pytest.mark.parametrize("layout", ALL)
def test_one_process_reads_whole_plain_tensors(tmp_path: Path, layout: str) -> None:
    """Whatever the layout, each element is stored once, and without `into` everything is put together."""
    save(tmp_path / "run", [divided(rank, layout) for rank in range(4)])
    expected = wholes()
    with Checkpointer(tmp_path / "run") as alone:
        state = alone.load()
        assert state is not None
        for name, tensor in state["model"].items():
            assert type(tensor) is torch.Tensor
            assert torch.equal(tensor, expected["even" if name == "tied" else name])
        assert state["model"]["tied"] is state["model"]["even"]
        (info,) = alone.snapshots()
        assert info.components["model"] == sum(whole.nbytes for whole in expected.values())


@pytest.mark.parametrize("layout", SOME)
def test_any_layout_reads_what_another_has_written(tmp_path: Path, layout: str) -> None:
    """Live DTensors are filled in place with what overlaps, also plain ones of one process."""
    save(tmp_path / "run", [divided(rank, layout) for rank in range(4)])
    for other in LAYOUTS:
        live = [divided(rank, other, seed=1) for rank in range(4)]
        wanted = [divided(rank, other) for rank in range(4)]
        for rank, state in enumerate(load(tmp_path / "run", live)):
            for name, tensor in state["model"].items():
                assert tensor is live[rank]["model"][name]
                assert is_sharded(tensor)
                assert torch.equal(here(tensor), here(wanted[rank]["model"][name])), (other, name, rank)
            assert state["own"] == {"rank": rank}
    plain = {name: torch.zeros_like(whole) for name, whole in wholes().items()}
    plain["tied"] = plain["even"]
    with Checkpointer(tmp_path / "run") as alone:
        state = alone.load(into={"model": plain, "step": torch.tensor(0.0), "own": {}})
    assert state is not None
    for name, tensor in state["model"].items():
        assert tensor is plain[name]
        assert torch.equal(tensor, wholes()["even" if name == "tied" else name])


@pytest.mark.parametrize("layout", ALL)
def test_every_rank_writes_the_same_number_of_bytes(tmp_path: Path, layout: str) -> None:
    """Replicas share out what they have alike: within five percent of S/W."""
    whole = {f"layer{number}": torch.randn(64, 128) for number in range(12)}
    save(tmp_path, [{"m": parts(rank, layout, whole), "own": {}} for rank in range(4)])
    share = sum(w.nbytes for w in whole.values()) / 4
    sizes = []
    for file in sorted((tmp_path / "data").iterdir()):
        with safe_open(file, "pt") as data:
            sizes.append(sum(data.get_tensor(name).nbytes for name in data.keys()))  # noqa: SIM118
    assert len(sizes) == 4
    assert all(abs(nbytes - share) <= 0.05 * share for nbytes in sizes)


@pytest.mark.parametrize(
    ("shape", "is_partial"), [((5000, 1000), True), ((2, 5_000_000), True), ((3, 2, 1_500_000), False)]
)
def test_only_what_overlaps_is_read_of_large_pieces(tmp_path: Path, shape: tuple[int, ...], is_partial: bool) -> None:
    """Of a piece that is hardly needed only a run of bytes is read, counted as unverified; others are read whole."""
    whole = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    with Checkpointer(tmp_path, writer="thread") as alone:
        alone.save({"w": whole}, step=1).wait(60)
    mesh = mesh_of(FLAT, 3)
    dimension = 0 if shape[0] > 4 else len(shape) - 1
    live = part(torch.zeros(shape), mesh, [Shard(dimension)])
    with Checkpointer(tmp_path, writer="thread") as alone:
        alone.load(into={"w": live})
        assert alone.loaded is not None
        assert (alone.loaded.unverified_bytes > 0) == is_partial
    assert torch.equal(live.to_local(), part(whole, mesh, [Shard(dimension)]).to_local())


@pytest.mark.cells(1)
@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (4, 3), (3, 8), (2, 8)])
def test_other_numbers_of_ranks_read_little_else_and_verify_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: int, readers: int
) -> None:
    """Together they read at most a tenth more than they need, and digests cover nine tenths of it."""
    shapes = {"table": (2999, 1024), "weight": (1024, 3072), "narrow": (1_000_000, 1), "long rows": (8, 250_001)}
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    rows = [Shard(0)]

    def divided_by(size: int, rank: int, source: dict[str, torch.Tensor]) -> dict[str, DTensor]:
        mesh = mesh_of(list(range(size)), rank)
        return {name: part(one, mesh, rows) for name, one in source.items()}

    save(tmp_path, [{"m": divided_by(writers, rank, whole), "own": {}} for rank in range(writers)])
    asked: list[int] = []
    get_into = LocalStorage.get_into

    def counted(storage: LocalStorage, name: str, start: int, out: memoryview) -> None:
        asked.append(len(out))
        get_into(storage, name, start, out)

    monkeypatch.setattr(LocalStorage, "get_into", counted)
    unverified = 0
    for rank in range(readers):
        live = divided_by(readers, rank, {name: torch.zeros(shape) for name, shape in shapes.items()})
        with Checkpointer(tmp_path, writer="thread") as alone:
            alone.load(into={"m": live, "own": {}})
            assert alone.loaded is not None
            unverified += alone.loaded.unverified_bytes
        for name, wanted in divided_by(readers, rank, whole).items():
            assert torch.equal(live[name].to_local(), wanted.to_local())
    needed = sum(one.nbytes for one in whole.values())
    assert needed <= sum(asked) <= 1.1 * needed
    assert unverified <= 0.1 * needed


def test_what_one_rank_finds_damaged_no_rank_takes(tmp_path: Path) -> None:
    """Pieces that are read whole are verified: all ranks take the snapshot before, whether they need such a piece."""
    states = [divided(rank, "rows") for rank in range(4)]
    ranks = open_ranks(tmp_path, 4)
    for step in (1, 2):
        for handle in on_all(lambda rank: ranks[rank].save(states[rank], step=step), 4):  # noqa: B023
            handle.wait(60)
    on_all(lambda rank: ranks[rank].close(), 4)
    newest = sorted((tmp_path / "data").glob("*-r00003*"))[-1]
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    live = [divided(rank, "rows", seed=1) for rank in range(4)]
    ranks = open_ranks(tmp_path, 4)
    on_all(lambda rank: ranks[rank].load(into=live[rank]), 4)
    on_all(lambda rank: ranks[rank].close(), 4)
    for rank in range(4):
        loaded = ranks[rank].loaded
        assert loaded is not None
        assert loaded.info.step == 1
        wanted = divided(rank, "rows")["model"]
        assert all(torch.equal(live[rank]["model"][n].to_local(), w.to_local()) for n, w in wanted.items())


def refused(tmp_path: Path, tensor: Any, size: int = 4, key: str = "w") -> str:
    """Why a tensor cannot be saved by the first of `size` ranks."""
    first = open_ranks(tmp_path, size)[0]
    with pytest.raises(StateError) as error:
        first.engine._pipeline.stager.planner.capture({key: tensor})
    return str(error.value)


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    """Partial sums, meshes of some ranks, DTensors of one rank's own, and several ranks without `ranks`."""
    whole = torch.zeros(8, 8)
    rows = part(whole, mesh_of(FLAT, 0), [Shard(0)])
    sums = DTensor.from_local(whole, mesh_of(FLAT, 0), [Partial()], run_check=False)
    assert "DTensor at w: its values are partial sums" in refused(tmp_path, sums)
    some = part(whole, mesh_of([0, 1], 0), [Shard(0)])
    assert "has 2 of the 4 ranks" in refused(tmp_path, some)
    assert "DTensor at ranks/0/own/x is in a component" in refused(tmp_path, {"x": rows}, key="own")
    assert "divided over 4 ranks, and this checkpointer saves for one" in refused(tmp_path, rows, size=1)
    runs = part(whole, mesh_of(FLAT, 0), [_StridedShard(0, split_factor=2)])
    assert "several separate runs" in refused(tmp_path, runs)
    assert "torch divides (9, 8) otherwise" in refused(
        tmp_path,
        DTensor.from_local(whole[:1], mesh_of(FLAT, 0), [Shard(0)], run_check=False, shape=(9, 8), stride=(8, 1)),
    )


def test_a_mesh_of_one_rank_needs_no_ranks(tmp_path: Path) -> None:
    """What one process has it saves alone."""
    whole = torch.randn(5, 3)
    with Checkpointer(tmp_path, writer="thread") as alone:
        alone.save({"w": part(whole, mesh_of([0], 0), [Shard(0)])}, step=1).wait(60)
        state = alone.load()
    assert state is not None
    assert torch.equal(state["w"], whole)


def test_a_state_whose_layout_changes_is_planned_again(tmp_path: Path) -> None:
    """The same local tensors with other placements make other arrays, which get a new plan."""
    ranks = open_ranks(tmp_path, 1)[0].engine._pipeline.stager.planner
    here = torch.zeros(4, 4)
    mesh = mesh_of([[0]], 0)
    first = ranks.capture({"w": DTensor.from_local(here, mesh, [Shard(0), Shard(1)], run_check=False)})
    again = ranks.capture({"w": DTensor.from_local(here, mesh, [Shard(0), Shard(1)], run_check=False)})
    other = ranks.capture({"w": DTensor.from_local(here, mesh, [Replicate(), Shard(1)], run_check=False)})
    assert again.plan is first.plan
    assert other.plan is not first.plan


@pytest.mark.slow
def test_an_encoded_copy_is_read_in_parts_too(tmp_path: Path) -> None:
    """What a further tier has encoded is decoded piece by piece, also where blocks lie one behind another."""
    tiers = [str(tmp_path / "near"), {"url": str(tmp_path / "far"), "codec": "byteplane-zstd"}]
    ranks = open_ranks({"tiers": tiers}, 4)
    states = [divided(rank, "both") for rank in range(4)]
    for step in (1, 2):
        for state in states:
            state["model"]["large"].to_local()[:1] = float(step)
        for handle in on_all(lambda rank: ranks[rank].save(states[rank], step=step), 4):  # noqa: B023
            handle.wait(60)
        assert ranks[0].wait(60)
    on_all(lambda rank: ranks[rank].close(), 4)
    with Checkpointer(tmp_path / "near") as alone:
        whole = alone.load()
    assert whole is not None
    live = [divided(rank, "strided", seed=1) for rank in range(4)]
    load(tmp_path / "far", live)
    for rank in range(4):
        mesh = mesh_of(PAIRS, rank)
        for name, tensor in live[rank]["model"].items():
            wanted = part(whole["model"][name], mesh, LAYOUTS["strided"][1])
            assert torch.equal(tensor.to_local(), wanted.to_local()), name
