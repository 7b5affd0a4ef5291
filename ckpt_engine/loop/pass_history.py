"""What the passes over a loader have shown so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassHistory:
    """What a snapshot remembers of the passes over a loader, besides where the current one is.

    Args:
        epochs: passes that are over and in which weights changed.
        starts_only: in the last one of those no snapshot could have been taken in its middle: epochs are too short.
        alone: the last pass changed weights, and no other pass that did was running when it ended.
        longest: most batches of one pass that the consumer was given before a step; None: not known.
    """

    epochs: int = 0
    starts_only: bool = False
    alone: bool = False
    longest: int | None = 0
