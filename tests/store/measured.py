"""A disk that measures what a folder holds while it is written."""

from __future__ import annotations

import errno
from pathlib import Path

from ckpt_engine.store.storage.disk import Disk


class MeasuredDisk(Disk):
    """Notes after each write how many bytes are below the root, temporary files included."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.most_bytes = 0
        self.broken = False

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if self.broken and offset > 0:
            raise OSError(errno.EIO, "broken")
        taken = super().write(fd, data, offset)
        sizes = [path.stat().st_size for path in self.root.rglob("*") if path.is_file()]
        self.most_bytes = max(self.most_bytes, sum(sizes))
        return taken
