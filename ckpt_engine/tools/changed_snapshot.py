"""A snapshot as a run gets it that resumes with the section `resume`: the same bytes, in a tree with its changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt_engine.config.sections import ResumeChanges
from ckpt_engine.restore.changes import Changes
from ckpt_engine.restore.choose import Candidate
from ckpt_engine.store.manifest import OWN_KEY
from ckpt_engine.store.tree import PAIRS

SHOWN = 8
"""Changes that are named."""


class _Part(dict[Any, Any]):
    """The node of a mapping with what is below it, or of anything that is no list and has nothing below it."""

    node: Any = None


def changed(snapshot: Candidate, section: ResumeChanges, *, strict: bool = True) -> Candidate:
    """The snapshot with these changes, and a note on each; of several ranks it is that of rank 0.

    Args:
        strict: each pattern must match something.

    Raises:
        MismatchError: a pattern matches nothing, or a value cannot become what it is to be.
    """
    manifest = snapshot.manifest.as_rank(0)
    state = {key: _opened(node) for key, node in manifest.tree.items()}
    changes = Changes(section, state)
    changes.change(state)
    if strict:
        changes.require_used()
    tree = {key: _closed(one) for key, one in state.items() if key != OWN_KEY or not changes.restarts}
    notes = [
        f"left out {row.name}" if row.how == "left" else f"{row.how} {row.name}: {row.detail}" for row in changes.rows
    ]
    notes[SHOWN:] = [f"{len(notes) - SHOWN:,} more changes"] * (len(notes) > SHOWN)
    return replace(snapshot, manifest=replace(manifest, tree=tree), notes=(*snapshot.notes, *notes))


def _opened(node: Any) -> Any:
    """A node as the value that changes look into."""
    if not isinstance(node, dict):
        return list(map(_opened, node)) if isinstance(node, list) else node
    if node.get("$") == "tuple":
        return tuple(map(_opened, node["items"]))
    found, pairs = _Part(), node.items() if "$" not in node else node["items"] if node["$"] in PAIRS else ()
    if all(not isinstance(key, dict | list) for key, _ in pairs):
        found.update((key, _opened(one)) for key, one in pairs)
    found.node = node
    return found


def _closed(value: Any) -> Any:
    """The node of a value."""
    if isinstance(value, list | tuple):
        items = list(map(_closed, value))
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    if not isinstance(value, _Part):
        return value
    below = {key: _closed(one) for key, one in value.items()}
    kept = {**value.node, "items": list(map(list, below.items()))} if "$" in value.node else below
    return kept if below else value.node
