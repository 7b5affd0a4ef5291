"""A counter that is only printed or logged decides nothing; any other use may."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckpt_engine.audit.source import only_shows_its_count

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
