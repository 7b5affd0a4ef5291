"""Reports the events of one part of a run, each failure once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ckpt_engine.observe.events import Event, Notice


@dataclass(eq=False)
class Reporter:
    """Reports for one part of a run. Any thread.

    Args:
        emit: takes the events.
    """

    emit: Callable[[Event], object]
    _failing: set[str] = field(default_factory=set, init=False)

    def emit_all(self, events: Iterable[Event]) -> None:
        """Report one after another."""
        for event in events:
            self.emit(event)

    def warn(self, text: str) -> None:
        """Report what a user should know."""
        self.emit(Notice("WARNING", text))

    def failed(self, what: str, text: str) -> None:
        """Warn that something fails: once, until it has worked again."""
        if what not in self._failing:
            self._failing.add(what)
            self.warn(text)

    def worked(self, what: str) -> bool:
        """Note that something works; whether it failed the last time."""
        failed = what in self._failing
        self._failing.discard(what)
        return failed
