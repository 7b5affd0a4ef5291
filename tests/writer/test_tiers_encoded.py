"""Further tiers that store what they get encoded: the same snapshots, within the same limits."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ckpt_engine.copy import codec_selector
from ckpt_engine.copy.codec_selector import CodecSelector, EncodeStats
from ckpt_engine.copy.transfer import RunText, adopt_run, copy_snapshot
from ckpt_engine.errors import StorageFullError
from ckpt_engine.observe.events import SnapshotCommitted, SnapshotReplicated, SnapshotsForgotten, TierDegraded
from ckpt_engine.store import names
from ckpt_engine.store.container import build_header, digest
from ckpt_engine.store.decode import decoder_of
from ckpt_engine.store.manifest import RAW, DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.run_records import read_status
from tests.support.copies import copy_encoded
from tests.writer.staged import weight_bytes
from tests.writer.tiered import Run, steps


def decoded_steps(root: Path) -> list[int]:
    """The steps of all snapshots, whose bytes are those of their step."""
    repository = Repository(LocalStorage(root))
    found = []
    for info in repository.list():
        manifest = repository.read(info.id)
        decoder = decoder_of(repository.storage.get_into, manifest)
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
        assert event.encoding.startswith("zstd: 66 kB → ")
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
    """The first copy is sent as it is; the next one is encoded, with the reason in one line."""
    monkeypatch.setattr(codec_selector, "LEAST_BYTES", 1000)
    run.start(run.tier(codec="auto", bandwidth_bytes_per_second=300_000.0))
    run.save(1)
    first = run.until_copied(1)
    assert first.encoding == "as it is, to measure the link"
    assert first.sent_bytes > 64 << 10
    run.save(2)
    second = run.until_copied(2)
    assert re.match(r"auto: the link takes [\d.]+ [kM]B/s, encoding is faster; 66 kB → ", second.encoding)
    assert second.sent_bytes < 24 << 10
    run.close()
    assert decoded_steps(run.far) == [1, 2]
    assert [event.step for event in run.all(SnapshotReplicated)] == [1, 2]


ARRAYS = {
    "weights": ("bfloat16", "BF16", 2),
    "moments": ("float32", "F32", 4),
    "spectrum": ("complex64", "C64", 8),
    "tokens": ("int64", "I64", 8),
    "mask": ("bool", "BOOL", 1),
}
"""Name: dtype, its name in the file, and bytes of one number."""


class Place:
    """A run with snapshots of arrays of several dtypes, and a far place of it, behind a link whose rate is set."""

    def __init__(self, root: Path) -> None:
        self.near = Repository(LocalStorage(root / "near"))
        self.near.create_if_absent()
        self.far = adopt_run(RunText.of(self.near), LocalStorage(root / "far"))
        self.auto = CodecSelector("auto")
        self.arrays: dict[str, bytes] = {}

    def save(self, step: int) -> str:
        """A new snapshot, of which every array can be compressed by either codec."""
        random = np.random.default_rng(step)
        rows, content = [], {}
        for name, (_, form, width) in ARRAYS.items():
            small = random.standard_normal(40_000).astype("<f4").view("<u4") & 0xFFFF0000
            data = content[name] = small.tobytes()
            rows.append((name, form, (len(data) // width,), len(data)))
        header = build_header(rows)
        snapshot = names.snapshot_id(step, step)
        entries, offset = {}, len(header)
        for name, data in content.items():
            dtype, form, width = ARRAYS[name]
            piece = Piece(0, offset, len(data), digest(data), len(data))
            entries[name] = Entry(dtype, (len(data) // width,), (piece,), form)
            offset += len(data)
        file = DataFile(names.data_name(snapshot), offset)
        info = SnapshotInfo(snapshot, step, step, None, "manual", 1.0, offset - len(header))
        self.near.storage.put(file.name, [memoryview(header + b"".join(content.values()))])
        self.near.commit(Manifest(info, self.near.run_id, {"size": 1}, {}, (file,), entries, {}))
        self.arrays = content
        return snapshot

    def copy(self, step: int, link: float) -> dict[str, str]:
        """Copy a new snapshot as `auto` wants; the link takes `link` bytes per second. The codec of each array."""
        snapshot, tally = self.save(step), EncodeStats()
        pick = self.auto.pick()
        if pick is None:
            copy_snapshot(self.near, self.far, snapshot)
        else:
            copy_encoded(self.near, self.far, snapshot, pick, tally)
        tally.put_bytes, tally.put_seconds = 1 << 21, (1 << 21) / link
        self.auto.done(tally)
        manifest = self.far.read(snapshot)
        decoder = decoder_of(self.far.storage.get_into, manifest)
        for name, data in self.arrays.items():
            [(start, piece)] = manifest.entries[name].placed()
            out = bytearray(len(data))
            decoder.read(name, start, piece, memoryview(out))
            assert bytes(out) == data
        return {name: entry.pieces[0].codec for name, entry in manifest.entries.items()}


PLAIN = dict.fromkeys(ARRAYS, RAW)
SLOW = dict.fromkeys(("weights", "moments", "spectrum"), "byteplane-zstd") | {"tokens": "zstd", "mask": "zstd"}


def test_auto_encodes_numbers_by_planes_and_the_rest_by_zstd_on_a_slow_link(tmp_path: Path) -> None:
    """The first snapshot measures the link; all arrays come back bit for bit."""
    place = Place(tmp_path)
    assert place.copy(1, 1e6) == PLAIN
    assert place.auto.why == "as it is, to measure the link"
    assert place.copy(2, 1e6) == SLOW
    assert place.auto.why.startswith("auto: the link takes 1 MB/s, encoding is faster; 800 kB → ")
    assert "\n" not in place.auto.why


@pytest.mark.parametrize(("share", "wanted"), [(0.01, SLOW), (0.99, SLOW), (1.01, PLAIN), (50, PLAIN)])
def test_auto_has_one_bound(tmp_path: Path, share: float, wanted: dict[str, str]) -> None:
    """Below it all is encoded, above it nothing is."""
    place = Place(tmp_path)
    place.copy(1, share * codec_selector.LINK_BYTES_PER_SECOND)
    assert place.copy(2, share * codec_selector.LINK_BYTES_PER_SECOND) == wanted
    assert place.auto.why.startswith("auto: " if wanted == SLOW else "as it is: the link takes ")


def test_auto_believes_the_best_of_the_last_two_rates(tmp_path: Path) -> None:
    """One slow transfer changes nothing; a link that stays slow, or becomes fast, is noticed."""
    place = Place(tmp_path)
    rates = [1e12, 1e6, 1e6, 1e6, 1e12, 1e6]
    encodes = [place.copy(step, rate) == SLOW for step, rate in enumerate(rates, 1)]
    assert encodes == [False, False, False, True, True, False]


def test_auto_learns_nothing_from_small_transfers() -> None:
    """They measure latency: the link is still to be measured."""
    auto = CodecSelector("auto")
    auto.done(EncodeStats(put_bytes=codec_selector.LEAST_BYTES - 1, put_seconds=10.0))
    assert auto.pick() is None and auto.why == "as it is, to measure the link"
