"""Files that the folders of Accelerate and of transformers have both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt_engine.data import rng
from ckpt_engine.errors import CorruptError
from ckpt_engine.interop import safe_load
from ckpt_engine.interop.imported import Advance
from ckpt_engine.interop.legacy_streams import from_legacy

MODEL, MODEL_TORCH = "model.safetensors", "pytorch_model.bin"
SCALER = "scaler.pt"
NO_STREAMS = "it has no random streams"
FIRST_STREAMS = "it is of several processes: the random streams of the first one are kept"


def optional(folder: Path, advance: Advance, name: str) -> Any:
    """What a file of torch.save has; None: it is not there."""
    return safe_load.load(folder / name, advance).value if (folder / name).exists() else None


def recorded_streams(file: Path, recorded: Any, keys: tuple[str, str, str, str]) -> rng.RngState:
    """The random streams that a file has under these keys; the last one is of the devices, and may be missing."""
    try:
        cuda = recorded.get(keys[3])
        devices = () if cuda is None else tuple(cuda) if isinstance(cuda, list | tuple) else (cuda,)
        python, numpy, cpu = (recorded[key] for key in keys[:3])
        return from_legacy((python, numpy, cpu, devices))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as err:
        raise CorruptError(f"{file} has no random streams: {err}") from err
