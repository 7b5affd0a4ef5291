"""Laws of boxes."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import FormatError
from ckpt_engine.ranks.boxes import Box, boxes_of, runs, tiles

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_runs_are_the_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    """At most two boxes per dimension, one behind another, are any run of elements."""
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    array = np.arange(prod(shape)).reshape(shape)
    found = list(runs(shape, start, stop))
    elements = [int(x) for box in found for x in array[box.slices(Box.whole(shape))].ravel()]
    assert elements == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape))


@given(SHAPES, st.data())
def test_an_overlap_is_what_both_have(shape: tuple[int, ...], data: st.DataObject) -> None:
    """The overlap is the same in both orders."""

    def box() -> Box:
        offsets = [data.draw(st.integers(0, n - 1)) for n in shape]
        return Box(tuple(offsets), tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, offsets, strict=True)))

    array = np.arange(prod(shape)).reshape(shape)
    a, b = box(), box()
    both = a.overlap(b)
    of = [set(array[one.slices(Box.whole(shape))].ravel().tolist()) for one in (a, b)]
    assert a.overlap(b) == b.overlap(a)
    assert (set(array[both.slices(Box.whole(shape))].ravel().tolist()) if both else set()) == of[0] & of[1]


def test_only_boxes_that_make_the_array_are_blocks() -> None:
    """Gaps, overlaps and other shapes in a manifest are damage."""
    good = [[[0, 0], [4, 2]], [[0, 2], [4, 3]]]
    assert len(boxes_of({"blocks": good}, (4, 5))) == 2
    assert boxes_of({}, (4, 5)) == (Box.whole((4, 5)),)
    bad = [good[:1], [*good, good[0]], [[[0, 0], [4, 2]], [[0, 1], [4, 4]]], [[[0], [4]]], [1], "x"]
    for blocks in bad:
        with pytest.raises(FormatError):
            boxes_of({"blocks": blocks}, (4, 5))
    assert not tiles((4, 4), [Box((0, 0), (2, 2)), Box((2, 2), (2, 2))])
