"""Files as good editors leave them, and those that a process has open."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Put `text` at `path` in one step, so that no reader sees half of it."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


def open_files(pid: int | str = "self") -> dict[Path, str]:
    """What each descriptor of a process refers to, by its path in `/proc`. Some come and go meanwhile."""
    found = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[fd] = str(fd.readlink())
    return found
