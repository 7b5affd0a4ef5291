"""The sink that passes events on to several others and survives each of them."""

from __future__ import annotations

import logging

from ckpt_engine.observe.events import Event, EventSink
from ckpt_engine.observe.log import LOGGER_NAME


class FanOutSink:
    """Passes every event to every sink, in the order they were added.

    A sink that raises is disabled with one warning; training and the other sinks go on.
    """

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = list(sinks)

    def add(self, sink: EventSink) -> None:
        """Passes later events to `sink` too."""
        self._sinks.append(sink)

    def remove(self, sink: EventSink) -> None:
        """Stops passing events to `sink`; nothing happens if it is not there (any more)."""
        self._sinks = [one for one in self._sinks if one is not sink]

    def emit(self, event: Event) -> None:
        for sink in tuple(self._sinks):
            try:
                sink.emit(event)
            except Exception:
                # Whatever a sink of a user raises must not reach the training loop.
                self.remove(sink)
                logging.getLogger(LOGGER_NAME).warning(
                    "%s failed on %s and gets no more events", type(sink).__name__, event.name, exc_info=True
                )
