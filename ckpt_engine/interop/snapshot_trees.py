"""The objects of a snapshot's state tree, as other programs get them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.read import read_entries, require_room
from ckpt_engine.state.json_types import dtype_of
from ckpt_engine.state.rebuild import Rebuilder
from ckpt_engine.state.wrapped import as_plain
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.tree import entries_in

SMALL_BYTES = 16 << 20
"""Entries up to this size are read for `outline` too: what decides what a state is sits in small ones."""


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
    return as_plain(rebuilder.state(tree)), tuple(rebuilder.notes)


def outline(sources: Sources, manifest: Manifest, tree: Mapping[str, Any]) -> Any:
    """The objects of `tree` with the values of large tensors undefined: enough to see what it consists of.

    Raises:
        CorruptError, FormatError, StorageError: as `rebuild`.
    """
    names = entries_of(tree)
    require_room(sum([manifest.entries[name].nbytes for name in names]))
    read = read_entries(sources, manifest, [name for name in names if manifest.entries[name].nbytes <= SMALL_BYTES])
    rest = {
        name: torch.empty(manifest.entries[name].shape, dtype=dtype_of(manifest.entries[name].dtype))
        for name in names
        if name not in read
    }
    return Rebuilder({**read, **rest}).state(tree)
