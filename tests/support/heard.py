"""A sink that keeps what it hears."""

from __future__ import annotations

from ckpt_engine.observe.events import Event


class Heard:
    """Events in their order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)
