"""What `make test` has of a test with many cells."""

from __future__ import annotations

import itertools

from tests.support.long_tests import chosen


def test_as_many_values_as_cells_allow_are_chosen() -> None:
    """Of two axes a square's diagonal has each value; of one axis the first cells stay."""
    square = [{("row", row), ("column", column)} for row, column in itertools.product(range(3), range(3))]
    found = [square[index] for index in sorted(chosen(square, 3))]
    assert set().union(*found) == set().union(*square)
    assert chosen([{("row", row)} for row in range(5)], 2) == {0, 1}


def test_a_test_with_few_cells_has_all_of_them() -> None:
    """And one without parameters, which has no values, is a cell itself."""
    assert chosen([set()], 4) == {0}
    assert chosen([{("row", 1)}, {("row", 2)}], 2) == {0, 1}
