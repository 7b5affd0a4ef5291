"""Says the one line that nobody may miss, also where logging was never configured, and never twice."""

from __future__ import annotations

import logging
from collections.abc import Callable

Aloud = Callable[[str], object]
"""How a trainer shows its own lines."""


def is_heard(logger: logging.Logger, level: int = logging.INFO) -> bool:
    """Whether a record of that level reaches some handler."""
    one: logging.Logger | None = logger
    while one is not None and logger.isEnabledFor(level):
        if any(handler.level <= level for handler in one.handlers):
            return True
        one = one.parent if one.propagate else None
    return False


def on_stderr(logger: logging.Logger) -> Aloud:
    """To standard error, where Python itself shows the warnings of a logger without handlers.

    A logger that somebody has given handlers, which do not want the line, stays silent.
    """

    def say(line: str) -> None:
        last = logging.lastResort
        if last is not None and not logger.hasHandlers():
            last.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, line, (), None))

    return say


def announce(logger: logging.Logger, text: str, *, line: str | None = None, aloud: Aloud | None = None) -> None:
    """Log `text` at INFO; where nobody would hear it, say it another way.

    Args:
        line: what is said then, if `text` is longer than a line.
        aloud: how; None: see `on_stderr`.
    """
    if is_heard(logger):
        logger.info("%s", text)
    else:
        (aloud or on_stderr(logger))(text if line is None else line)
