"""The loader that a feed follows and does not keep alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from ckpt_engine.data import exactness, rng
from ckpt_engine.data.sampling import deref
from ckpt_engine.loop.loader_source import LoaderSource


class FollowedLoader:
    """A loader as its consumer sees it: how many passes it counts, and when the torch loader inside begins one.

    Args:
        source: the loader.

    Attributes:
        outer: what the consumer iterates.
        source: the source without its loaders.
        length: batches of a pass, where a sampler says so.
        has_begun: the torch loader inside has begun the current or last pass.
        streams: random streams that are installed once it begins.
    """

    def __init__(self, source: LoaderSource) -> None:
        # Weak, as all that a loader reaches: a loader in a cycle would wait for the garbage collector, and a worker
        # forked meanwhile would try to join its siblings.
        self.outer = weakref.ref(source.outer)
        self.source = replace(source, outer=None, base=cast("Any", None))
        self.length = exactness.known_length(source.base) if source.share == 1 else None
        self.has_begun = False
        self.streams: Mapping[str, Any] | None = None

    @property
    def passes(self) -> int:
        """How many passes it has counted; 0 where it counts none."""
        return int(getattr(deref(self.outer), self.source.counter)) if self.source.counter else 0

    @passes.setter
    def passes(self, count: int) -> None:
        if self.source.counter:
            setattr(deref(self.outer), self.source.counter, count)

    def begin(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The torch loader inside has made this iterator."""
        self.has_begun = True
        if self.streams is not None:
            rng.restore(self.streams)
            self.streams = None
        return iterator
