"""The command line as a user calls it."""

from __future__ import annotations

from tests.cli.conftest import ckpt
from tests.support.arena import arena_at_once

__all__ = ["arena_at_once", "ckpt"]
