"""States of very many small tensors: packed into few entries, their structure stored once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import commands
from ckpt_engine.errors import CorruptError, FormatError
from ckpt_engine.snapshot.arena import SharedSlot, slot_bytes
from ckpt_engine.snapshot.stage import Copier, Staging
from ckpt_engine.state import layout
from ckpt_engine.state.flatten import Flattener
from ckpt_engine.state.layout import Planner
from ckpt_engine.store.manifest import Entry, Piece
from ckpt_engine.store.tree import decode_schema
from tests.snapshot.passage import same

FEWER = 256
"""From so many arrays on a component is packed here."""


@pytest.fixture(autouse=True)
def packed_from_fewer_arrays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout.LEAST_ARRAYS > FEWER
    monkeypatch.setattr(layout, "LEAST_ARRAYS", FEWER)


def _state(tensors: int = FEWER, step: int = 0) -> dict[str, Any]:
    numbers = torch.arange(float(tensors)) + step
    moments = {n: {"step": torch.tensor(float(step)), "exp_avg": number.view(1)} for n, number in enumerate(numbers)}
    return {
        "model": {f"layers.{n}.weight": torch.full((n % 4 + 1, 5), float(n + step)) for n in range(tensors)},
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1 / (step + 1), "betas": (0.9, 0.99)}]},
        "step": step,
    }


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _save(root: Path, *states: dict[str, Any], **options: Any) -> None:
    with Checkpointer(root, **options) as ckpt:
        for state in states:
            ckpt.save(state, step=state["step"]).wait()


@pytest.mark.long
@pytest.mark.parametrize(
    "tensors", [60_000, pytest.param(1_000_000, marks=pytest.mark.slow)], ids=lambda count: f"{count:,}"
)
def test_what_describes_a_tensor_is_stored_once(tmp_path: Path, tensors: int) -> None:
    """From the third snapshot on, one more takes at most 20 bytes for each tensor beside its bytes; all come back."""
    state = {"model": {f"layers.{n}.weight": torch.randn(25) for n in range(tensors)}, "step": 0}
    root = tmp_path / "run"
    with Checkpointer(root, keep={"last": 9}) as ckpt:
        sizes = []
        for step in range(4):
            state["step"] = step
            torch._foreach_add_(list(state["model"].values()), 1.0)
            ckpt.save(state, step=step).wait()
            sizes.append(_bytes(root))
        assert sizes[3] - sizes[2] <= tensors * (25 * 4 + 20)
        assert same(ckpt.load(), state)


def test_each_tensor_comes_back_with_a_storage_of_its_own(tmp_path: Path) -> None:
    """A file made of one tensor, as by `torch.save`, does not contain the others; tied tensors are tied again."""
    state = _state()
    state["model"]["tied"] = state["model"]["layers.7.weight"]
    _save(tmp_path / "run", state)
    with Checkpointer(tmp_path / "run") as ckpt:
        back = ckpt.load()
    assert same(back, state)
    weight = back["model"]["layers.1.weight"]
    assert weight.untyped_storage().nbytes() == weight.nbytes
    assert back["model"]["tied"].data_ptr() == back["model"]["layers.7.weight"].data_ptr()


def test_live_tensors_take_a_packed_component(tmp_path: Path) -> None:
    """`load(into=...)` fills the tensors that are there, and refuses others before it reads."""
    state = _state()
    _save(tmp_path / "run", state)
    into = {"model": {key: torch.zeros_like(one) for key, one in state["model"].items()}, "optimizer": None, "step": 0}
    before = into["model"]["layers.5.weight"]
    with Checkpointer(tmp_path / "run") as ckpt:
        back = ckpt.load(into=into)
    assert back["model"]["layers.5.weight"] is before and same(back, state)


def test_a_structure_that_changes_has_another_schema(tmp_path: Path) -> None:
    """Between snapshots tensors get other names, shapes and values of other kinds; each comes back as it was."""
    first, second = _state(), _state(step=1)
    second["model"]["renamed"] = second["model"].pop("layers.0.weight")
    second["optimizer"]["param_groups"][0]["lr"] = {"a": None}
    third = _state(FEWER - 2, step=2)  # too few to be packed
    _save(tmp_path / "run", first, second, third, keep={"last": 9})
    with Checkpointer(tmp_path / "run") as ckpt:
        assert all(same(ckpt.load(step=one["step"]), one) for one in (first, second, third))


@pytest.mark.parametrize("is_lazy", [False, True], ids=["eager", "lazy"])
def test_a_pack_is_of_one_instant(is_lazy: bool) -> None:
    """What changes after the snapshot changes nothing in the slot."""
    state = _state()
    expected = torch.cat([one.flatten().clone() for one in state["model"].values()])
    capture = Planner(Flattener()).capture(state, (lambda _: True) if is_lazy else None)
    slot, copier = SharedSlot(0, slot_bytes(capture.plan)), Copier()
    views = slot.views(capture.plan)
    done: list[BaseException | None] = []
    staging = Staging(capture, views, done.append, slot=slot.memory)
    staging.begin(copier)
    torch._foreach_zero_(list(state["model"].values()))
    pack = next(index for index, one in enumerate(capture.plan.layout.entries) if one.name.startswith("model/packed"))
    assert done == [None] and torch.equal(views[pack], expected)
    assert torch.equal(views[pack] * 0, capture.plan.sources[pack].tensor(capture.arrays))
    copier.close(60)


@pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("elements", [3, 2304], ids=["small", "larger"])
def test_a_pack_is_copied_in_pieces(elements: int, is_cold: bool) -> None:
    """Each array comes to its place, whatever moves it, and threads share a pack of many bytes."""
    weights = torch.randn(4096, elements)
    capture = Planner(Flattener()).capture({"model": {str(n): row.clone() for n, row in enumerate(weights)}})
    slot, copier = SharedSlot(0, slot_bytes(capture.plan)), Copier()
    if not is_cold:
        slot.prefault()
    views = slot.views(capture.plan)
    staging = Staging(capture, views, lambda _: None, slot=slot.memory)
    staging.begin(copier)
    pack = next(index for index, one in enumerate(capture.plan.layout.entries) if one.name.startswith("model/packed"))
    assert torch.equal(views[pack], weights.view(-1))
    copier.close(60)


def test_commands_show_the_leaves_of_a_packed_component(tmp_path: Path) -> None:
    """`ckpt show`, `diff`, `export`, `verify` and `cp` know it as they know any other."""
    root, copy, file = tmp_path / "run", tmp_path / "copy", tmp_path / "out.safetensors"
    first, second = _state(), _state(step=1)
    second["model"] = {**first["model"], "layers.9.weight": torch.full((2, 5), 7.0)}
    _save(root, first, second)
    run = CliRunner()

    def ckpt(*words: object) -> str:
        done = run.invoke(commands, list(map(str, words)))
        assert done.exit_code == 0, done.output
        return done.output

    shown = json.loads(ckpt("show", root, "--json"))
    assert shown["tree"]["model"]["layers.3.weight"]["view"]["shape"] == [4, 5]
    assert "model/packed float32" in ckpt("show", root)
    ids = [path.stem for path in sorted((root / "snapshots").iterdir())]
    differences = run.invoke(commands, ["diff", *(f"{root}#{one}" for one in ids)]).output
    assert "layers.9.weight" in differences and "layers.8.weight" not in differences
    ckpt("verify", root)
    ckpt("cp", root, copy)
    ckpt("export", copy, file, "--to", "safetensors", "--only", "model")
    assert same(dict(sorted(load_file(file).items())), dict(sorted(second["model"].items())))


def test_retention_keeps_the_file_of_a_schema(tmp_path: Path) -> None:
    """Of twelve snapshots one is kept: it is whole, and what no snapshot needs is gone."""
    root, tensors = tmp_path / "run", 2_000
    state = {"model": {f"layers.{n}.weight": torch.randn(5) for n in range(tensors)}, "step": 0}
    with Checkpointer(root, keep={"last": 1}) as ckpt:
        for step in range(12):
            state["step"] = step
            torch._foreach_add_(list(state["model"].values()), 1.0)
            ckpt.save(state, step=step).wait()
    assert CliRunner().invoke(commands, ["verify", str(root)]).exit_code == 0
    with Checkpointer(root) as ckpt:
        assert same(ckpt.load(), state)


def _damage_schema(root: Path) -> None:
    manifest = json.loads(sorted((root / "snapshots").iterdir())[-1].read_text())["manifest"]
    piece = manifest["entries"]["model/schema"]["pieces"][0]
    with (root / manifest["files"][piece["file"]]["name"]).open("r+b") as file:
        file.seek(piece["offset"] + 10)
        file.write(b"!")


@pytest.mark.parametrize("into", [False, True], ids=["made", "into"])
def test_a_damaged_schema_costs_one_snapshot(tmp_path: Path, into: bool) -> None:
    """The next older snapshot is taken, whether the schema is read before or with the rest."""
    root, (first, second) = tmp_path / "run", (_state(), _state(step=1))
    _save(root, first, second)
    _damage_schema(root)
    with Checkpointer(root) as ckpt:
        assert same(ckpt.load(into=_state() if into else None), first)


_ENTRIES = {"p": Entry("float32", (6,), (Piece(0, 0, 24, "", 24),), "F32")}
_SOUND = {
    "packs": [{"entry": "p", "dtype": "float32", "node": {}, "shapes": [[2], [4]], "arrays": [0, 1]}],
    "tree": {"a": 0, "b": 1},
}


def _changed(**row: Any) -> dict[str, Any]:
    return {**_SOUND, "packs": [{**_SOUND["packs"][0], **row}]}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {**_SOUND, "packs": {}, "tree": {"$": 3}},
        {**_SOUND, "tree": {"$": "tensor", "entry": "q"}},
        {**_SOUND, "tree": json.loads("[" * 300 + "]" * 300)},
        _changed(entry="q"),
        _changed(dtype="bfloat16"),
        _changed(dtype=[]),
        _changed(node=None),
        _changed(node={"entry": "q"}),
        _changed(node={"parameter": {}}),
        _changed(node={"parameter": True}),
        _changed(shapes=[[2], [5]]),
        _changed(shapes=[[2], [0, 4]]),
        _changed(shapes=[[2], [-4]]),
        _changed(shapes=[[2], [1 << 62]]),
        _changed(shapes=[2, 4]),
        _changed(shapes={}),
        _changed(arrays=[]),
        _changed(arrays=[0, 1, 0]),
        _changed(arrays=[0, 2]),
        _changed(arrays=[0, -1]),
        _changed(arrays=[True, False]),
        _changed(arrays=[0.0, 1.0]),
        _changed(arrays=[[0, 1]]),
        _changed(arrays=[[0], [0, 1]]),
        _changed(arrays=[0, 1 << 80]),
        _changed(arrays="01"),
    ],
    ids=str,
)
def test_a_schema_that_contradicts_itself_is_refused(document: Any) -> None:
    """A schema fits its entries or it is damaged, whatever a store contains."""
    assert decode_schema(json.dumps(_SOUND).encode(), _ENTRIES).packs[0].arrays == [0, 1]
    with pytest.raises(CorruptError):
        decode_schema(json.dumps(document).encode(), _ENTRIES)


def _read_of(schema: dict[str, Any]) -> Callable[[], Any]:
    from ckpt_engine.state.rebuild import Rebuilder

    node = {"$": "packed", "entry": "s", "entries": ["p"], "values": [1.5]}
    schemas = {"s": decode_schema(json.dumps(schema).encode(), _ENTRIES)}
    return lambda: Rebuilder({"p": torch.arange(6.0)}, schemas=schemas).state({"model": node})


def test_numbers_of_a_schema_are_of_arrays_and_values_that_there_are() -> None:
    """A number beyond them is damage; in the place of a key it is a key."""
    found = _read_of({**_SOUND, "tree": {"$": "dict", "items": [[7, 1], [{"$": "v", "i": 0}, {"$": "v", "i": 0}]]}})()
    assert same(found, {"model": {7: torch.arange(2.0, 6.0), 1.5: 1.5}})
    for tree in ({"a": 2}, [-1], {"$": "v", "i": 1}, {"$": "v", "i": -1}, {"$": "dict", "items": [["a", 2]]}):
        with pytest.raises(FormatError):
            _read_of({**_SOUND, "tree": tree})()
