"""The division over ranks: complete, equal, and the same on all ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.ranks.boxes import PlacedArray, divide

ITEMS = st.lists(
    st.builds(
        lambda rows, row_bytes, shared: PlacedArray(rows * row_bytes, rows, shared),
        st.integers(0, 4000),
        st.integers(1, 64),
        st.booleans(),
    ),
    max_size=40,
)


@given(ITEMS, st.integers(1, 9))
def test_the_slices_of_every_item_cover_it_once_and_in_order(items: list[PlacedArray], size: int) -> None:
    """Exactly one rank writes each row, and rank 0 writes what it has alone."""
    for item, slices in zip(items, divide(items, size), strict=True):
        at = 0
        for one in slices:
            assert one.start == at
            assert 0 <= one.rank < size
            at += one.rows
        assert at == item.rows
        assert [one.rank for one in slices] == sorted({one.rank for one in slices})
        if not item.shared or item.nbytes == 0:
            assert [one.rank for one in slices] == [0]


@given(
    st.lists(st.tuples(st.integers(64, 4096), st.integers(4, 4096)), min_size=1, max_size=30),
    st.lists(st.integers(1, 3000), max_size=200),
    st.integers(2, 16),
)
def test_every_rank_has_its_share_within_five_percent(big: list[tuple[int, int]], small: list[int], size: int) -> None:
    """However big and small arrays are mixed, as long as a row is less than a hundredth of a share."""
    items = [PlacedArray(rows * row_bytes, rows) for rows, row_bytes in big] + [
        PlacedArray(nbytes, 1) for nbytes in small
    ]
    share = sum(item.nbytes for item in items) / size
    if any(item.nbytes / item.rows > share / 100 for item in items):
        return
    written = [0.0] * size
    for item, slices in zip(items, divide(items, size), strict=True):
        for one in slices:
            written[one.rank] += one.rows * item.nbytes / item.rows
    assert all(abs(nbytes - share) <= 0.05 * share for nbytes in written)


def test_what_rank_0_has_alone_counts_for_its_share() -> None:
    """With a tenth of the bytes only on rank 0 of four, the others write the more of what all have."""
    items = [PlacedArray(100_000, 1, shared=False), PlacedArray(900_000, 9000)]
    slices = divide(items, 4)[1]
    assert [one.rows * 100 for one in slices] == [150_000, 250_000, 250_000, 250_000]


def test_arrays_of_one_row_are_spread_over_the_ranks() -> None:
    """Many arrays that cannot be cut are as good as one that can."""
    slices = divide([PlacedArray(10, 1)] * 1000, 4)
    counts = [sum(one[0].rank == rank for one in slices) for rank in range(4)]
    assert counts == [250, 250, 250, 250]
