"""A SIGTERM that takes effect at the next boundary: until then Lightning's loops do not see it, all other code does.

By themselves the loops would end training in the middle of a validation, or on one of several ranks by a broadcast that
the others do not expect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_LOOPS = "lightning.pytorch.loops."


def defer_sigterm(connector: Any, deferred: Callable[[], bool]) -> Callable[[], None]:
    """Hide `connector.received_sigterm` from Lightning's loops as long as `deferred()`; returns what undoes it."""
    kind = type(connector)

    class Deferring(kind):  # type: ignore[misc, valid-type]
        @property
        def received_sigterm(self) -> bool:
            received = bool(self.__dict__["received_sigterm"])
            return received and not (deferred() and _a_loop_asks())

        @received_sigterm.setter
        def received_sigterm(self, received: bool) -> None:
            self.__dict__["received_sigterm"] = received

    def undo() -> None:
        if type(connector) is Deferring:
            connector.__class__ = kind

    connector.__class__ = Deferring
    return undo


def relayed(connector: Any, launcher: Any) -> Callable[[int, object], None]:
    """A handler that hands a SIGTERM on by the launcher, without Lightning's broadcast amid whatever runs (2.6)."""

    def notify(number: int, _: object) -> None:
        if launcher is not None:
            launcher.kill(number)
        connector.received_sigterm = True

    return notify


def _a_loop_asks() -> bool:
    """A loop reads `trainer.received_sigterm`, which reads the connector's."""
    return str(sys._getframe(3).f_globals.get("__name__", "")).startswith(_LOOPS)
