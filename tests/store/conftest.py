"""The command line, for tests of what it must be able to read."""

from tests.cli.conftest import ckpt

__all__ = ["ckpt"]
