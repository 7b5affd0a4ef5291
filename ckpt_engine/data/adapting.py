"""Samplers that change with training (curricula, losses, weights) and cannot save themselves: found out and named.

A sampler without `state_dict` is put back by its generators and plain counters. Whether that was all shows in its other
attributes: what they hold now is compared with what they held when the snapshot was taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from ckpt_engine.data import streams
from ckpt_engine.data.exactness import Exactness, Level
from ckpt_engine.data.identity import checksum
from ckpt_engine.data.native import is_stateful

__all__ = ["Attributes", "attributes", "changed", "compared"]

Attributes = dict[str, int]
"""Checksums of containers, tensors and arrays by path."""


def attributes(loader: DataLoader[Any]) -> Attributes:
    """Of all samplers that may change by themselves and have no state of their own."""
    if streams.draws_at_start_only(loader):
        return {}  # torch's own: nothing of them changes
    found: Attributes = {}
    for path, holder in streams.holders(loader):
        if holder is loader or is_stateful(holder):
            continue
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if value is not getattr(loader, "dataset", None) and (one := checksum(value)) is not None:
                found[f"{path}.{name}"] = one
    return found


def changed(loader: DataLoader[Any], baseline: Attributes) -> Attributes:
    """Those that are not as they were before training."""
    return {path: value for path, value in attributes(loader).items() if baseline.get(path) != value}


def compared(loader: DataLoader[Any], state: Mapping[str, Any], *, between_epochs: bool) -> Exactness:
    """How exactly the samplers are as they were: named are attributes that were changed and are others now.

    Args:
        state: of the position, with what `changed` has found, and which of these the samplers make at each start.
        between_epochs: those will be made again.
    """
    saved = {
        path: value
        for path, value in state.get("attributes", {}).items()
        if not (between_epochs and path in state.get("made_at_start", ()))
    }
    now = attributes(loader) if saved else {}
    others = [path.rpartition(".") for path, value in saved.items() if now.get(path) != value]
    if not others:
        return Exactness()
    live = dict(streams.holders(loader))
    names = ", ".join(f"{type(live.get(owner)).__name__}.{name}" for owner, _, name in others)
    why = (
        f"training has changed {names}, which the sampler cannot save: what it gives from here on may differ; give it "
        "state_dict() and load_state_dict()"
    )
    return Exactness().lowered(Level.NOT_RESTORED, why)
