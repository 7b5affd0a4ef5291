"""Further tiers of a writer: what they get, when they fail, and that nobody waits for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import StorageError, WriterError
from ckpt_engine.observe.events import (
    Notice,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotReplicated,
    SnapshotsForgotten,
    TierDegraded,
    TierRecovered,
)
from ckpt_engine.persist import fleet, writer
from ckpt_engine.persist.client import completed
from ckpt_engine.persist.job import TierConfig, WriterConfig
from ckpt_engine.persist.mailbox import Message
from ckpt_engine.persist.replicate import Backoff
from ckpt_engine.persist.status import AWAY, WORKING, read_status
from ckpt_engine.persist.thread import ThreadWriter
from ckpt_engine.store import layout
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.storage.open import open_storage
from tests.persist.faulty import Faulty, Weather
from tests.persist.staged import WAIT_SECONDS, Stage, check_all, outcome
from tests.store.samples import save


class Run:
    """A writer thread on a near folder and a far one, each under its own weather."""

    def __init__(self, root: Path, stage: Stage) -> None:
        self.near, self.far, self.third = root / "near", root / "far", root / "third"
        self.weather = {path: Weather() for path in (self.near, self.far, self.third)}
        self.stage = stage
        self.heard: list[Message] = []
        self.client: ThreadWriter | None = None

    def open_storage(self, url: Any, options: Any = None) -> Any:
        path = Path(str(url).removeprefix("file://"))
        return Faulty(path, self.weather[path]) if path in self.weather else open_storage(url, options or {})

    def start(self, *tiers: TierConfig, **changes: Any) -> ThreadWriter:
        fields: dict[str, Any] = {"url": str(self.near), "drain_seconds": 30.0, "tiers": tiers or (self.tier(),)}
        self.client = ThreadWriter.start(completed(WriterConfig(**{**fields, **changes})))
        self.stage.share(self.client)
        return self.client

    def tier(self, path: Path | None = None, **changes: Any) -> TierConfig:
        return TierConfig(str(path or self.far), **changes)

    def save(self, step: int, *, ok: bool = True, **changes: Any) -> str | None:
        assert self.client is not None
        job = self.stage.job(step, **changes)
        self.client.submit(job)
        done = outcome(self.client, job.job, self.heard)
        assert done.ok is ok, done
        assert self.client.drain(WAIT_SECONDS)  # retention too
        return done.snapshot_id

    def until(self, found: Callable[[Message], bool]) -> Message:
        """Wait until something like this was heard since the start or the last `forget`."""
        assert self.client is not None
        seen = 0
        for _ in range(int(WAIT_SECONDS)):
            for message in self.heard[seen:]:
                if found(message):
                    return message
            seen = len(self.heard)
            self.client.wait(1.0)
            self.heard += self.client.poll()
        raise AssertionError(f"never heard; only {self.heard}")

    def until_copied(self, step: int, path: Path | None = None) -> SnapshotReplicated:
        url = f"file://{path or self.far}"
        found = self.until(lambda m: isinstance(m, SnapshotReplicated) and m.step == step and m.tier == url)
        assert isinstance(found, SnapshotReplicated)
        return found

    def all(self, kind: type) -> list[Any]:
        if self.client is not None:
            self.heard += self.client.poll()
        return [message for message in self.heard if isinstance(message, kind)]

    def close(self) -> None:
        if self.client is not None:
            for weather in self.weather.values():
                weather.gate.set()
            assert self.client.close(WAIT_SECONDS)
            self.heard += self.client.poll()
            assert self.client._worker.join(WAIT_SECONDS)
            self.client = None


@pytest.fixture
def run(tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run that tries a failing tier again at once."""
    made = Run(tmp_path, stage)
    monkeypatch.setattr(fleet, "open_storage", made.open_storage)
    monkeypatch.setattr(writer, "open_storage", made.open_storage)
    monkeypatch.setattr(fleet, "BACKOFF", Backoff(0.01, 0.02))
    yield made
    for weather in made.weather.values():
        weather.up()
    made.close()


def steps(root: Path) -> list[int]:
    return [info.step for info in check_all(root)]


def same_files(one: Path, other: Path, names: list[str]) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


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
        files = [layout.manifest_name(i.id) for i in check_all(path)] + [
            layout.data_name(i.id) for i in check_all(path)
        ]
        assert same_files(run.near, path, [*files, layout.RECORD])
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


def test_a_failing_tier_is_told_once_and_catches_up_newest_first(run: Run) -> None:
    """Snapshots go on; when it is back it gets the newest one, and not the ones that are obsolete by then."""
    run.start(run.tier(keep={"last": 2}), keep={"last": 3})
    run.save(1)
    run.until_copied(1)
    run.weather[run.far].down()
    for step in (2, 3, 4, 5):
        run.save(step)
        run.until(lambda m: isinstance(m, TierDegraded))
    assert steps(run.near) == [3, 4, 5]
    (degraded,) = run.all(TierDegraded)
    assert (degraded.tier, degraded.code, degraded.fatal) == (f"file://{run.far}", "CKPT300", False)
    assert "the network is down" in degraded.message
    assert run.all(SnapshotFailed) == []
    status = read_status(LocalStorage(run.near))
    assert status is not None
    assert [tier.state for tier in status.tiers] == [WORKING, AWAY]
    assert status.tiers[1].code == "CKPT300"
    run.weather[run.far].up()
    run.until_copied(5)
    run.until(lambda m: isinstance(m, TierRecovered) and m.away_seconds > 0)
    run.until_copied(4)
    run.close()
    assert steps(run.far) == [4, 5]
    assert [event.step for event in run.all(SnapshotReplicated)] == [1, 5, 4]


@pytest.mark.parametrize("what", ["put", "list", "delete"])
def test_every_operation_of_a_tier_may_fail(run: Run, what: str) -> None:
    """Whatever fails there, the near tier is as it would be, and afterwards the far one is too."""
    run.start(run.tier(keep={"last": 1}))
    run.save(1)
    run.until_copied(1)
    run.weather[run.far].down(what)
    run.save(2)
    if what == "delete":
        run.until_copied(2)
    else:
        run.until(lambda m: isinstance(m, TierDegraded))
    run.weather[run.far].up()
    run.save(3)
    run.until_copied(3)
    run.close()
    assert steps(run.near) == [1, 2, 3]
    assert steps(run.far) == [3]


def sent(run: Run) -> list[int]:
    """The steps of all manifests put to the far tier, in order."""
    parsed = [layout.manifest_id(name) for name in run.weather[run.far].puts]
    return [one.step for one in parsed if one]


def test_a_quota_of_a_tier_holds_and_nothing_newer_goes_for_something_older(run: Run) -> None:
    """Where `keep` asks for more than fits, the newest are there, and nothing comes and goes."""
    quota = 2 * 70_000 + 100_000
    run.start(run.tier(keep={"last": 5, "quota": quota}), keep={"last": 5})
    run.weather[run.far].down("list")
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
    run.start(run.tier(keep={"last": 5, "min_free": 10**9}), keep={"last": 5})
    weather.down("list")
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


def test_nobody_waits_for_a_tier_that_hangs(run: Run) -> None:
    """Snapshots become durable near while a copy hangs; then the newest follows and those between are left out."""
    weather = run.weather[run.far]
    run.start(run.tier(keep={"last": 1}))
    weather.gate.clear()
    run.save(1)
    assert weather.reached.wait(WAIT_SECONDS)
    for step in (2, 3, 4):
        run.save(step)
    assert run.all(SnapshotReplicated) == []
    status = read_status(LocalStorage(run.near))
    assert status is not None and status.tiers[1].copying is not None
    weather.gate.set()
    run.until_copied(4)
    run.close()
    assert [event.step for event in run.all(SnapshotReplicated)] == [1, 4]


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


def test_when_the_nearest_tier_fails_the_next_one_takes_its_place(run: Run) -> None:
    """A snapshot is durable if any tier takes it; the near one is degraded, told once, and used again when it works."""
    run.start(run.tier(keep={"last": 2}), keep={"last": 5})
    run.save(1)
    run.until_copied(1)
    run.weather[run.near].down("put")
    for step in (2, 3, 4):
        assert run.save(step) is not None
    assert [event.tier for event in run.all(SnapshotCommitted)] == [str(run.near), *[f"file://{run.far}"] * 3]
    assert [event.tier for event in run.all(TierDegraded)] == [f"file://{run.near}"]
    assert run.all(SnapshotFailed) == []
    run.weather[run.near].up()
    run.save(5)
    run.until(lambda m: isinstance(m, TierRecovered) and m.tier == f"file://{run.near}")
    run.until_copied(5)
    run.close()
    assert steps(run.near) == [1, 5]
    assert steps(run.far) == [4, 5]


def test_a_snapshot_fails_when_no_tier_takes_it(run: Run) -> None:
    """Then the error is that of the nearest one."""
    run.start()
    run.save(1)
    run.until_copied(1)
    run.weather[run.near].down("put")
    run.weather[run.far].down("put")
    run.save(2, ok=False)
    (failed,) = run.all(SnapshotFailed)
    assert failed.tier == str(run.near)
    assert {event.tier for event in run.all(TierDegraded)} == {f"file://{run.near}", f"file://{run.far}"}


def test_on_failure_fail_keeps_a_snapshot_from_going_elsewhere(run: Run) -> None:
    """A nearest tier that must not be replaced makes the snapshot fail."""
    run.start(run.tier(fatal=True), fatal=True)
    run.save(1)
    run.until_copied(1)
    run.weather[run.near].down("put")
    run.save(2, ok=False)
    run.weather[run.near].up()
    run.weather[run.far].down()
    run.save(3)
    event = run.until(lambda m: isinstance(m, TierDegraded) and m.tier == f"file://{run.far}")
    assert isinstance(event, TierDegraded) and event.fatal


def test_damage_is_not_copied(run: Run) -> None:
    """A snapshot whose bytes have rotted near is told and left out; the next one is copied."""
    weather = run.weather[run.far]
    run.start(run.tier(keep={"last": 5}))
    weather.down("list")
    name = run.save(1)
    run.until(lambda m: isinstance(m, TierDegraded))
    assert name is not None
    path = run.near / layout.data_name(name)
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


def test_a_place_of_another_run_is_left_alone(run: Run) -> None:
    """Its snapshots and its record stay as they are, and the tier is told as failed."""
    other = Repository(LocalStorage(run.far))
    theirs = save(other, 7)
    save(Repository(LocalStorage(run.near)), 1)
    before = {p: p.read_bytes() for p in run.far.rglob("*") if p.is_file() and p.name != layout.LEASE}
    run.start()
    run.save(8)
    event = run.until(lambda m: isinstance(m, TierDegraded))
    assert isinstance(event, TierDegraded) and event.code == "CKPT402"
    run.close()
    assert {p: p.read_bytes() for p in before} == before
    assert [one.id for one in other.list()] == [theirs]


def test_a_new_machine_continues_the_run_of_the_far_tier(run: Run) -> None:
    """With an empty near folder the record is taken over and numbers go on: new snapshots are newer."""
    run.start()
    for step in (1, 2):
        run.save(step)
        run.until_copied(step)
    run.close()
    record = (run.near / layout.RECORD).read_bytes()
    for path in sorted(run.near.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run.heard.clear()
    run.start()
    run.save(3)
    run.until_copied(3)
    run.close()
    assert (run.near / layout.RECORD).read_bytes() == record == (run.far / layout.RECORD).read_bytes()
    assert [(i.seq, i.step) for i in check_all(run.far)] == [(1, 1), (2, 2), (3, 3)]


def test_numbers_leave_room_for_a_tier_that_does_not_answer(run: Run) -> None:
    """What it may have must not look newer than what is written now."""
    run.weather[run.far].down()
    run.start()
    run.save(1)
    assert check_all(run.near)[0].seq == 1 + fleet.UNKNOWN_SEQ_GAP
    run.save(2, parent="00999999-s0000000009-00000000")
    assert check_all(run.near)[-1].seq == 1_000_000


def test_a_lease_held_by_another_job_is_waited_for(run: Run) -> None:
    """Two jobs never write one place: the tier is away until the other one is done."""
    run.start()
    run.save(1)
    run.until_copied(1)
    run.close()
    run.heard.clear()
    with acquire(LocalStorage(run.far)):
        run.start()
        run.save(2)
        event = run.until(lambda m: isinstance(m, TierDegraded))
        assert isinstance(event, TierDegraded) and event.code == "CKPT500"
        assert steps(run.far) == [1]
    run.until_copied(2)


def test_a_tier_whose_folder_is_removed_starts_again(run: Run) -> None:
    """It gets the newest snapshot anew."""
    run.start(run.tier(keep={"last": 1}))
    run.save(1)
    run.until_copied(1)
    for path in sorted(run.far.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run.save(2)
    run.until_copied(2)
    run.close()
    assert steps(run.far) == [2]


def test_a_nearest_folder_that_is_removed_is_made_again(run: Run) -> None:
    """A disk that was mounted anew is a place of the run at the next snapshot; numbers go on."""
    run.start()
    run.save(1)
    run.until_copied(1)
    run.near.rename(run.near.with_name("gone"))
    run.save(2)
    run.until_copied(2)
    run.close()
    assert [(i.seq, i.step) for i in check_all(run.near)] == [(2, 2)]
    assert [(i.seq, i.step) for i in check_all(run.far)] == [(1, 1), (2, 2)]
    assert same_files(run.near, run.far, [layout.RECORD])


def test_a_writer_that_takes_over_does_not_wait_for_a_tier(run: Run) -> None:
    """A new writer in the middle of training is ready at once, though a tier hangs."""
    run.start()
    run.save(1)
    run.until_copied(1)
    run.close()
    run.heard.clear()
    hanging = run.weather[run.far].hang("list")
    run.start()  # would take the survey's time otherwise
    assert not hanging.is_set()
    hanging.set()
    run.save(2)
    run.until_copied(2)


def test_closing_waits_for_copies_but_not_for_a_tier_that_fails(run: Run) -> None:
    """What is under way is finished; after one more failure the writer goes on by itself, and says so."""
    client = run.start(drain_seconds=30.0)
    run.weather[run.far].down("put")
    run.save(1)
    run.until(lambda m: isinstance(m, TierDegraded))
    assert client.close(WAIT_SECONDS)
    run.heard += client.poll()
    notice = run.until(lambda m: isinstance(m, Notice) and "goes on with it" in m.message)
    assert isinstance(notice, Notice) and str(run.far) in notice.message
    with acquire(LocalStorage(run.near)):
        pass  # the near tier is free for the next job already
    run.weather[run.far].up()
    assert client._worker.join(WAIT_SECONDS)
    assert steps(run.far) == [1]
    status = read_status(LocalStorage(run.near))
    assert status is not None and status.ended
    run.client = None


def test_draining_is_bounded(run: Run) -> None:
    """A tier that stays away is given up after `drain_seconds`; its lease is given back."""
    client = run.start(drain_seconds=0.2)
    run.weather[run.far].down("put")
    run.save(1)
    run.until(lambda m: isinstance(m, TierDegraded))
    assert client.close(WAIT_SECONDS)
    assert client._worker.join(WAIT_SECONDS)
    run.client = None
    with acquire(LocalStorage(run.far)):
        assert steps(run.far) == []


def test_a_copy_can_be_stopped_in_the_middle(run: Run) -> None:
    """`skip_waiting` ends a copy under way; nothing of it is seen."""
    client = run.start()
    run.weather[run.far].gate.clear()
    run.save(1)
    assert run.weather[run.far].reached.wait(WAIT_SECONDS)
    client._worker.skip_waiting()
    assert client._worker.join(WAIT_SECONDS)
    client.close(WAIT_SECONDS)
    run.client = None
    assert steps(run.far) == []
    assert list((run.far / "data").glob("*")) == []


def test_a_url_that_nothing_serves_is_refused_at_the_start(run: Run) -> None:
    """A mistake in a further tier is not found out by an outage."""
    with pytest.raises(StorageError, match="no storage for s4://"):
        run.start(TierConfig("s4://bucket/run"))
    with pytest.raises(WriterError, match="retention"):
        run.start(run.tier(keep={"last": 0, "best": {"monitor": "x", "mode": "up"}}))
    with acquire(LocalStorage(run.near)):
        pass


def test_one_tier_means_no_thread_and_no_message_more(run: Run) -> None:
    """Without further tiers the writer is as it was: one thread, and per job what the protocol says."""
    config = completed(WriterConfig(str(run.near), keep={"last": 2}))
    before = set(threading.enumerate())
    run.client = client = ThreadWriter.start(config)
    run.stage.share(client)
    run.save(1)
    assert {thread.name for thread in set(threading.enumerate()) - before} == {"ckpt-writer"}
    assert [type(message).__name__ for message in run.heard] == ["SnapshotCommitted", "JobDone"]
    run.close()
    assert [type(message).__name__ for message in run.heard] == ["SnapshotCommitted", "JobDone"]
    assert not (run.near / layout.STATUS).exists()


def test_no_secret_is_written_or_told(run: Run) -> None:
    """What a tier's storage needs to know is in no repr and in no file."""
    tier = TierConfig("s3://b/r", storage_options={"secret": "hunter2"})
    config = WriterConfig("/x", storage_options={"secret": "hunter2"}, tiers=(tier,))
    assert "hunter2" not in repr(config)
    assert os.fspath(run.near) not in repr(config)
