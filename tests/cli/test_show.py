"""`ckpt show`: facts, components, tree and entries of one snapshot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Ckpt = Callable[..., Any]


def test_show_prints_facts_components_tree_and_largest_entries(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """What a person wants to know about the latest snapshot, without reading its data."""
    run_folder.add(10, arrays)
    parent = run_folder.add(20, arrays)
    tree = {
        "state_dict": {
            "$": "odict",
            "items": [
                ["layer.weight", {"$": "tensor", "entry": "state_dict/layer.weight"}],
                ["layer.bias", {"$": "tensor", "entry": "state_dict/layer.bias"}],
                ["tied", {"$": "tensor", "entry": "state_dict/layer.weight"}],
            ],
        },
        "optimizer": {"state": {"$": "dict", "items": [[0, {"avg": {"$": "tensor", "entry": "optimizer/exp_avg"}}]]}},
        "epoch": 3,
        "point": {"$": "namedtuple", "type": "m:Point", "fields": ["x", "y"], "items": [1, {"$": "float", "v": "nan"}]},
    }
    snapshot = run_folder.add(30, arrays, tree, epoch=3, reason="validation", metrics={"loss": 0.5}, parent=parent)
    run_folder.data_file(snapshot).unlink()
    result = ckpt("show", run_folder.path)
    out = result.out
    assert result.code == 0
    for text in (snapshot, "30, epoch 3", "why: validation", "loss=0.5", parent, "world size 1", "torch 2.13.0"):
        assert text in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "size 25 kB in 3 entries" in lines
    assert "optimizer 16 kB 66 %" in lines
    assert "state_dict 8.4 kB 34 %" in lines
    assert "state_dict: OrderedDict (3), 3 arrays, 8.4 kB" in lines
    assert "optimizer: dict (1), 1 array, 16 kB" in lines
    assert "  state: dict (1), 1 array, 16 kB" in out.splitlines()
    assert "    0: dict (1), 1 array, 16 kB" in out.splitlines()
    assert "epoch: int, 1 value" in lines
    assert "point: Point (2), 2 values" in lines
    assert lines[-3:] == [
        "optimizer/exp_avg float64 64 x 32 16 kB",
        "state_dict/layer.weight float32 64 x 32 8.2 kB",
        "state_dict/layer.bias float32 64 256 B",
    ]


def test_show_lists_the_largest_entries_or_all(ckpt: Ckpt, run_folder: Any) -> None:
    """Ten thousand entries do not flood the screen unless asked for."""
    run_folder.add(1, {f"a/p{i}": np.zeros(i + 1, "float32") for i in range(30)})
    short, long = ckpt("show", run_folder.path).out, ckpt("show", run_folder.path, "1", "--all").out
    assert "a/p29 " in short
    assert "a/p19 " not in short
    assert "... 20 entries more; --all lists them" in short
    assert all(f"a/p{i} " in long for i in range(30))
    assert "more;" not in long


def test_show_cuts_long_branches(ckpt: Ckpt, run_folder: Any) -> None:
    """A level with many children shows the first ones and how many follow."""
    entry = {"x": {"$": "tensor", "entry": "a/x"}}
    run_folder.add(1, {"a/x": np.zeros(1)}, {"a": {f"k{i}": entry for i in range(100)}})
    out = ckpt("show", run_folder.path).out
    assert "  k7: dict (1), 1 array, 8 B\n" in out
    assert "  k8: " not in out
    assert "  ... 92 more\n" in out


def test_show_json_has_the_whole_manifest_but_the_tree(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """Programs get every entry with dtype, shape, bytes and file."""
    snapshot = run_folder.add(10, arrays)
    found = ckpt("show", run_folder.path, "step=10", "--json").json
    assert found["snapshot"]["id"] == snapshot
    assert found["snapshot"]["components"] == {"state_dict": 8448, "optimizer": 16384}
    assert found["world"] == {"size": 1}
    assert found["files"] == [
        {"name": f"data/{snapshot}-r00000.safetensors", "nbytes": run_folder.data_file(snapshot).stat().st_size}
    ]
    assert found["entries"]["state_dict/layer.bias"] == {
        "dtype": "float32",
        "shape": [64],
        "bytes": 256,
        "files": [f"data/{snapshot}-r00000.safetensors"],
    }


def test_show_refuses_a_damaged_manifest(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """Nothing is shown that has not been verified."""
    snapshot = run_folder.add(10, arrays)
    content = bytearray(run_folder.manifest_file(snapshot).read_bytes())
    content[-100] ^= 1
    run_folder.manifest_file(snapshot).write_bytes(content)
    result = ckpt("show", run_folder.path)
    assert (result.code, result.out) == (2, "")
    assert "CKPT401" in result.err
