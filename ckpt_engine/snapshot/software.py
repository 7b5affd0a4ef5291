"""Versions of the software that took a snapshot."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch


@cache
def software() -> Mapping[str, str]:
    """Versions that bear on whether a resumed run can be bitwise the same."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("ckpt-engine", "numpy", "lightning", "accelerate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
