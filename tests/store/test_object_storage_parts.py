"""Cutting uploads into parts: the limits of S3 for objects of any size, and no copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import StorageError
from ckpt_engine.store.storage.object_options import ObjectOptions
from ckpt_engine.store.storage.upload_parts import MAX_PART_BYTES, MAX_PARTS, MIN_PART_BYTES, MemoryBlocks, plan_parts

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


@pytest.mark.parametrize(
    ("nbytes", "parts", "size"),
    [
        (1, 1, 1),
        (64 * MIB, 1, 64 * MIB),
        (64 * MIB + 1, 2, 64 * MIB),
        (5 * GIB, 80, 64 * MIB),
        (5 * GIB + 1, 81, 64 * MIB),
        (625 * GIB, MAX_PARTS, 64 * MIB),
        (625 * GIB + 1, 9847, 65 * MIB),
        (5 * TIB, 9987, 525 * MIB),
        (48 * TIB, 9999, 5034 * MIB),
    ],
)
def test_part_sizes_grow_with_the_object(nbytes: int, parts: int, size: int) -> None:
    """64 MiB up to 625 GiB; beyond, whole MiB so that 10,000 parts do."""
    made = plan_parts(nbytes, 64 * MIB)
    assert (len(made), made[0].nbytes) == (parts, size)


def test_an_object_no_store_takes_is_refused_before_anything_is_sent() -> None:
    """More than 10,000 parts of 5 GiB."""
    with pytest.raises(StorageError, match="more than an object store takes"):
        plan_parts(MAX_PARTS * MAX_PART_BYTES + 1, 64 * MIB)


@given(st.integers(1, 40 * TIB), st.integers(1, 6 * GIB))
def test_parts_cover_the_object_within_the_limits(nbytes: int, wanted: int) -> None:
    """Without gaps, in order, all but the last of one legal size, never too many."""
    wanted = min(wanted, MAX_PART_BYTES)
    wanted = max(wanted, nbytes // 300, MIN_PART_BYTES)  # keeps the plan short enough to look at
    if wanted > MAX_PART_BYTES:
        wanted = MAX_PART_BYTES
    parts = plan_parts(nbytes, wanted)
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert len(parts) <= MAX_PARTS
    assert {part.nbytes for part in parts[:-1]} <= {parts[0].nbytes}
    assert all(MIN_PART_BYTES <= part.nbytes <= MAX_PART_BYTES for part in parts[:-1])
    assert sum(part.nbytes for part in parts) == nbytes
    assert [part.start for part in parts] == [(part.number - 1) * parts[0].nbytes for part in parts]
    assert 0 < parts[-1].nbytes <= parts[0].nbytes


@given(st.lists(st.binary(max_size=50), max_size=6), st.data())
def test_any_range_of_blocks_is_what_their_concatenation_has(parts: list[bytes], data: st.DataObject) -> None:
    """Across borders, with empty blocks, in slices of any size."""
    whole = b"".join(parts)
    blocks = MemoryBlocks([memoryview(part) for part in parts])
    assert blocks.nbytes == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    nbytes = data.draw(st.integers(0, len(whole) - start))
    views = list(blocks.views(start, nbytes, data.draw(st.integers(1, 60))))
    assert b"".join(views) == whole[start : start + nbytes]


def test_views_are_the_memory_itself() -> None:
    """Nothing is copied: what changes there is seen."""
    memory = bytearray(10)
    (view,) = MemoryBlocks([memoryview(memory)]).views(2, 4, 100)
    memory[3] = 7
    assert view[1] == 7


@pytest.mark.parametrize(
    "bad",
    [
        {"part_bytes": 1 << 20},
        {"part_bytes": (5 << 30) + 1},
        {"concurrency": 0},
        {"timeout_seconds": "soon"},
        {"verify": "maybe"},
    ],
)
def test_impossible_options_are_refused_by_name(bad: dict[str, object]) -> None:
    """The error comes before anything is sent."""
    with pytest.raises(StorageError, match=next(iter(bad))):
        ObjectOptions.split(bad)


def test_options_of_the_library_are_passed_on() -> None:
    """Ours are taken out, the others stay."""
    ours, rest = ObjectOptions.split({"concurrency": 2, "endpoint_url": "http://x", "key": "k"})
    assert ours.concurrency == 2
    assert rest == {"endpoint_url": "http://x", "key": "k"}
