"""A loader whose batches one process fetches for all: where each of the others stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader

from accelerate_ckpt.private import source_of
from ckpt_engine.data import rng
from ckpt_engine.data.changed_loader import require_between_epochs
from ckpt_engine.data.exactness import Level
from ckpt_engine.errors import ResumeError
from ckpt_engine.loop.feed import Feed, obstacle_of
from ckpt_engine.loop.loader_source import LoaderSource
from tests.loop.runs import Stream

BATCHES = 3


class Elsewhere:
    """Gives what another process fetches: the loader inside is begun, as Accelerate does it, and never asked."""

    def __init__(self, left: int = BATCHES) -> None:
        self.base: DataLoader[Any] = DataLoader(range(12), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        self.iteration, self.ended, self._left = 0, False, left

    def __iter__(self) -> Iterator[int]:
        self.ended, begun = False, iter(self.base)
        for number in range(self._left):
            self.ended = number == self._left - 1
            yield number
        self.iteration, self._left = self.iteration + 1, BATCHES
        del begun


class Boundaries:
    """Notes at each boundary what is in the way of a snapshot, and the state."""

    def __init__(self) -> None:
        self.obstacles: list[str | None] = []
        self.states: list[Any] = []

    def asked(self, feed: Feed) -> None:
        self.obstacles.append(obstacle_of(feed, accumulating=False))
        self.states.append(feed.state())

    def given(self, feed: Feed, batch: Any) -> None: ...

    def failed(self, feed: Feed, error: Exception) -> None: ...

    def over(self, feed: Feed) -> None: ...


def followed(left: int = BATCHES) -> tuple[Elsewhere, Boundaries, Feed]:
    loader, seen = Elsewhere(left), Boundaries()
    return loader, seen, Feed("loader", LoaderSource(loader, loader.base, 1, "iteration", 0, "ended"), seen)


def test_the_end_of_an_epoch_is_known_where_no_batch_is_fetched() -> None:
    """Else one rank would stop there, and the one that fetches would go on."""
    loader, seen, feed = followed()
    assert list(loader) == list(range(BATCHES))
    assert seen.obstacles == ["start of an epoch", None, None, "end of an epoch"]
    feed.release()


def test_streams_are_put_back_where_no_batch_is_fetched() -> None:
    """Once the loader inside is begun; the next epoch begins by itself, and draws as it would have."""
    loader, seen, feed = followed()
    torch.manual_seed(1)
    draws, streams = [], []
    for _ in range(2):
        for _ in loader:
            draws.append(torch.rand(()).item())
            streams.append(rng.capture())
    feed.release()
    torch.manual_seed(2)
    loader, _, feed = followed(BATCHES - 1)
    feed.load(seen.states[1], streams[0])  # after the first batch
    torch.manual_seed(3)
    assert [torch.rand(()).item() for _ in range(2) for _ in loader] == draws[1:]
    feed.release()


class Several:
    """What a loader knows of the processes."""

    num_processes, process_index = 2, 0


@pytest.mark.parametrize(
    ("samples", "drops", "reported"),
    [(24, False, False), (25, False, True), (25, True, False)],
    ids=["divides", "does not divide", "is dropped"],
)
def test_a_last_batch_that_is_filled_is_reported(samples: int, drops: bool, reported: bool) -> None:
    """With the first samples of the pass, of which a resumed one has others; a resume between epochs is exact."""
    loader = DataLoaderDispatcher(range(samples), batch_size=4, _drop_last=drops)
    loader.state = Several()
    source = source_of(loader)
    feed = Feed("loader", source, Boundaries())
    feed.load(feed.state(), None)
    assert feed.restoration is not None
    assert feed.restoration.exactness.level is Level.EXACT
    feed.begin_after(0, 2)
    assert feed.restoration.exactness.level is (Level.ORDER_ONLY if reported else Level.EXACT)
    feed.release()


def test_an_unknown_last_batch_is_reported() -> None:
    """A stream may end anywhere; alone, a process fills nothing."""
    loader = DataLoaderDispatcher(Stream(), batch_size=4)
    assert not source_of(loader).inexact
    loader.state = Several()
    assert source_of(loader).inexact


def test_the_rest_of_an_epoch_is_not_divided() -> None:
    """One process has fetched for all: other ranks would have no position of their own."""
    loader, _, feed = followed()
    assert not loader.iteration
    between = feed.state()["position"]
    require_between_epochs([between])
    with pytest.raises(ResumeError, match=r"one process fetches the batches of all \(dispatch_batches\)"):
        require_between_epochs([{**between, "phase": "within", "batches": 2}])
    feed.release()
