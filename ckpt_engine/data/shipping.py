"""Loader workers send their random streams along with each batch and can be started in the middle of an epoch.

`ShippingCollate` and `RoleInit` stand in for the loader's `collate_fn` and `worker_init_fn` while an iterator is built.
Both travel to the workers (by fork or pickle), so they hold nothing but the user's functions and plain bytes.

An iterator deals its first batch to the worker at position 0. A resumed epoch continues where the uninterrupted run
would have asked worker `first`: the worker at position w therefore plays the *role* `(w + first) % n`, with that
worker's id, seed, streams and dataset state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from ckpt_engine.data import native, rng
from ckpt_engine.data.torch_private import assume_worker_role

__all__ = ["RoleInit", "Shipped", "ShippingCollate", "WatchingCollate", "WorkerState", "from_earlier_epoch"]

WorkerState = dict[str, Any]
"""One worker right after a batch: `{"rng": host streams}`, for a dataset with `state_dict` also `"dataset"` and, once
its shard gave a short batch, `"ended"`; `"draws"` if loading drew at random where that matters; `"earlier_epoch"` if
that batch belonged to one."""

_begun: tuple[object, ...] | None = None
"""In a worker: its random streams before its first sample."""


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
        batch_size: of the loader; None without batching.
    """

    def __init__(self, collate: Callable[[Any], Any], batch_size: int | None) -> None:
        self.collate = collate
        self.batch_size = batch_size
        self._left: tuple[object, ...] | None = None
        """In a worker: its random streams after the batch before."""
        self._draws = False

    def __call__(self, samples: Any) -> Any:
        came = rng.probe()
        batch = self.collate(samples)
        info = get_worker_info()
        if info is None:
            return batch
        state: WorkerState = {"rng": rng.capture_host()}
        dataset: Any = info.dataset
        if native.is_stateful(dataset):
            # A copy: the queue pickles in a thread of its own while the dataset already makes the next batch.
            state |= {"dataset" if key == "state" else key: one for key, one in native.dataset_state(dataset).items()}
            if isinstance(dataset, IterableDataset):
                if self.batch_size is not None:
                    state["ended"] = len(samples) < self.batch_size
                if native.repeats_work(dataset):
                    self._draws = self._draws or came != (self._left or _begun)
                    state["draws"] = self._draws
                    self._left = rng.probe()
        return Shipped(batch, info.id, state)


class WatchingCollate:
    """The user's `collate_fn`, in the process of the trainer.

    Args:
        loaded: called before it: the samples of a batch are there.
    """

    def __init__(self, collate: Callable[[Any], Any], loaded: Callable[[], None]) -> None:
        self.collate, self._loaded = collate, loaded

    def __call__(self, samples: Any) -> Any:
        self._loaded()
        return self.collate(samples)


class RoleInit:
    """The user's `worker_init_fn`, run as the right role and followed by that role's recorded state.

    Args:
        init: the user's function, or None.
        first: the role whose turn it is.
        states: the state of each role after its last delivered batch; roles without one start as torch starts them.
        batch_size: of the loader; None without batching.
    """

    def __init__(
        self,
        init: Callable[[int], None] | None,
        first: int,
        states: Sequence[Mapping[str, Any] | None],
        batch_size: int | None,
    ) -> None:
        self.init = init
        self.first = first
        self.states = tuple(states)
        self.batch_size = batch_size

    def __call__(self, worker: int) -> None:
        global _begun
        self._begin(worker)
        _begun = rng.probe()

    def _begin(self, worker: int) -> None:
        role = (worker + self.first) % len(self.states)
        if role != worker:
            assume_worker_role(role)
        if self.init is not None:
            self.init(role)
        state = self.states[role]
        if state is None:
            return
        info = get_worker_info()
        assert info is not None
        dataset: Any = info.dataset
        if "dataset" in state:
            native.load(dataset, {"state": state["dataset"], "live": state.get("live")})
        rng.restore(state["rng"])
        if not isinstance(dataset, IterableDataset) or "dataset" not in state:
            return
        if not state.get("earlier_epoch"):
            native.continue_once(dataset, ended=state.get("ended", False))
            return
        if not state.get("ended") and not native.keeps_nothing(dataset):
            # The shard ended after that batch, in a fetch of which nothing was delivered: do what it did.
            for _ in itertools.islice(dataset, self.batch_size or 1):
                pass
        native.begin_anew(dataset)


def from_earlier_epoch(state: WorkerState | None) -> WorkerState | None:
    """What is known about a persistent worker at the start of the epoch after the one `state` is from."""
    return None if state is None else {**state, "earlier_epoch": True}
