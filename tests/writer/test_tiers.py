"""Further tiers of a writer: what they get, and when."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path

import pytest

from ckpt_engine.copy import write_snapshot
from ckpt_engine.copy.job import TierConfig, WriterConfig
from ckpt_engine.observe.events import (
    Notice,
    SnapshotFailed,
    SnapshotReplicated,
    SnapshotsForgotten,
    TierDegraded,
)
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository, parse_record
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.launch import ThreadWriter, completed
from tests.writer.passing import until_it_is_back
from tests.writer.staged import WAIT_SECONDS, check_all
from tests.writer.tiered import Run, same_files, sent, steps


def test_snapshots_reach_every_tier_byte_for_byte(run: Run) -> None:
    """Data and manifests are the same files in each place of the run, and each copy is an event."""
    run.start(run.tier(), run.tier(run.third))
    for step in (1, 2, 3):
        name = run.save(step)
        event = run.until_copied(step)
        run.until_copied(step, run.third)
        assert event.snapshot == name
        assert event.sent_bytes > 64 << 10
        assert event.copy_seconds > 0 and event.latency_seconds >= 0
    run.close()
    for path in (run.far, run.third):
        assert steps(path) == [1, 2, 3]
        files = [names.manifest_name(i.id) for i in check_all(path)] + [names.data_name(i.id) for i in check_all(path)]
        assert same_files(run.near, path, [*files, names.RECORD])
    assert run.weather[run.far].puts.index(files[0]) > run.weather[run.far].puts.index(files[3])


def test_each_tier_has_its_own_retention(run: Run) -> None:
    """`keep` of a tier holds there, and only there."""
    run.start(run.tier(keep={"last": 1}), run.tier(run.third, keep={"every_n_steps": 2}), keep={"last": 2})
    for step in range(1, 6):
        run.save(step)
        run.until_copied(step)
        if step % 2 == 0:
            run.until_copied(step, run.third)
    run.close()
    assert steps(run.near) == [4, 5]
    assert steps(run.far) == [5]
    assert [step for step in steps(run.third) if step % 2 == 0] == [2, 4]
    assert len(list((run.far / "data").iterdir())) == 1
    assert {name for event in run.all(SnapshotsForgotten) for name in event.snapshots}


def test_a_tier_has_its_own_rhythm(run: Run) -> None:
    """`every_n_steps` leaves out what is too close, without ever sending it."""
    run.start(run.tier(every_n_steps=10))
    for step in (1, 5, 12, 15, 23):
        run.save(step)
        if step in (1, 12, 23):
            run.until_copied(step)
    run.close()
    assert steps(run.far) == [1, 12, 23]
    assert len([name for name in run.weather[run.far].puts if name.startswith("data/")]) == 3


def test_a_quota_of_a_tier_holds_and_nothing_newer_goes_for_something_older(run: Run) -> None:
    """Where `keep` asks for more than fits, the newest are there, and nothing comes and goes."""
    quota = 2 * 70_000 + 100_000
    run.weather[run.far].down("list")  # before its thread may be looking
    run.start(run.tier(keep={"last": 5, "quota": quota}), keep={"last": 5})
    for step in range(1, 5):
        run.save(step)
    run.weather[run.far].up()
    run.until_copied(4)
    run.until_copied(3)
    for step in (5, 6):
        run.save(step)
        run.until_copied(step)
    run.close()
    assert steps(run.far) == [5, 6]
    assert sent(run) == [4, 3, 5, 6]
    assert sum(p.stat().st_size for p in run.far.rglob("*") if p.is_file()) <= quota
    assert run.all(SnapshotFailed) == []


def test_what_a_limit_removed_is_not_sent_again(run: Run) -> None:
    """A disk that others fill takes a copy and has to give it up: that is not tried over and over."""
    weather = run.weather[run.far]
    weather.free_bytes = plenty = 10**12
    weather.down("list")
    run.start(run.tier(keep={"last": 5, "min_free": 10**9}), keep={"last": 5})
    for step in (1, 2):
        run.save(step)

    def fill(name: str) -> None:
        weather.free_bytes = 10**9 - 1000 if "s0000000001" in name and name.startswith("snapshots/") else plenty

    def relieve() -> None:
        weather.free_bytes = plenty

    weather.after_put, weather.after_delete = fill, relieve
    weather.up()
    run.until_copied(2)
    run.until_copied(1)
    run.save(3)
    run.until_copied(3)
    run.close()
    assert sent(run) == [2, 1, 3]


def test_what_is_being_copied_is_kept_near_for_so_long(run: Run) -> None:
    """Retention spares the source of a copy, and removes it afterwards."""
    weather = run.weather[run.far]
    run.start(keep={"last": 1})
    weather.gate.clear()
    run.save(1)
    assert weather.reached.wait(WAIT_SECONDS)
    run.save(2)
    run.save(3)
    assert steps(run.near) == [1, 3]
    weather.gate.set()
    run.until_copied(1)
    run.until_copied(3)
    run.save(4)
    run.until_copied(4)
    run.close()
    assert steps(run.near) == [4]


def test_a_quota_near_is_kept_even_against_a_copy(run: Run) -> None:
    """Room for the next snapshot comes first: the copy of what has to go is dropped, and the tier gets a newer one."""
    weather = run.weather[run.far]
    run.start(run.tier(keep={"last": 1}), keep={"last": 2, "quota": 3 * 70_000 + 70_000})
    weather.gate.clear()
    run.save(1)
    assert weather.reached.wait(WAIT_SECONDS)
    for step in range(2, 7):
        run.save(step)
    assert 1 not in steps(run.near)
    weather.gate.set()
    run.until_copied(6)
    run.close()
    assert steps(run.far) == [6]
    assert 1 not in [event.step for event in run.all(SnapshotReplicated)]
    assert run.all(SnapshotFailed) == []


def test_damage_is_not_copied(run: Run) -> None:
    """A snapshot that is damaged on the nearest tier is reported and left out; the next one is copied."""
    weather = run.weather[run.far]
    weather.down("list")
    run.start(run.tier(keep={"last": 5}))
    run.until(lambda m: isinstance(m, TierDegraded))
    name = run.save(1)
    assert name is not None
    path = run.near / names.data_name(name)
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    weather.up()
    run.until(lambda m: isinstance(m, Notice) and "damaged" in m.message and name in m.message)
    run.save(2)
    run.until_copied(2)
    run.close()
    assert steps(run.far) == [2]
    assert len([event for event in run.all(Notice) if "damaged" in event.message]) == 1


def test_a_new_machine_continues_the_run_of_the_far_tier(run: Run) -> None:
    """With an empty nearest folder the record is taken over and numbers go on: new snapshots are newer."""
    run.start()
    for step in (1, 2):
        run.save(step)
        run.until_copied(step)
    run.close()
    record = (run.near / names.RECORD).read_bytes()
    for path in sorted(run.near.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run.heard.clear()
    run.start()
    run.save(3)
    run.until_copied(3)
    run.close()
    assert (run.near / names.RECORD).read_bytes() == record == (run.far / names.RECORD).read_bytes()
    assert [(i.seq, i.step) for i in check_all(run.far)] == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("damaged", ["near", "far"])
@pytest.mark.parametrize("has_digest", [True, False])
def test_a_flipped_bit_in_a_run_id_stops_no_replication(run: Run, damaged: str, has_digest: bool) -> None:
    """Neither place becomes "another run": the snapshots say whose they are, and the record is mended."""
    run.start()
    run.save(1)
    run.until_copied(1)
    run.close()
    path = getattr(run, damaged) / names.RECORD
    record = json.loads(path.read_bytes())
    if not has_digest:
        del record["digest"]
    record["run"] = ("0" if record["run"][0] != "0" else "1") + record["run"][1:]
    path.write_text(json.dumps(record) + "\n")
    run.heard.clear()
    run.start()
    run.save(2)
    run.until_copied(2)
    run.close()
    assert run.all(TierDegraded) == []
    assert steps(run.far) == [1, 2]
    assert Repository(LocalStorage(run.near)).run_id == Repository(LocalStorage(run.far)).run_id
    assert parse_record(path.read_bytes(), "here").run == Repository(LocalStorage(run.far)).run_id


def test_one_tier_means_no_thread_and_no_message_more(run: Run) -> None:
    """Without further tiers: the writer, the record of attempts, and per job what the protocol says."""
    config = completed(WriterConfig(str(run.near), keep={"last": 2}))
    before = set(threading.enumerate())
    run.client = client = ThreadWriter.start(config)
    run.stage.share(client)
    run.save(1)
    until_it_is_back(f"file://{run.near}")
    assert {thread.name for thread in set(threading.enumerate()) - before} == {"ckpt-writer", "ckpt-attempt"}
    assert [type(message).__name__ for message in run.heard] == ["SnapshotCommitted", "JobDone"]
    run.close()
    assert [type(message).__name__ for message in run.heard] == ["SnapshotCommitted", "JobDone"]
    assert not (run.near / names.STATUS).exists()


def test_further_tiers_add_the_threads_of_the_page(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between snapshots one for each tier and one for their status; all that was ever started is on the page."""
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    begun: set[str] = set()
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (begun.add(self.name), start(self))[1])
    monkeypatch.setattr(write_snapshot, "THREAD_BYTES", 0)
    before = set(threading.enumerate())
    run.start(run.tier(), run.tier(run.third, codec="zstd"))
    run.save(1)
    run.until_copied(1)
    run.until_copied(1, run.third)
    lasting = ["ckpt-attempt", "ckpt-replicate", "ckpt-replicate", "ckpt-status", "ckpt-writer"]
    deadline = time.monotonic() + WAIT_SECONDS
    while sorted(one.name for one in set(threading.enumerate()) - before) != lasting:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.005)
    names = {found[0] if (found := re.match(r"ckpt-[a-z]+", one)) else one for one in begun}
    assert names >= {"ckpt-tier", "ckpt-digest", "ckpt-encode", *lasting}
    assert sorted(one for one in names if f"`{one}" not in page) == []


def test_no_secret_is_written_or_shown(run: Run) -> None:
    """What a tier's storage needs to know is in no repr and in no file."""
    tier = TierConfig("s3://b/r", storage_options={"secret": "hunter2"})
    config = WriterConfig("/x", storage_options={"secret": "hunter2"}, tiers=(tier,))
    assert "hunter2" not in repr(config)
    assert os.fspath(run.near) not in repr(config)
