"""A state's passage through the arena and back, without a writer or a disk."""

from __future__ import annotations

import json
from typing import Any

import torch

from ckpt_engine.copy.job import EntryLayout
from ckpt_engine.snapshot.arena import SharedSlot, slot_bytes
from ckpt_engine.snapshot.stage import Copier, Staging
from ckpt_engine.state.flatten import Flattener
from ckpt_engine.state.layout import CapturedState, Planner
from ckpt_engine.state.rebuild import Rebuilder
from ckpt_engine.store.manifest import Entry, Piece
from ckpt_engine.store.tree import check, decode_schema, is_packed


def filled_tree(capture: CapturedState) -> dict[str, Any]:
    """The manifest's tree: skeletons with the values put in."""

    def fill(node: Any, values: list[Any]) -> Any:
        if isinstance(node, list):
            return [fill(child, values) for child in node]
        if isinstance(node, dict):
            return values[node["i"]] if node.get("$") == "v" else {k: fill(v, values) for k, v in node.items()}
        return node

    tree = {key: fill(one, list(capture.values[key])) for key, one in capture.plan.trees.items()}
    return json.loads(json.dumps(tree))


def through_arena(state: Any, planner: Planner | None = None, pickle_paths: tuple[str, ...] = ()) -> Any:
    """`state` staged eagerly into a slot and rebuilt from it."""
    capture = (planner or Planner(Flattener(pickle_paths))).capture(state)
    slot = SharedSlot(0, slot_bytes(capture.plan))
    views = slot.views(capture.plan)
    errors: list[BaseException | None] = []
    Staging(capture, views, errors.append, slot=slot.memory).begin(Copier(0))
    assert errors == [None]
    layout = capture.plan.layout.entries
    entries = {e.name: v.clone().view(getattr(torch, e.dtype)) for e, v in zip(layout, views, strict=True)}
    slot.close()
    tree = filled_tree(capture)
    forms = {e.name: Entry(e.dtype, e.shape, _pieces(e), e.container_dtype) for e in layout}
    check(tree, forms)
    schemas = {
        node["entry"]: decode_schema(entries[node["entry"]].numpy().tobytes(), forms)
        for node in tree.values()
        if is_packed(node)
    }
    return Rebuilder(entries, pickle_paths, schemas=schemas).state(tree)


def _pieces(entry: EntryLayout) -> tuple[Piece, ...]:
    return (Piece(0, entry.offset, entry.nbytes, "", entry.nbytes),) if entry.nbytes else ()


def same(a: Any, b: Any) -> bool:
    """Bitwise equality of two states, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return a.numel() == 0 or torch.equal(*(t.resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (a, b)))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)
