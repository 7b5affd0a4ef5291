"""Partial manifests: what the ranks of one root have written, and the whole that all of them make."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.copy.job import RankConfig
from ckpt_engine.errors import CorruptError, SnapshotFailedError, SnapshotSkippedError
from ckpt_engine.ranks.boxes import PlacedArray, divide
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.store.manifest import RANKS, DataFile, Entry, Manifest, Partial, Piece, SnapshotInfo
from ckpt_engine.writer import part_records
from ckpt_engine.writer.part_records import PartRecord, Slices

SNAPSHOT = names.session_id("session", 3, 30)
ROW_BYTES = 24


def made(size: int, rows: list[int], places: tuple[tuple[int, ...], ...] = ()) -> list[PartRecord]:
    """The parts of `size` ranks of arrays with so many rows; each rank has an array of its own, too."""
    found: list[PartRecord] = []
    cut = divide([PlacedArray(n * ROW_BYTES, n) for n in rows], size)
    model = {f"w{n}": {"$": "tensor", "entry": f"w{n}"} for n in range(len(rows))}
    for rank in range(size):
        name = names.data_name(SNAPSHOT, rank)
        entries: dict[str, Entry] = {}
        slices: dict[str, Slices] = {}
        at = 4096
        for number, (total, ones) in enumerate(zip(rows, cut, strict=True)):
            for one in (one for one in ones if one.rank == rank):
                pieces = []
                for row in range(one.start, one.start + one.rows):
                    pieces.append(Piece(0, at, ROW_BYTES, f"xxh3-128:{number:016x}{row:016x}", ROW_BYTES))
                    at += ROW_BYTES
                entries[f"w{number}"] = Entry("float64", (one.rows, 3), tuple(pieces), "F64")
                if one.rows != total:
                    slices[f"w{number}"] = Slices((total, 3), ((one.start * ROW_BYTES, len(pieces)),))
        own = f"{RANKS}/{rank}/own"
        entries[own] = Entry("uint8", (8,), (Piece(0, at, 8, f"xxh3-128:{rank:032x}", 8),), "U8")
        tree = {"model": model} if rank == 0 else {}
        tree = {**tree, RANKS: {str(rank): {"own": {"$": "tensor", "entry": own}}}}
        nbytes = sum(piece.nbytes for entry in entries.values() for piece in entry.pieces)
        info = SnapshotInfo(SNAPSHOT, 3, 30, None, "manual", 0.0, nbytes, components={"model": nbytes - 8, RANKS: 8})
        manifest = Manifest(info, "0" * 32, {}, {}, (DataFile(name, at + 8),), entries, tree)
        place = next((one for one in places if rank in one), ())
        found.append(PartRecord((rank,), size, "same", slices, manifest, place=place))
    return found


@st.composite
def divided(draw: st.DrawFn) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Rows of some arrays, and ranks in places."""
    size = draw(st.integers(2, 8))
    rows = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    of = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    places = tuple(tuple(rank for rank in range(size) if of[rank] == one) for one in dict.fromkeys(of))
    return rows, places


@given(divided())
def test_the_partial_manifests_of_all_places_make_what_all_ranks_make_at_once(
    drawn: tuple[list[int], tuple[tuple[int, ...], ...]],
) -> None:
    """The result is the same for every division of the ranks among roots, and after encoding and decoding."""
    rows, places = drawn
    size = sum(map(len, places))
    expected = part_records.merge(made(size, rows))
    ready = {part.rank: part for part in made(size, rows, places if len(places) > 1 else ())}
    partial = []
    for place in places:
        whole = part_records.merge([ready[rank] for rank in place])
        back = manifest_codec.decode(manifest_codec.encode(whole))
        assert manifest_codec.decode_info(manifest_codec.encode(whole).ljust(4096)) == whole.info
        assert back == whole
        if len(places) == 1:
            assert back == expected
            return
        assert back.info.partial == Partial(place, size)
        assert manifest_codec.version_of(back) == 3
        assert back.info.nbytes == sum(ready[rank].manifest.info.nbytes for rank in place)
        partial.append(part_records.of_manifest(back))
    random.Random(0).shuffle(partial)
    assert part_records.merge(partial) == expected


def test_records_of_a_place_make_no_whole_and_those_of_some_places_make_nothing() -> None:
    """Parts say which ranks make one manifest."""
    ready = made(4, [10, 3], ((0, 3), (1, 2)))
    with pytest.raises(SnapshotFailedError, match=r"parts of ranks \[0\] of 4"):
        part_records.merge(ready[:1])
    with pytest.raises(SnapshotFailedError, match="differ in structure"):
        part_records.merge(ready)
    one = part_records.of_manifest(part_records.merge([ready[0], ready[3]]))
    with pytest.raises(SnapshotFailedError, match=r"parts of ranks \[0, 3\] of 4"):
        part_records.merge([one])
    with pytest.raises(CorruptError, match="is not of some of several ranks"):
        part_records.of_manifest(part_records.merge(made(2, [5])))


def test_a_record_tells_its_place_and_a_place_that_has_nothing_says_so() -> None:
    """As bytes, too; the record of a place is its manifest."""
    ready = made(4, [10], ((0, 1), (2, 3)))
    back = part_records.decode(part_records.encode(ready[3]), "here")
    assert replace(back, manifest=ready[3].manifest) == ready[3]
    whole = part_records.merge(ready[2:])
    assert part_records.decode(manifest_codec.encode(whole), "here") == part_records.of_manifest(whole)
    config = replace(RankConfig(2, 4, "session", 3, 1.0), place=(2, 3), places=((0, 1), (2, 3)))
    missing = replace(part_records.no_part(SNAPSHOT, "it was removed", "0" * 32, config), place=())
    with pytest.raises(SnapshotSkippedError, match="rank 2 has no part in it: it was removed"):
        part_records.merge([part_records.of_manifest(part_records.merge(ready[:2])), missing])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((1,), "rank 1 of 4"), ((2, 3), "ranks 2, 3 of 4"), ((0, 2), "ranks 0, 2 of 4"), ((1, 2, 3), "ranks 1 to 3 of 4")],
)
def test_a_text_says_whose_shares_are_there(ranks: tuple[int, ...], text: str) -> None:
    """The ranks of a partial manifest are named in words."""
    assert str(Partial(ranks, 4)) == text
