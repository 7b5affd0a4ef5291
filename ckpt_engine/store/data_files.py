"""Which data files of a snapshot a storage lacks."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.store import names
from ckpt_engine.store.manifest import DataFile
from ckpt_engine.store.storage.base import Storage

FEW_FILES = 4
"""So many files are asked for one by one; more of them cost less in one listing of all."""


def lacking(storage: Storage, files: Sequence[DataFile]) -> list[str]:
    """The names of those that are missing, or of another size.

    Raises:
        StorageError: that cannot be found out.
    """
    prefixes = [file.name for file in files] if len(files) <= FEW_FILES else [names.DATA]
    sizes = {item.name: item.nbytes for prefix in prefixes for item in storage.list(prefix)}
    return [file.name for file in files if sizes.get(file.name) != file.nbytes]
