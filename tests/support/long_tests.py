"""What `make test` leaves to `make test-long`: tests marked `long`, and of a test marked `cells(n)` all cells but n."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before tests are selected by their marks."""
    cells: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.get_closest_marker("cells")
            and not item.get_closest_marker("slow")
        ):
            parent = item.parent.nodeid if item.parent is not None else ""
            cells.setdefault((parent, item.originalname), []).append(item)
    for of_one in cells.values():
        marker = of_one[0].get_closest_marker("cells")
        assert marker is not None
        kept = chosen([_values(one) for one in of_one], marker.args[0])
        for index, item in enumerate(of_one):
            if index not in kept:
                item.add_marker(pytest.mark.long)


def _values(item: pytest.Function) -> set[tuple[str, int]]:
    return {(name, id(value)) for name, value in item.callspec.params.items()} if hasattr(item, "callspec") else set()


def chosen(cells: Sequence[set[tuple[str, int]]], most: int) -> set[int]:
    """The indices of so many cells that together have as many values as possible; of equal ones the first."""
    kept, left = set[int](), set[tuple[str, int]]().union(*cells)
    while len(kept) < min(most, len(cells)):
        best = max((i for i in range(len(cells)) if i not in kept), key=lambda i: (len(cells[i] & left), -i))
        kept.add(best)
        left -= cells[best]
    return kept
