"""A snapshot as a folder of `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save


def write(state: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """Write the state into `folder`, which exists and is empty, from this one process; returns notes."""
    save(state, storage_writer=FileSystemWriter(folder, single_file_per_rank=True), no_dist=True)
    return ("dcp writes keys that are no text as text, and leaves empty dicts out",)
