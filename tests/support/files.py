"""Files as good editors leave them."""

from __future__ import annotations

from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Put `text` at `path` in one step, so that no reader sees half of it."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)
