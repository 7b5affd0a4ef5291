"""The command line as a user calls it."""

from __future__ import annotations

from tests.cli.conftest import ckpt

__all__ = ["ckpt"]
