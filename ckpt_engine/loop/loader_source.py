"""A loader as its consumer sees it, with the torch loader inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ckpt_engine.data import exactness, native
from ckpt_engine.data.position import attach


@dataclass(frozen=True, slots=True)
class LoaderSource:
    """A loader as the consumer sees it and the torch loader inside.

    Args:
        outer: what the consumer iterates.
        base: where batches come from; `outer` itself, if it is a torch loader.
        lookahead: batches that `outer` has fetched when it gives one, beyond that one.
        counter: attribute of `outer` that counts its passes, or "".
        share: batches of `base` that make one of `outer`; 0: `base` is never asked, as another rank has the batches.
        ended: attribute of `outer` that is true once it has given its last batch; asked where `share` is 0.
        dispatched: one process fetches the batches of all.
        inexact: why a resume within an epoch is less exact than the position of `base`, or "".
    """

    outer: Any
    base: DataLoader[Any]
    lookahead: int = 0
    counter: str = ""
    share: int = 1
    ended: str = ""
    dispatched: bool = False
    inexact: str = ""

    length_of = staticmethod(exactness.length_of)

    def reset(self) -> None:
        """Forget the iterators that `outer` has made of a loader that keeps its own position: none was recorded."""
        native.reset(self.base)

    @property
    def dealt(self) -> int | None:
        """How many batches this rank has of an epoch that another number of ranks has begun; None: none has."""
        return (attach(self.base).dealt or (None, None))[1]
