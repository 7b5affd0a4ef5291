"""The states in the life of a tracked loop.

Those of the passes over its loaders are part of it. docs/architecture.md has the picture. A state is asked with `is`,
and left with `to`, which knows the table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Self

from ckpt_engine.observe.events import LOG


class _Phase(Enum):
    def to(self, phase: Self) -> Self:
        """The state after this one; it may be the same."""
        if phase is not self and phase not in MOVES[self]:
            unexpected(f"{self} -> {phase}")
        return phase


class LoopPhase(_Phase):
    """How far a tracked loop is between its start and its end."""

    FRESH = "nothing was trained, and no place of a snapshot is looked for"
    RESTORING = "the objects are those of a snapshot, and the loop is on its way to the place of that"
    ARRIVED = "it trains: what only a resume needs is taken away at the next request for a batch"
    TRAINING = "it trains, and nothing is put back any more"
    CLOSED = "it takes no snapshots any more"


class PassPhase(_Phase):
    """How far the consumer of a loader is in its pass."""

    UNBEGUN = "no pass has begun, or the next one continues a saved one"
    BEGUN = "a pass has begun, and was asked for no batch yet"
    RUNNING = "it was asked for one"
    ENDED = "its consumer knows that there are no more batches"
    LEFT = "its consumer has left it"


def unexpected(move: str) -> None:
    """A move that the table does not have is a fault of this package, and no reason to end training. Tests raise."""
    LOG.error("internal error, please report it: the loop made the unexpected move %s", move)


FRESH, RESTORING, ARRIVED, TRAINING, CLOSED = LoopPhase
UNBEGUN, BEGUN, RUNNING, ENDED, LEFT = PassPhase
OPEN = (BEGUN, RUNNING)
MOVES: Mapping[_Phase, Collection[_Phase]] = {
    FRESH: {RESTORING, ARRIVED, CLOSED},
    RESTORING: {FRESH, ARRIVED, CLOSED},
    ARRIVED: {TRAINING, CLOSED},
    TRAINING: {CLOSED},
    CLOSED: set(),
    UNBEGUN: {BEGUN, ENDED, LEFT},  # what was loaded does not count: the pass before is the last one again
    BEGUN: {RUNNING, LEFT},
    RUNNING: {ENDED, LEFT},
    ENDED: {BEGUN, UNBEGUN},
    LEFT: {BEGUN, UNBEGUN},
}
"""What may follow each state, besides itself."""
