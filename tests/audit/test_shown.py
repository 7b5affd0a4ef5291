"""A counter that is only printed or logged decides nothing, nor does a list that is a record; any other use may."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckpt_engine.audit.carried import only_shows_its_count
from ckpt_engine.audit.source import decides

log = logging.getLogger(__name__)


class Batches:
    """Notes at its first item what is known of its consumer's counter."""

    def __init__(self) -> None:
        self.found: bool | None = None

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.found is not None:
            raise StopIteration
        self.found = only_shows_its_count(sys._getframe(1))
        return 0


def prints(batches: Batches) -> None:
    loss = 0.0
    for i, batch in enumerate(batches):
        loss += batch
        if i % 2 == 0:
            print(f"step {i:>5}: {round(loss, 3)}", len(str(batch)))


def logs_at_some(batches: Batches) -> None:
    for i, (batch) in enumerate(batches):
        if batch > 3:
            log.info("%d of %d", i, batch)
        elif batch > 2:
            batch.train()  # type: ignore[attr-defined]


def never_reads_it(batches: Batches) -> None:
    for i, batch in enumerate(batches):  # noqa: B007
        sum([batch])


def counts_in_two_loops(batches: Batches) -> None:
    for i, batch in enumerate(batches):
        print(i, batch)
    for i, batch in enumerate([]):
        print(i, batch)


def another_has_its_own(batches: Batches) -> None:
    def double(i: int) -> int:
        return 2 * i

    for i, batch in enumerate(batches):
        print(i, batch)
        double(batch)


def breaks(batches: Batches) -> None:
    for i, _ in enumerate(batches):
        if i == 3:
            break


def trains_at_some(batches: Batches) -> None:
    for i, batch in enumerate(batches):
        if i % 2:
            print(i)
            sum([batch])


def prints_what_draws(batches: Batches) -> None:
    for i, batch in enumerate(batches):
        if i % 2:
            print(i, sum([batch]))


def hands_it_on(batches: Batches) -> None:
    for i, batch in enumerate(batches):
        sum([i, batch])


def keeps_it(batches: Batches) -> None:
    for i, _ in enumerate(batches):
        last = i
    print(last)


def returns_it(batches: Batches) -> int:
    i = 0
    for i, _ in enumerate(batches):  # noqa: B007
        pass
    return i


def loops_by_it(batches: Batches) -> None:
    for i, _ in enumerate(batches):
        for _ in range(i):
            print(i)


def gives_it_to_a_function_inside(batches: Batches) -> None:
    for i, _ in enumerate(batches):

        def shift() -> int:
            return i  # noqa: B023

        shift()


def has_another_one_in_a_list_only(batches: Batches) -> None:
    def shift() -> Any:
        return [i for i in range(2)], i  # noqa: C416

    for i, _ in enumerate(batches):  # noqa: B007
        shift()


def shows_all_it_has(batches: Batches) -> None:
    for i, _ in enumerate(batches):  # noqa: B007
        print(locals())


@pytest.mark.parametrize(
    "loop",
    [prints, logs_at_some, never_reads_it, counts_in_two_loops, another_has_its_own],
    ids=lambda loop: loop.__name__,
)
def test_a_counter_that_is_only_shown(loop: Callable[[Any], Any]) -> None:
    """A counter that is used only in texts, in conditions for them, or not at all counts as one that is only shown."""
    batches = Batches()
    loop(batches)
    assert batches.found is True


@pytest.mark.parametrize(
    "loop",
    [
        *(breaks, trains_at_some, prints_what_draws, hands_it_on, keeps_it, returns_it, loops_by_it),
        *(gives_it_to_a_function_inside, has_another_one_in_a_list_only, shows_all_it_has),
    ],
    ids=lambda loop: loop.__name__,
)
def test_a_counter_that_may_decide_something(loop: Callable[[Any], Any]) -> None:
    """Anything that is not evidently harmless."""
    batches = Batches()
    loop(batches)
    assert batches.found is False


def test_code_without_its_source_may_decide() -> None:
    """What was typed or generated cannot be read."""
    batches = Batches()
    exec("for i, batch in enumerate(batches): print(i)", {"batches": batches})
    assert batches.found is False


class Once:
    """Asked for a second item, it notes whether its consumer's list `kept` decides something."""

    def __init__(self) -> None:
        self.found: bool | None = None

    def __iter__(self) -> Iterator[float]:
        yield 0.5
        self.found = decides(sys._getframe(1), "kept")


def writes_down(batches: Once) -> Any:
    kept, means = [], []
    for _ in range(1):
        for batch in batches:
            kept.append(batch)
            if len(kept) % 100 == 0:
                print(f"mean {sum(kept) / len(kept)}")
            if len(kept) > 1000:
                kept = kept[-100:]
            mean = sum(kept[-10:]) / 10
            log.info("%s", mean)
        means.append(sum(kept) / len(kept))
    if sum(kept) > 3:
        return means
    return kept


def saves_the_best(batches: Once) -> None:
    kept, best = [], 1.0
    for batch in batches:
        kept += [batch]
        mean = sum(one for one in kept) / len(kept)
        if mean < best:
            best = mean
            print("better", best)


def shows_in_a_function(batches: Once) -> None:
    kept: list[float] = []

    def show() -> None:
        print(kept)

    for batch in batches:
        kept.append(batch)
        show()


def notes(book: list[float], value: float) -> None:
    book.append(value)


def gives_it_to_who_writes(batches: Once) -> None:
    kept: list[float] = []
    for batch in batches:
        kept.append(batch)
        notes(kept, batch)


def shuffles(book: list[float]) -> None:
    random.shuffle(book)


def gives_it_to_who_shuffles(batches: Once) -> None:
    kept: list[float] = []
    for batch in batches:
        kept.append(batch)
        shuffles(book=kept)


def decides_by_it(batches: Once) -> float:
    kept, loss = [], 0.0
    for batch in batches:
        kept.append(batch)
        loss = batch
        if len(kept) > 3 and kept[-1] > kept[-3]:
            loss = batch / 2
    return loss


def draws_from_it(batches: Once) -> None:
    kept = []
    for batch in batches:
        kept.append(batch)
        loss = batch + random.choice(kept)
        print(loss)


def hands_on_its_mean(batches: Once) -> None:
    kept = []
    for batch in batches:
        kept.append(batch)
        mean = sum(kept) / len(kept)
        bool(mean)


def draws_in_a_function(batches: Once) -> None:
    kept: list[float] = []

    def drawn() -> float:
        return random.choice(kept)

    for batch in batches:
        kept.append(batch)
        print(drawn())


@pytest.mark.parametrize(
    "loop", [writes_down, saves_the_best, shows_in_a_function, gives_it_to_who_writes], ids=lambda loop: loop.__name__
)
def test_a_list_that_is_a_record(loop: Callable[[Any], Any]) -> None:
    """It grows, is cut, and what is made of it in the loop is shown or written down."""
    batches = Once()
    loop(batches)
    assert batches.found is False


@pytest.mark.parametrize(
    "loop",
    [decides_by_it, draws_from_it, hands_on_its_mean, draws_in_a_function, gives_it_to_who_shuffles],
    ids=lambda loop: loop.__name__,
)
def test_a_list_that_decides(loop: Callable[[Any], Any]) -> None:
    """A list that decides something in the loop, or in a function that it calls, is named."""
    batches = Once()
    loop(batches)
    assert batches.found is True
