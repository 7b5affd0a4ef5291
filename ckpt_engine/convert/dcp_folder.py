"""A snapshot as a folder of `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt_engine.errors import MismatchError


def write(state: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """Write the state into `folder`, which exists and is empty, from this one process; returns notes.

    Raises:
        MismatchError: something in it cannot be pickled.
    """
    try:
        save(state, storage_writer=FileSystemWriter(folder, single_file_per_rank=True), no_dist=True)
    except CheckpointException as err:  # no Exception: whoever catches those does not see it
        cause = next((one[0] if isinstance(one, tuple) else one for one in err.failures.values()), err)
        if isinstance(cause, OSError):
            raise cause from err
        raise MismatchError(
            f"the state cannot become dcp: {type(cause).__name__}: {cause}", hint="--to safetensors exports its tensors"
        ) from err
    return ("dcp writes keys that are no text as text, and leaves empty dicts out",)
