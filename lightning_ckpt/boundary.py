"""Names the instants at which a Lightning run can be captured, and which of them a resumed run repeats exactly.

The snapshot instant is the fetch boundary: the last batch is completely finished (validation, schedulers, hooks,
counters) and the next one is about to be asked for. `on_train_batch_end` is not: a validation that is due would be
lost, and after the last batch of an epoch so would be the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What kind of instant a snapshot shows. Stored in snapshots: the values never change."""

    START = "start"
    """The epoch has started, nothing of it was trained."""
    PLAIN = "plain"
    """Between two batches."""
    VALIDATED = "validated"
    """Between two batches, with a validation in between."""
    ACCUMULATING = "accumulating"
    """Between two batches whose gradients belong to the same optimizer step."""
    STOPPED = "stopped"
    """Training ended in the middle of an epoch."""
    FINISHED = "finished"
    """An epoch, and with it training, ended."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the trainer is, as far as choosing a kind needs it.

    Args:
        batches_in_epoch: batches of this epoch that were trained.
        accumulating: gradients wait for an optimizer step.
        validated: a validation ran since the last batch.
    """

    batches_in_epoch: int
    accumulating: bool
    validated: bool


def kind_of(position: Position) -> Kind:
    """The kind of the fetch boundary at `position`."""
    if position.batches_in_epoch == 0:
        return Kind.START
    if position.accumulating:
        return Kind.ACCUMULATING
    return Kind.VALIDATED if position.validated else Kind.PLAIN


def postponed(position: Position) -> str | None:
    """Why no snapshot is taken at this boundary, or None where one may be.

    A due snapshot then comes at the next boundary that allows it: the gradients of an accumulation would make the state
    larger by a whole model, for a place that is a few batches away.
    """
    return "accumulating" if kind_of(position) is Kind.ACCUMULATING else None
