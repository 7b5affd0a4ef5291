"""The state of a snapshot as Python objects, for the writers of foreign formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt_engine.restore.named import dtype_of
from ckpt_engine.restore.read import read_entries, require_room
from ckpt_engine.restore.rebuild import Rebuilder
from ckpt_engine.restore.sources import Sources
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.tree import entries_in

OWN_KEY = "ckpt_engine"
"""Top-level key of what only our adapters put back: data position, random streams, running means."""

SMALL_BYTES = 16 << 20
"""Entries up to this size are read for `outline` too: what decides what a state is sits in small ones."""


def foreign_tree(manifest: Manifest) -> dict[str, Any]:
    """The state tree without our own key."""
    return {key: node for key, node in manifest.tree.items() if key != OWN_KEY}


def entries_of(tree: Mapping[str, Any]) -> list[str]:
    """The entries that a tree refers to, each once."""
    return list(dict.fromkeys(entries_in(tree)))


def rebuild(sources: Sources, manifest: Manifest, tree: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """The objects of `tree`, every byte verified, and notes on what could not be rebuilt as it was.

    Raises:
        CorruptError, FormatError: the snapshot is damaged, or has leaves stored with pickle.
        StorageError: it cannot be read.
    """
    rebuilder = Rebuilder(read_entries(sources, manifest, entries_of(tree)))
    state = rebuilder.state(tree)
    return state, tuple(rebuilder.notes)


def outline(sources: Sources, manifest: Manifest, tree: Mapping[str, Any]) -> Any:
    """The objects of `tree` with the values of large tensors undefined: enough to see what it consists of.

    Raises:
        CorruptError, FormatError, StorageError: as `rebuild`.
    """
    require_room(manifest, entries_of(tree))
    sizes = {name: sum(piece.raw_nbytes for piece in manifest.entries[name].pieces) for name in entries_of(tree)}
    read = read_entries(sources, manifest, [name for name, nbytes in sizes.items() if nbytes <= SMALL_BYTES])
    rest = {
        name: torch.empty(manifest.entries[name].shape, dtype=dtype_of(manifest.entries[name].dtype))
        for name in sizes.keys() - read.keys()
    }
    return Rebuilder({**read, **rest}).state(tree)
