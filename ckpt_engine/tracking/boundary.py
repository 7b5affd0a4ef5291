"""Where a snapshot of a loop may be taken: a boundary that a resumed script comes back to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_engine.tracking.feed import Feed


def obstacle_of(feed: Feed | None, *, accumulating: bool) -> str | None:
    """Why no snapshot is taken when `feed` is asked for a batch, or None where one may be.

    At the end of an epoch what the script does between epochs is still to come, and at the start of a pass nobody
    knows whether it will train: both wait for the next batch, unless epochs are too short for that.
    """
    if accumulating:
        return "accumulating"
    if feed is None:
        return None
    if feed.delivered == 0:
        return None if feed.starts_only else "start of an epoch"
    return "end of an epoch" if feed.at_end else None


def is_at_end(state: Mapping[str, Any]) -> bool:
    """Whether this state of a feed is after its last batch, although its length was not known."""
    return bool(state["delivered"]) and state["position"]["phase"] != "within"
