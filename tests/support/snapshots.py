"""Snapshots of a run on disk, and copies of the run as it was when one of them was the newest."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Saved:
    """A snapshot on disk.

    Args:
        batch, kind: as its adapter has noted them; 0 and "" where it notes none.
    """

    path: Path
    id: str
    step: int
    epoch: int
    batch: int
    reason: str
    kind: str


def saved(root: Path) -> list[Saved]:
    """All snapshots in `root`, oldest first."""
    found = []
    for path in sorted((root / "snapshots").glob("*.json")):
        manifest = json.loads(path.read_bytes())["manifest"]
        info, notes = manifest["info"], manifest["notes"]
        where = (info["step"], info["epoch"], notes.get("batch", 0))
        found.append(Saved(path, info["id"], *where, info["reason"], notes.get("kind", "")))
    return found


def only(root: Path, snapshot: Saved, target: Path) -> Path:
    """A copy of the run as it was when `snapshot` was the newest."""
    (target / "snapshots").mkdir(parents=True)
    (target / "data").mkdir()
    shutil.copy(root / "ckpt.json", target)
    shutil.copy(snapshot.path, target / "snapshots")
    for file in json.loads(snapshot.path.read_bytes())["manifest"]["files"]:
        shutil.copy(root / file["name"], target / "data")
    return target
