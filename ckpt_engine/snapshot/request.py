"""What a snapshot is asked for with, beside the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_engine.snapshot.flatten import LazyPredicate


@dataclass(frozen=True, slots=True)
class Request:
    """See `Checkpointer.save` for the fields."""

    step: int
    metrics: Mapping[str, float]
    epoch: int | None
    reason: str
    lazy: LazyPredicate | None
    notes: Mapping[str, Any]
    durable: bool
