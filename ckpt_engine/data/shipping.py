"""Loader workers send their random streams along with each batch and can be started in the middle of an epoch.

`ShippingCollate` and `RoleInit` stand in for the loader's `collate_fn` and `worker_init_fn` while an iterator is built.
Both travel to the workers (by fork or pickle), so they hold nothing but the user's functions and plain bytes.

A resumed epoch that starts at batch k deals its first batch to position 0, which the uninterrupted run would have dealt
to worker `k % n`: the worker at position w therefore plays the *role* `(w + k) % n`, with that worker's id, seed and
streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from ckpt_engine.data import rng
from ckpt_engine.data.torch_private import assume_worker_role

__all__ = ["RoleInit", "Shipped", "ShippingCollate", "WorkerState"]

WorkerState = dict[str, Any]
"""`{"rng": host streams}`, plus `"dataset"` for a dataset with `state_dict`: one worker right after a batch."""


class Shipped(NamedTuple):
    """A batch and its worker right after making it.

    A named tuple, because torch's pin-memory thread looks into those; bytes, because a tensor would cost a file
    descriptor per batch.
    """

    batch: Any
    role: int
    state: WorkerState


class ShippingCollate:
    """The user's `collate_fn`, its result wrapped in `Shipped` when run in a worker.

    Args:
        collate: the user's function.
        with_dataset: also send the state of a dataset that has `state_dict` (StatefulDataLoader does that by itself).
    """

    def __init__(self, collate: Callable[[Any], Any], *, with_dataset: bool) -> None:
        self.collate = collate
        self.with_dataset = with_dataset

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        info = get_worker_info()
        if info is None:
            return batch
        state: WorkerState = {"rng": rng.capture_host()}
        if self.with_dataset and is_stateful(info.dataset):
            state["dataset"] = info.dataset.state_dict()  # type: ignore[attr-defined]
        return Shipped(batch, info.id, state)


class RoleInit:
    """The user's `worker_init_fn`, run as the right role and followed by that role's recorded state.

    Args:
        init: the user's function, or None.
        first: batches of the epoch that precede the first one these workers make.
        states: the state of each role after its last delivered batch; roles without one start as torch starts them.
    """

    def __init__(
        self,
        init: Callable[[int], None] | None,
        first: int,
        states: Sequence[Mapping[str, Any] | None],
    ) -> None:
        self.init = init
        self.first = first
        self.states = tuple(states)

    def __call__(self, worker: int) -> None:
        role = (worker + self.first) % len(self.states)
        if role != worker:
            assume_worker_role(role)
        if self.init is not None:
            self.init(role)
        state = self.states[role]
        if state is None:
            return
        if "dataset" in state:
            info = get_worker_info()
            assert info is not None
            info.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        rng.restore(state["rng"])


def is_stateful(value: object) -> bool:
    """True if `value` can save and load its own state."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
