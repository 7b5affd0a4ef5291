"""How long training spends in the engine's own hooks, waits that are counted elsewhere not included."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import ParamSpec, TypeVar

P, R = ParamSpec("P"), TypeVar("R")


class HookTime:
    """Of this process, on the training thread.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = self._left_out = 0.0

    def counted(self, hook: Callable[P, R]) -> Callable[P, R]:
        """`hook`, whose time counts: where one calls another, that of the outer one."""

        @wraps(hook)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            began = self._now() - self.seconds
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds = self._now() - began

        return run

    def leave_out(self, seconds: float) -> None:
        """Training has waited for so long, in a hook or outside of them, and that is counted already."""
        self._left_out += seconds

    def _now(self) -> float:
        return perf_counter() - self._left_out


hook_time = HookTime()
