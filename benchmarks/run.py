"""What a bar gets to work with: a scratch folder, a scale, and somewhere to say how far it is."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Scale(StrEnum):
    """How much is measured: the stated sizes, the same with few rounds, or next to nothing (tests of the code)."""

    FULL = "full"
    QUICK = "quick"
    TINY = "tiny"


@dataclass(frozen=True, slots=True)
class Bench:
    """The surroundings of one bar.

    Args:
        folder: on the file system to be measured; what a bar writes there it removes again.
        scale: how much to measure.
        say: takes a line of progress.
    """

    folder: Path
    scale: Scale
    say: Callable[[str], object] = lambda _: None

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A new folder that is removed afterwards."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        try:
            yield path
        finally:
            shutil.rmtree(path)
