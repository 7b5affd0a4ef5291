"""What a snapshot is asked for with, beside the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ckpt_engine.persist.job import PersistJob
from ckpt_engine.snapshot import arguments
from ckpt_engine.snapshot.flatten import LazyPredicate
from ckpt_engine.snapshot.plan import Capture
from ckpt_engine.snapshot.software import software
from ckpt_engine.store.manifest import Line


@dataclass(frozen=True, slots=True)
class Instant:
    """When a snapshot is of, in wall-clock and monotonic seconds, the id that all ranks gave it, and its parent."""

    created: float
    monotonic: float
    snapshot: str | None
    parent: str | None


@dataclass(frozen=True, slots=True)
class Request:
    """See `Checkpointer.save` for the fields; all of them are plain values."""

    step: int
    metrics: Mapping[str, float]
    epoch: int | None
    reason: str
    lazy: LazyPredicate | None
    notes: Mapping[str, Any]
    durable: bool

    @classmethod
    def of(cls, step: Any, metrics: Any, epoch: Any, reason: Any, lazy: Any, notes: Any, durable: Any) -> Self:
        """The request that these arguments mean.

        Raises:
            ArgumentError: one of them means nothing that could be stored; names it.
        """
        return cls(
            arguments.whole_number("step", step),
            arguments.metrics(metrics),
            None if epoch is None else arguments.whole_number("epoch", epoch),
            arguments.text("reason", reason),
            arguments.function("lazy", lazy),
            arguments.notes(notes),
            arguments.flag("durable", durable),
        )

    def job(
        self, capture: Capture, number: int, slot: int, when: Instant, rank: int, common: str | None, line: Line
    ) -> PersistJob:
        """The writer's job; see there."""
        return PersistJob(
            job=number,
            slot=slot,
            layout=capture.plan.layout.id,
            tree=tuple((ref.key, ref.id) for ref in capture.plan.skeletons),
            values=capture.values,
            step=self.step,
            epoch=self.epoch,
            reason=self.reason,
            metrics=dict(self.metrics),
            created=when.created,
            instant_monotonic=when.monotonic,
            parent=when.parent,
            notes=self.notes,
            software=software(),
            snapshot=when.snapshot,
            rank=rank,
            common=common,
            line=line,
        )
