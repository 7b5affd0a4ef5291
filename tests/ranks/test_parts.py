"""Parts make one manifest, or none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_engine.copy.job import RankConfig
from ckpt_engine.errors import CorruptError, SnapshotFailedError, SnapshotSkippedError
from ckpt_engine.store import names
from ckpt_engine.store.manifest import RANKS, DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.storage import open_storage
from ckpt_engine.writer import part_records
from ckpt_engine.writer.commit_of_ranks import SessionSnapshots
from ckpt_engine.writer.part_records import PartRecord, Slices

SNAPSHOT = names.session_id("session", 3, 30)


def part(rank: int, size: int = 2, rows: int = 4) -> PartRecord:
    """`rows` rows of 8 bytes of `w`, those of `rank`."""
    pieces = (Piece(0, 4096, rows * 8, f"xxh3-128:{rank:032x}", rows * 8),)
    entries = {"w": Entry("float64", (rows,), pieces, "F64")}
    tree = {RANKS: {str(rank): {"own": rank}}} | ({"w": {"$": "tensor", "entry": "w"}} if rank == 0 else {})
    files = (DataFile(names.data_name(SNAPSHOT, rank), 4096 + rows * 8),)
    info = SnapshotInfo(SNAPSHOT, 3, 30, None, "manual", 0.0, rows * 8)
    manifest = Manifest(info, "0" * 32, {}, {}, files, entries, tree)
    return PartRecord((rank,), size, "same", {"w": Slices((size * rows,), ((rank * rows * 8, 1),))}, manifest)


def test_parts_in_any_order_make_the_manifest_of_all(tmp_path: Path) -> None:
    """Records that were written and read again name every file, every row in order, and what each rank has."""
    storage = open_storage(tmp_path)
    for rank in (1, 0):
        part_records.put(storage, part(rank))
    assert part_records.there(storage) == {SNAPSHOT: {0, 1}}
    whole = part_records.merge([part_records.read(storage, SNAPSHOT, rank) for rank in (1, 0)])
    assert whole.world == {"size": 2}
    assert whole.entries["w"].shape == (8,)
    assert [piece.file for piece in whole.entries["w"].pieces] == [0, 1]
    assert whole.tree[RANKS] == {"0": {"own": 0}, "1": {"own": 1}}
    assert whole.info.nbytes == 64
    assert whole.info.components == {"w": 64, RANKS: 0}


def test_rows_that_no_rank_or_two_ranks_have_make_nothing() -> None:
    """The slices of an entry must cover it."""
    for start in (24, 40):
        wrong = replace(part(1), slices={"w": Slices((8,), ((start, 1),))})
        with pytest.raises(SnapshotFailedError, match="missing, or two ranks"):
            part_records.merge([part(0), wrong])
    with pytest.raises(SnapshotFailedError, match="missing, or two ranks"):
        part_records.merge([part(0), replace(part(1), manifest=replace(part(1).manifest, entries={}))])


def test_other_structures_other_sizes_and_missing_ranks_make_nothing() -> None:
    """The error names the rank whose part does not belong to the others."""
    with pytest.raises(SnapshotFailedError, match="differ in structure"):
        part_records.merge([part(0), replace(part(1), structure="other")])
    with pytest.raises(SnapshotFailedError, match="differ in structure"):
        part_records.merge([part(0), part(1, size=3)])
    with pytest.raises(SnapshotFailedError, match="parts of ranks"):
        part_records.merge([part(1)])
    config = RankConfig(1, 2, "session", 3, 1.0)
    with pytest.raises(SnapshotSkippedError, match="rank 1 has no part in it: busy"):
        part_records.merge([part(0), part_records.no_part(SNAPSHOT, "busy", "0" * 32, config)])


def test_a_damaged_record_is_noticed(tmp_path: Path) -> None:
    """A flipped bit, or a record of another rank under this name."""
    storage = open_storage(tmp_path)
    part_records.put(storage, part(1))
    path = tmp_path / names.part_name(SNAPSHOT, 1)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"own":1', b'"own":2'))
    with pytest.raises(CorruptError):
        part_records.read(storage, SNAPSHOT, 1)
    (tmp_path / names.part_name(SNAPSHOT, 0)).write_bytes(data)
    with pytest.raises(CorruptError, match="is of rank 1"):
        part_records.read(storage, SNAPSHOT, 0)


def test_only_what_is_not_settled_of_this_session_is_in_flight() -> None:
    """Ids say their session; settled ones and those of others are not protected."""
    in_flight = SessionSnapshots("session", 3)
    assert SNAPSHOT in in_flight
    assert names.session_id("session", 99, 7) in in_flight
    assert names.session_id("session", 2, 7) not in in_flight
    assert names.session_id("other", 4, 7) not in in_flight
    in_flight.settle(SNAPSHOT)
    assert SNAPSHOT not in in_flight
    assert "nonsense" not in in_flight
