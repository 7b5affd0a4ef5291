"""How `checkpoint_id` of torch.distributed.checkpoint says which step is meant, and the options both sides take."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ckpt_engine.config import Config, load_config
from ckpt_engine.errors import ConfigError

Root = str | os.PathLike[str] | Mapping[str, Any] | Config
_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]+)/?")


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The step that a `checkpoint_id` names: the number it ends with, as in `step-1200`.

    Raises:
        ConfigError: it ends with none.
    """
    text = os.fspath(checkpoint_id)
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"checkpoint_id {text!r} does not end with the number of a step",
            hint="give checkpoint_id=f'step-{step}'; the folder or bucket is what the writer or reader was made with",
        )
    return int(found[1])


def names_step(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether `step_of` takes it."""
    return _NUMBER.fullmatch(os.fspath(checkpoint_id)) is not None


def config_of(root: Root, options: Mapping[str, Any]) -> Config:
    """The validated options of a writer or a reader.

    Raises:
        ConfigError: an option that is wrong, or without a meaning here.
    """
    config = load_config(root, **options)
    if config.memory is not None:
        raise ConfigError("torch.distributed.checkpoint has no memory tier", hint="name folders and buckets only")
    return config
