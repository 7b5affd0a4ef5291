"""Watches a run's snapshot folder from outside: what became durable when, and what is being written right now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.store.names import parse_id
from ckpt_engine.store.storage.local import TEMP


@dataclass(frozen=True, slots=True)
class Durable:
    """A snapshot whose manifest appeared at `time` (wall-clock seconds)."""

    snapshot: str
    step: int
    time: float


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A file that was being written when somebody looked; `nbytes` of it were there."""

    name: str
    nbytes: int

    @property
    def kind(self) -> str:
        """What it would have become."""
        return "manifest" if self.name.startswith("snapshots/") else "data file"


class SnapshotFolder:
    """A run's root, seen by a stranger: nothing is asked of the training process.

    Args:
        root: the folder; it need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, Durable] = {}

    def look(self) -> list[Durable]:
        """The snapshots that became durable since the last look. Look often: retention removes old ones."""
        new = []
        for path in _files(self._root / "snapshots"):
            known = parse_id(path.stem)
            if known is None or path.suffix != ".json" or path.stem in self._seen:
                continue
            with suppress(FileNotFoundError):
                durable = Durable(known.id, known.step, path.stat().st_mtime)
                self._seen[known.id] = durable
                new.append(durable)
        return new

    @property
    def seen(self) -> list[Durable]:
        """Every snapshot that was ever seen, oldest first."""
        return sorted(self._seen.values(), key=lambda durable: durable.snapshot)

    def unfinished(self) -> Unfinished | None:
        """A data file or manifest that is being written, or that a killed writer left behind."""
        for folder in ("data", "snapshots"):
            for path in _files(self._root / folder):
                if path.name.startswith(TEMP):
                    with suppress(FileNotFoundError):
                        return Unfinished(f"{folder}/{path.name}", path.stat().st_size)
        return None


def _files(folder: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from folder.iterdir()
