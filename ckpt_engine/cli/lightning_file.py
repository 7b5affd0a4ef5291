"""Rebuilds the state of a snapshot and writes it as a `.ckpt` file that Lightning and torch read without us."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ckpt_engine.cli.tree import array_leaves
from ckpt_engine.errors import MismatchError
from ckpt_engine.restore.read import read_entries
from ckpt_engine.restore.rebuild import Rebuilder
from ckpt_engine.restore.sources import Sources
from ckpt_engine.store.manifest import Manifest

OWN_KEY = "ckpt_engine"
_NEEDED = ("state_dict", "pytorch-lightning_version")


def require_lightning(manifest: Manifest) -> None:
    """Refuse what Lightning could not load.

    Raises:
        MismatchError: the snapshot was not taken by the Lightning adapter.
    """
    missing = [key for key in _NEEDED if key not in manifest.tree]
    if missing:
        raise MismatchError(
            f"{manifest.info.id} is not of a Lightning run: it has no {' and no '.join(map(repr, missing))}",
            hint="--to safetensors exports its tensors",
        )


def exported_tree(manifest: Manifest) -> dict[str, Any]:
    """The state tree without our own key."""
    return {key: node for key, node in manifest.tree.items() if key != OWN_KEY}


def exported_entries(manifest: Manifest) -> list[str]:
    """The entries that `write` reads."""
    return list(dict.fromkeys(leaf.entry for leaf in array_leaves(exported_tree(manifest))))


def write(sources: Sources, manifest: Manifest, out: BinaryIO) -> tuple[str, ...]:
    """Write the checkpoint; returns notes on what could not be rebuilt as it was.

    Raises:
        CorruptError, FormatError: the snapshot is damaged, or has leaves stored with pickle.
    """
    rebuilder = Rebuilder(read_entries(sources, manifest, exported_entries(manifest)))
    torch.save(rebuilder.state(exported_tree(manifest)), out)
    return tuple(rebuilder.notes)


def why_not_weights_only(path: Path) -> str | None:
    """Why `torch.load(weights_only=True)` refuses the file, or None if it takes it."""
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as err:
        lines = [line.strip() for line in str(err).splitlines()]
        return next((line for line in lines if "GLOBAL" in line), lines[0])
    return None
