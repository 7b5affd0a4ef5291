"""A stranger's reader, written from docs/format.md with nothing but json and the safetensors package."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ckpt_engine import Checkpointer
from ckpt_engine.state import layout
from tests.snapshot.passage import same


def read_newest(root: Path) -> dict[str, Any]:
    """The newest snapshot of a run, for states of dicts, lists, tuples, numbers and tensors."""
    names = [p.name for p in (root / "snapshots").iterdir() if not p.name.startswith(".")]
    newest = max(names, key=lambda name: int(name.split("-")[0]))
    manifest = json.loads((root / "snapshots" / newest).read_text())["manifest"]
    assert manifest["format"] == "ckpt-engine" and manifest["version"] in (1, 4)
    arrays = {}
    for file in manifest["files"]:
        with safe_open(root / file["name"], "pt") as container:
            arrays.update({name: container.get_tensor(name) for name in container.keys()})  # noqa: SIM118

    def build(node: Any, packed: list[torch.Tensor], values: list[Any]) -> Any:
        if packed and type(node) is int:
            return packed[node]
        if isinstance(node, list):
            return [build(child, packed, values) for child in node]
        if not isinstance(node, dict):
            return node
        match node.get("$"):
            case None:
                return {key: build(child, packed, values) for key, child in node.items()}
            case "v":
                return build(values[node["i"]], [], [])
            case "tensor":
                return arrays[node["entry"]]
            case "tuple":
                return tuple(build(child, packed, values) for child in node["items"])
            case "dict" | "odict":
                return {k: build(v, packed, values) for k, v in node["items"]}
            case "float":
                return float(node["v"])
            case "packed":
                schema = json.loads(bytes(arrays[node["entry"]].tolist()))
                return build(schema["tree"], unpack(schema["packs"]), node["values"])
            case kind:
                raise AssertionError(f"not needed here: {kind}")

    def unpack(packs: list[Any]) -> list[torch.Tensor]:
        found = []
        for pack in packs:
            at = 0
            for shape in (pack["shapes"][number] for number in pack["arrays"]):
                found.append(arrays[pack["entry"]][at : at + math.prod(shape)].view(shape))
                at += math.prod(shape)
        return found

    return {key: build(node, [], []) for key, node in manifest["tree"].items()}


def test_a_snapshot_is_readable_with_json_and_safetensors_alone(tmp_path: Path) -> None:
    """The format page is enough to write a reader."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": math.inf, "at": (3, [None])}
    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(state, step=1).wait()
    back = read_newest(tmp_path / "run")
    model.load_state_dict(back["model"])
    assert torch.equal(back["model"]["weight"], state["model"]["weight"])
    assert torch.equal(back["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    assert back["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert back["best"] == math.inf and back["at"] == (3, [None])


def test_packed_components_are_readable_with_json_and_safetensors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format page is enough to read a component of very many tensors."""
    monkeypatch.setattr(layout, "LEAST_ARRAYS", 300)
    weights = {f"layers.{n}": torch.randn(n % 3 + 1, 2) for n in range(300)}
    moments = {n: {"step": torch.tensor(float(n)), "exp_avg": torch.randn(2).bfloat16()} for n in range(300)}
    state = {"model": weights, "optimizer": {"state": moments, "lr": math.inf, "large": torch.randn(200, 200)}, "n": 1}
    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(state, step=1).wait()
    assert same(read_newest(tmp_path / "run"), state)
