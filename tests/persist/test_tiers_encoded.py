"""Further tiers that store what they get encoded: the same snapshots, within the same limits."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ckpt_engine.copy import encoded_copy
from ckpt_engine.copy.encoded_copy import Encoding, Tally
from ckpt_engine.copy.transfer import RunText, adopt_run
from ckpt_engine.errors import StorageFullError
from ckpt_engine.observe.events import SnapshotCommitted, SnapshotReplicated, SnapshotsForgotten, TierDegraded
from ckpt_engine.store import names
from ckpt_engine.store.codecs.codec import get_codec
from ckpt_engine.store.container import build_header, digest
from ckpt_engine.store.decode import decoder_of
from ckpt_engine.store.manifest import RAW, DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.run_records import read_status
from tests.persist.staged import weight_bytes
from tests.persist.tiered import Run, steps
from tests.support.copies import copy_encoded


def decoded_steps(root: Path) -> list[int]:
    """The steps of all snapshots, whose bytes are those of their step."""
    repository = Repository(LocalStorage(root))
    found = []
    for info in repository.list():
        manifest = repository.read(info.id)
        decoder = decoder_of(repository.storage, manifest)
        entry = manifest.entries["model.weight"]
        data = bytearray(sum(piece.raw_nbytes for piece in entry.pieces))
        for start, piece in entry.placed():
            decoder.read("model.weight", start, piece, memoryview(data)[start : start + piece.raw_nbytes])
        assert data == weight_bytes(info.step, len(data))
        found.append(info.step)
    return found


def used_bytes(root: Path) -> int:
    found = 0
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):  # retention goes on behind what was copied
            found += path.stat().st_size if path.is_file() else 0
    return found


@pytest.mark.parametrize("codec", ["zstd", "delta"])
def test_what_the_nearest_tier_does_not_take_is_stored_encoded_by_the_next_one(run: Run, codec: str) -> None:
    """As its copies are, with what it has already; and the nearest one goes on when it works."""
    run.start(run.tier(codec=codec, keep={"last": 9}))
    run.save(1)
    run.until_copied(1)
    run.weather[run.near].down("put")
    for step in (2, 3):
        run.save(step)
    committed = [event for event in run.all(SnapshotCommitted) if event.tier == f"file://{run.far}"]
    assert [event.step for event in committed] == [2, 3]
    assert all(event.written_bytes < 24 << 10 for event in committed)
    run.weather[run.near].up()
    run.save(4)
    run.until_copied(4)
    run.close()
    assert decoded_steps(run.far) == [1, 2, 3, 4]
    assert steps(run.near) == [1, 4]


def test_a_further_tier_says_what_its_retention_has_taken_apart(run: Run) -> None:
    """As the nearest one does: a snapshot that has lost a component is another one, and its id is gone."""
    run.start(run.tier(codec="zstd", keep={"last": 9, "components": {"loop": {"last": 1}}}))
    first = run.save(1)
    run.until_copied(1)
    run.save(2)
    said = run.until(lambda one: isinstance(one, SnapshotsForgotten))
    assert isinstance(said, SnapshotsForgotten) and said.snapshots == (first,)
    run.close()
    near, far = (Repository(LocalStorage(root)).ids() for root in (run.near, run.far))
    assert [one.step for one in far] == [one.step for one in near] == [1, 2]
    assert first == near[0].id != far[0].id


def test_a_tier_stores_its_copies_encoded(run: Run) -> None:
    """A third of the bytes or less is sent, the event and the status say how, and the nearest tier stays plain."""
    run.start(run.tier(codec="zstd"), run.tier(run.third))
    for step in (1, 2, 3):
        run.save(step)
        event = run.until_copied(step)
        assert event.sent_bytes < 24 << 10
        assert event.encoding.startswith("zstd: 0.0655 MB → ")
        assert run.until_copied(step, run.third).encoding == ""
    run.close()
    assert steps(run.near) == steps(run.third) == [1, 2, 3]
    assert decoded_steps(run.far) == [1, 2, 3]
    status = read_status(LocalStorage(run.near))
    assert status is not None
    assert [bool(tier.encoding) for tier in status.tiers] == [False, True, False]


def test_a_quota_holds_for_encoded_copies(run: Run) -> None:
    """Old snapshots go for new ones as if nothing could be encoded, so that it holds whatever is in them."""
    quota = 3 * 70_000 + 16_384
    run.start(run.tier(codec="zstd", keep={"last": 9, "quota": quota}), keep={"last": 9})
    for step in range(1, 31):
        run.save(step)
        run.until_copied(step)
        assert used_bytes(run.far) <= quota
    run.close()
    found = decoded_steps(run.far)
    assert found[-1] == 30
    assert len(found) > 3, "encoded ones take less"


def test_a_quota_must_have_room_for_one_snapshot_as_it_is(run: Run) -> None:
    """How far it can be encoded is not known before it is sent."""
    run.start(run.tier(codec="zstd", keep={"last": 9, "quota": 60_000}), drain_seconds=0.5)
    run.save(1)
    degraded = run.until(lambda m: isinstance(m, TierDegraded))
    assert isinstance(degraded, TierDegraded) and degraded.code == StorageFullError.code
    run.close()
    assert decoded_steps(run.far) == []


def test_copies_that_were_cut_short_are_made_again(run: Run) -> None:
    """Data that could not be followed by its manifest is no snapshot, and nothing of it stays in the end."""
    run.start(run.tier(codec="zstd", keep={"last": 1}))
    run.save(1)
    run.until_copied(1)
    run.weather[run.far].down("put")
    run.save(2)
    run.weather[run.far].up()
    run.save(3)
    run.until_copied(3)
    run.close()
    assert decoded_steps(run.far) == [3]
    [info] = Repository(LocalStorage(run.far)).list()
    manifest = Repository(LocalStorage(run.far)).read(info.id)
    assert {path.name for path in (run.far / "data").iterdir()} == {Path(f.name).name for f in manifest.files}


def test_auto_first_measures_and_then_encodes_what_a_slow_link_wants(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy goes as it is; the next one is encoded, with the reason in one line."""
    monkeypatch.setattr(encoded_copy, "LEAST_BYTES", 1000)
    run.start(run.tier(codec="auto", bandwidth_bytes_per_second=300_000.0))
    run.save(1)
    first = run.until_copied(1)
    assert first.encoding == "as it is, to measure the link"
    assert first.sent_bytes > 64 << 10
    run.save(2)
    second = run.until_copied(2)
    assert "values/float32: " in second.encoding and re.search(r" at [\d.]+ [kMG]B/s", second.encoding)
    assert second.sent_bytes < 24 << 10
    run.close()
    assert decoded_steps(run.far) == [1, 2]
    assert [event.step for event in run.all(SnapshotReplicated)] == [1, 2]


class Place:
    """A run with snapshots of one float32 weight, and a far place of it."""

    def __init__(self, root: Path) -> None:
        self.near = Repository(LocalStorage(root / "near"))
        self.near.create_if_absent()
        self.far = adopt_run(RunText.of(self.near), LocalStorage(root / "far"))

    def save(self, step: int) -> str:
        data = np.random.default_rng(step).standard_normal(600_000).astype("<f4").tobytes()
        header = build_header([("w", "F32", (600_000,), len(data))])
        snapshot = names.snapshot_id(step, step)
        file = DataFile(names.data_name(snapshot), len(header) + len(data))
        entry = Entry("float32", (600_000,), (Piece(0, len(header), len(data), digest(data), len(data)),), "F32")
        info = SnapshotInfo(snapshot, step, step, None, "manual", 1.0, len(data))
        self.near.storage.put(file.name, [memoryview(header + data)])
        self.near.commit(Manifest(info, self.near.run_id, {"size": 1}, {}, (file,), {"w": entry}, {}))
        return snapshot


def test_a_codec_that_loses_is_off_after_two_snapshots(tmp_path: Path) -> None:
    """Once the link is faster than the codec, at most two more snapshots are encoded, until it is slow again."""
    place = Place(tmp_path)
    auto = Encoding("auto", clock=iter(range(0, 100_000, 1000)).__next__)
    used = []
    for step, link in enumerate([1e6] * 4 + [1e12] * 4 + [1e6] * 4, 1):
        snapshot = place.save(step)
        pick = auto.pick(place.near, place.near.read(snapshot))
        tally = Tally()
        if pick is not None:
            copy_encoded(place.near, place.far, snapshot, pick, tally)
        used.append(pick("values/float32") if pick is not None else RAW)
        tally.put_bytes, tally.put_seconds = 1 << 21, (1 << 21) / link
        auto.done(tally)
    assert used[0] == RAW, "nothing was measured before"
    assert used[1:4] == ["byteplane-zstd"] * 3
    assert used[6:8] == [RAW, RAW]
    assert used[10:] == ["byteplane-zstd"] * 2
    assert "values/float32: byteplane-zstd" in auto.why


def test_a_codec_that_became_slow_is_off_after_two_snapshots(tmp_path: Path) -> None:
    """What encoding takes is measured while it is in use."""
    place = Place(tmp_path)
    auto = Encoding("auto", clock=iter(range(0, 100_000, 1000)).__next__)
    used = []
    for step in range(1, 8):
        snapshot = place.save(step)
        pick = auto.pick(place.near, place.near.read(snapshot))
        tally = Tally()
        if pick is not None:
            copy_encoded(place.near, place.far, snapshot, pick, tally)
            if step >= 4:
                tally.seconds = dict.fromkeys(tally.seconds, 1000.0)
        used.append(pick("values/float32") if pick is not None else RAW)
        tally.put_bytes, tally.put_seconds = 1 << 21, (1 << 21) / 1e6
        auto.done(tally)
    assert used[:5] == [RAW, *["byteplane-zstd"] * 4]
    assert "byteplane-zstd" not in used[5:]


def test_a_codec_that_does_not_decode_its_own_bytes_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is tried on one piece, both ways, before it is used."""
    place = Place(tmp_path)
    codec = get_codec("byteplane-zstd")
    auto = Encoding("auto")
    tally = Tally()
    tally.put_bytes, tally.put_seconds = 1 << 21, 2.0
    auto.done(tally)
    monkeypatch.setattr(type(codec), "decode", lambda self, stored, out, base: out.cast("B").__setitem__(0, 7))
    pick = auto.pick(place.near, place.near.read(place.save(1)))
    assert pick is None or pick("values/float32") == "zstd"
