"""A stager that hands over old bytes, as those of other writers have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ckpt_engine.snapshot import pipeline


def is_moment(name: str) -> bool:
    """The entry of a moment of Adam or SGD."""
    return any(kind in name for kind in ("exp_avg", "momentum_buffer"))


def is_weight(name: str) -> bool:
    """The entry of a weight."""
    return name.endswith((".weight", ".bias")) and not is_moment(name)


def staging_of_old(chosen: Callable[[str], bool], fresh: int) -> Callable[..., Any]:
    """In the place of `pipeline.Staging`: copies what the chosen entries had in an earlier snapshot.

    Args:
        fresh: the number of that snapshot; those up to it have what they should.
    """
    staging, taken, old = pipeline.Staging, [0], dict[str, torch.Tensor]()

    def staged(capture: Any, *args: Any, **more: Any) -> Any:
        taken[0] += 1
        arrays, addresses = list(capture.arrays), list(capture.addresses)
        for source in capture.plan.sources:
            if not chosen(source.name):
                continue
            if taken[0] <= fresh:
                old[source.name] = arrays[source.array].detach().clone()
            arrays[source.array] = old[source.name]
            addresses[source.array] = old[source.name].data_ptr()
        return staging(dataclasses.replace(capture, arrays=arrays, addresses=addresses), *args, **more)

    return staged
