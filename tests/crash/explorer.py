"""Checks what a power loss at each point of recorded operations leaves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.crash.life import check
from tests.crash.powerloss import RecordingDisk, Tree, build, crash_states, marks


class Explorer:
    """Builds crash states one after another, each different one once, and collects the bad ones.

    Args:
        scratch: a folder to build them in.
        sound: fails unless the state in a folder is sound, given the marks made before the power loss.
    """

    def __init__(self, scratch: Path, sound: Callable[[Path, list[str]], None] = check) -> None:
        self._scratch = scratch
        self._sound = sound
        self._seen: set[object] = set()
        self.checked = 0
        self.bad: list[str] = []

    def explore(self, disk: RecordingDisk, first: int = 0, *, stop_at_bad: bool = False) -> None:
        """Check the states after each of the operations from `first` on."""
        points = range(first, len(disk.operations) + 1)
        # A state that is bad is often bad for a while: a sparse look finds it soon.
        for upto in sorted(points, key=lambda point: point % 8) if stop_at_bad else points:
            labels = marks(disk.operations, upto)
            for tree in crash_states(disk.operations, upto):
                key = (tuple(sorted((path, _read(path, content)) for path, content in tree.items())), tuple(labels))
                if key not in self._seen:
                    self._seen.add(key)
                    self._check(tree, labels, upto)
                if self.bad and stop_at_bad:
                    return

    def _check(self, tree: Tree, labels: list[str], upto: int) -> None:
        self.checked += 1
        base = self._scratch / "state"
        base.mkdir()
        try:
            build(tree, base)
            self._sound(base / "run", labels)
        except Exception as err:  # noqa: BLE001 - whatever goes wrong makes this a bad state
            self.bad.append(f"after operation {upto}: {type(err).__name__}: {err}")
        finally:
            shutil.rmtree(base)


def _read(path: str, content: bytes | None) -> bytes | None:
    """What a reader may get: none opens a file that is not under its name yet."""
    return b"" if content is not None and "/.tmp-" in path else content
